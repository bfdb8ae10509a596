"""What a cache layer holds of each token, and where: the axes of rows and of tokens in each of its tensors.

Shapes: B rows, L slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.errors import TreeSpecError

__all__ = ["Axes", "forget_states", "held_states", "learn_states", "states_of", "take_rows"]


class Axes(NamedTuple):
    """Where a tensor of a layer has its rows and tokens.

    Attributes:
        rows: axis of the batch.
        tokens: axis of the slots.
        owned: whether only the layer holds the tensor, so that it may be written in place.
    """

    rows: int
    tokens: int
    owned: bool = True


_KEYS_VALUES = {"keys": Axes(0, -2), "values": Axes(0, -2)}
# The positions are the model's own tensor until a second forward joins them with others.
_INDEXER = {"indexer_keys": Axes(0, 1), "indexer_position_ids": Axes(1, -1, owned=False)}
_STATES: dict[type, dict[str, Axes]] = {
    _compat.DynamicLayer: _KEYS_VALUES,
    _compat.DynamicSlidingWindowLayer: _KEYS_VALUES,
    _compat.StaticLayer: _KEYS_VALUES,
    _compat.StaticSlidingWindowLayer: _KEYS_VALUES,
    _compat.DynamicIndexedLayer: {**_KEYS_VALUES, **_INDEXER},
    _compat.StaticIndexedLayer: {**_KEYS_VALUES, **_INDEXER},
}
_LEARNED: dict[type, dict[str, Axes]] = {}


def states_of(cls: type) -> dict[str, Axes] | None:
    """Name and axes of every tensor of layers of this exact class, or None if they are not known."""
    return _STATES.get(cls, _LEARNED.get(cls))


def learn_states(cls: type, states: dict[str, Axes]) -> None:
    """Remember what a trial has found about a class that is not known by name."""
    _LEARNED[cls] = states


def forget_states(cls: type) -> None:
    """Undo `learn_states`."""
    _LEARNED.pop(cls, None)


def held_states(layer: Any) -> Iterator[tuple[str, Tensor, Axes]]:
    """The tensors that a layer of a known class holds by now; none for a layer that the model never fills.

    Raises:
        TreeSpecError: if the class is not known.
    """
    known = states_of(type(layer))
    if known is None:
        raise TreeSpecError(f"what cache layers of class {type(layer).__name__} hold is not known")
    for name, axes in known.items():
        states = getattr(layer, name, None)
        if isinstance(states, Tensor) and states.numel():
            yield name, states, axes


def take_rows(layer: Any, rows: Sequence[int]) -> None:
    """Rows `rows` of everything a layer holds, in new storage or, for copies of one row, as a view."""
    index: Tensor | None = None
    for name, states, axes in held_states(layer):
        if states.shape[axes.rows] == 1:
            # `update` concatenates, so that nothing is ever written to these copies.
            shape = list(states.shape)
            shape[axes.rows] = len(rows)
            taken = states.expand(shape)
        else:
            if index is None or index.device != states.device:
                index = torch.tensor(list(rows), device=states.device)
            taken = states.index_select(axes.rows, index)
        setattr(layer, name, taken)
