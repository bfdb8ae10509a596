"""Tree masks through transformers' mask registry.

A model asks the registry for the mask of each of its layer kinds (full, sliding, chunked, ...) and passes a predicate
over (row, head, query position, key position). While a tree is active the wrapper evaluates that predicate at *tree*
positions and intersects it with "the key is an ancestor". So one path serves every kind of layer.

Shapes: B rows, R rows or one for all, Q queries of this forward, M tree slots in the cache (this forward's included),
K keys of the layer.
A *physical index* counts cache slots from 0; slots from `base` on are tree slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.attention.shared import held, replaced
from hf_treespec.errors import TreeSpecError

__all__ = ["TreeContext", "active_tree", "tree_forward_context", "tree_masks"]


@dataclass(frozen=True, slots=True)
class TreeContext:
    """The tree of one forward.

    Args:
        base: physical length of the committed part of the cache.
        depths_BQ: int64, how many positions each query lies behind the last committed slot.
        slot_depths_BM: int64, the same for every tree slot.
        visible_BQM: bool, whether the query may see the tree slot: itself and its ancestors.
        keys: slots of a layer that forgets nothing, with this forward's and any spare ones; None if not known.
        shorter_B: int64, how many slots the committed part of each row is shorter than `base`, where the tree of each
            begins right behind it; None if all are as long.
        seen: what corrections by depth, and the kernels, keep from one layer or forward of this tree for the next.
        words_BNW: the same as `visible_BQM` in words, as `hf_treespec.tree.layout` packs them; None if not made.
        padded_left: whether what is masked of the committed slots of each row lies before all others.
    """

    base: int
    depths_BQ: Tensor
    slot_depths_BM: Tensor
    visible_BQM: Tensor
    keys: int | None = None
    shorter_B: Tensor | None = None
    seen: dict[Any, Any] = field(default_factory=dict)
    padded_left: bool = False
    words_BNW: Tensor | None = None


_ACTIVE: ContextVar[TreeContext | None] = ContextVar("hf_treespec_tree", default=None)


@contextmanager
def tree_masks() -> Iterator[None]:
    """Keep the wrapper registered while at least one call needs it; other threads fall through to the original."""
    with held("tree masks", _wrap):
        yield


def _wrap() -> Callable[[], None]:
    get, register = _compat.mask_function_of, _compat.register_mask_function
    undone = [
        replaced(name, get, register, partial(_dispatch, get(name), name == "eager"))
        for name in _compat.MASK_IMPLEMENTATIONS
    ]

    def undo() -> None:
        for one in undone:
            one()

    return undo


def active_tree() -> TreeContext | None:
    """The tree of the forward that is running, or None for a plain one."""
    return _ACTIVE.get()


@contextmanager
def tree_forward_context(context: TreeContext | None) -> Iterator[None]:
    """Make `context` the tree of the forwards inside; None is a plain forward."""
    token = _ACTIVE.set(context)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def _dispatch(original: Callable[..., Any], additive: bool, *args: Any, **kwargs: Any) -> Any:
    context = _ACTIVE.get()
    if context is None:
        return original(*args, **kwargs)
    if args:
        raise TreeSpecError(f"mask builder called with {len(args)} positional arguments; expected keywords only")
    return _tree_mask(context, additive, **kwargs)


def _tree_mask(
    context: TreeContext,
    additive: bool,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """Mask [B, 1, Q, K]: bool for sdpa, additive for eager (where a bool mask would be added as 0 and 1)."""
    rows, queries = context.depths_BQ.shape
    if (batch_size, q_length) != (rows, queries):
        raise TreeSpecError(
            f"a mask for batch {batch_size} and {q_length} queries was asked for during a tree forward of batch "
            f"{rows} and {queries} nodes; the model builds masks for other inputs than its tokens and takes no tree"
        )
    slots = context.slot_depths_BM.shape[1]
    # Where the tree of a row begins: one slot for all, or int64 [B, 1].
    base: int | Tensor = context.base
    if context.shorter_B is not None:
        base = base - context.shorter_B.to(device)[:, None]
    key_RK = (torch.arange(kv_length, device=device) + kv_offset)[None]
    slot_BK = (key_RK - base).clamp(0, slots - 1).expand(rows, -1)
    in_tree_RK = key_RK >= base
    slot_depths_BM = context.slot_depths_BM.to(device).expand(rows, -1)
    key_position_BK = torch.where(in_tree_RK, base + slot_depths_BM.gather(1, slot_BK), key_RK)
    query_position_BQ = base + context.depths_BQ.to(device)
    row = torch.arange(batch_size, device=device)[:, None, None, None]
    head = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
    allowed = mask_function(row, head, query_position_BQ[:, None, :, None], key_position_BK[:, None, None, :])
    visible_BQM = context.visible_BQM.to(device).expand(rows, -1, -1)
    ancestor_BQK = visible_BQM.gather(2, slot_BK[:, None].expand(-1, queries, -1))
    # Slots behind the tree hold nothing: spare room, or the ends of longer rows.
    inside_RK = in_tree_RK & (key_RK < base + slots)
    allowed = allowed & torch.where(inside_RK[:, None], ancestor_BQK, ~in_tree_RK[:, None])[:, None]
    if attention_mask is not None:
        real_BK = attention_mask.to(device)[:, key_RK[0].clamp(max=attention_mask.shape[1] - 1)].bool()
        allowed = allowed & (real_BK | in_tree_RK)[:, None, None, :]
    allowed = allowed.expand(batch_size, 1, q_length, kv_length)
    if not additive:
        return allowed
    zero = torch.zeros((), device=allowed.device, dtype=dtype)
    return torch.where(allowed, zero, torch.finfo(dtype).min)
