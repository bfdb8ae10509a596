"""Corrections for models that count by cache slots, by the route of the model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from hf_treespec.attention.biases import biases_by_depth
from hf_treespec.attention.sites import positions_by_depth
from hf_treespec.errors import TreeSpecError
from hf_treespec.routes import Route

__all__ = ["counted_by_depth"]


def counted_by_depth(model: nn.Module, route: Route, position_names: Sequence[str]) -> AbstractContextManager[None]:
    """A context in which tree forwards count by depth what the model counts by slots.

    Args:
        model: the model.
        route: how trees enter it; on all other routes nothing needs correction.
        position_names: modules that make embeddings of positions, for `Route.POSITION_HOOK`.
    """
    if route is Route.POSITION_HOOK:
        if not position_names:
            raise TreeSpecError(f"{type(model).__name__}: no module is known to make its embeddings of positions")
        return positions_by_depth(model, position_names)
    if route is Route.ALIBI:
        return biases_by_depth(model)
    return nullcontext()
