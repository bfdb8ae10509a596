"""The target's own cache as the cache of a draft that is the target without some of its layers.

What the target has read, such a draft need not read again: it attends to the target's keys and values. Its own tokens
lie behind them for the length of a transaction that is never committed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.cache.layers import DENSE, QUANTIZED, SLIDING, STATIC, TREE, layer_kind
from hf_treespec.cache.rows import CacheTransaction, RowCache
from hf_treespec.cache.tree_layer import TreeLayer
from hf_treespec.errors import UnsupportedCallError

__all__ = ["check_readable", "committed_states", "lent", "right_aligned"]


@contextmanager
def lent(rows: RowCache, read: Collection[int]) -> Iterator[CacheTransaction]:
    """Let forwards read behind the committed text; afterwards the cache is what it was.

    A layer that is not read does not grow, but the model may ask it how long the text is, on behalf of others of its
    kind. So one of these answers for it.

    Args:
        rows: the cache.
        read: numbers of the layers that the forwards read.
    """
    layers = rows.layers
    with rows.transaction() as transaction:
        own = list(layers)
        answers: dict[tuple[Any, ...], Any] = {}
        for number, layer in enumerate(own):
            if number in read:
                answers.setdefault(_kind(layer), layer)
        try:
            for number, layer in enumerate(own):
                if number not in read:
                    layers[number] = answers.get(_kind(layer), layer)
            yield transaction
        finally:
            layers[:] = own


def _kind(layer: Any) -> tuple[Any, ...]:
    return type(layer), getattr(layer, "sliding_window", None), getattr(layer, "max_cache_len", None)


def check_readable(cache: Any, layers: Collection[int], reader: str) -> None:
    """Refuse a cache whose keys and values cannot be read between two forwards.

    Args:
        cache: of the call, or None.
        layers: numbers of the layers that are read.
        reader: what reads them.

    Raises:
        UnsupportedCallError: naming the class of a layer.
    """
    own = getattr(cache, "layers", [])
    odd = {type(own[number]).__name__ for number in layers if number < len(own) and not _is_readable(own[number])}
    if odd:
        raise UnsupportedCallError(
            f"a {reader} reads keys and values of its target, and those of cache layers of class "
            f"{', '.join(sorted(odd))} cannot be told; pass a DynamicCache, or leave assistant_model out to draft by "
            "n-grams"
        )


def _is_readable(layer: Any) -> bool:
    return layer_kind(layer) in (DENSE, SLIDING, STATIC, QUANTIZED, TREE)


def committed_states(rows: RowCache, number: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[B, H, L, D]` of the committed tokens in one layer, or the last of them that it holds.

    All rows end at the last slot; see `right_aligned` for their mask. Nothing is copied unless rows of a `TreeCache`
    have parted, and nothing must be written to.

    Args:
        rows: the cache, outside of any transaction.
        number: of the layer.
    """
    layer = rows.layers[number]
    kind = layer_kind(layer)
    if kind == QUANTIZED:
        return _compat.dequantized(layer)
    keys, values = layer.keys, layer.values
    if kind == STATIC:
        keys, values = (states.narrow(-2, 0, rows.physical) for states in (keys, values))
    elif kind == TREE:
        keys, values = _last_of_rows(layer, keys, values)
    return keys, values


def _last_of_rows(layer: TreeLayer, *held: Tensor) -> tuple[Tensor, ...]:
    """What a sliding layer of transformers has of them, or all: the last tokens of each row, by its own length."""
    count = int(held[0].shape[2])
    if layer.sliding_window is not None:
        count = min(count, layer.sliding_window - 1)
    if len(set(layer.lengths)) <= 1:
        return tuple(states[:, :, states.shape[2] - count :] for states in held)
    index_BL = _from_the_right(layer.lengths, layer.physical, held[0].device)[:, layer.physical - count :]
    index_BL = (index_BL - layer.dropped).clamp(min=0)
    row_B1 = torch.arange(len(index_BL), device=index_BL.device)[:, None]
    return tuple(states[row_B1, :, index_BL].transpose(1, 2) for states in held)


def right_aligned(rows: RowCache, mask: Tensor | None) -> Tensor | None:
    """The mask `[B, L]` of the committed slots as `committed_states` has them, with zeros before shorter rows.

    Args:
        rows: the cache, outside of any transaction.
        mask: of its slots, or None if nothing is masked.
    """
    lengths = next((layer.lengths for layer in rows.layers if isinstance(layer, TreeLayer) and layer.lengths), ())
    if mask is None or len(set(lengths)) <= 1:
        return mask
    index_BL = _from_the_right(lengths, int(mask.shape[1]), mask.device)
    return mask.gather(1, index_BL.clamp(min=0)) * (index_BL >= 0)


def _from_the_right(lengths: Sequence[int], physical: int, device: torch.device) -> Tensor:
    """int64 `[B, L]`, the slot that comes to each place; negative where a row has none."""
    shorter_B = torch.tensor([physical - length for length in lengths], device=device)
    return torch.arange(physical, device=device) - shorter_B[:, None]
