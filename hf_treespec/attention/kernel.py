"""The target's trees by the kernel of `treespec_kernels`, everything else by the model's own attention.

A model is switched to a name of ours, under which two functions are registered. The mask builder gives each kind of
layer either the model's own mask, or, for a whole tree behind a prefix that the kernel can describe, a small tensor
that only says where the text of each row begins. The attention function sees by that tensor which of the two it has.

Shapes: B rows, H query heads, G key heads, N nodes, K keys of the layer, D head dimension, W words of a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.attention.masks import TreeContext, active_tree
from hf_treespec.attention.shared import held
from hf_treespec.errors import TreeSpecError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["KERNEL", "kernel_attention"]

KERNEL = "treespec"


@dataclass(slots=True)
class _Plan:
    """What all layers share of one tree.

    Args:
        words_BNW: packed ancestors.
        views: of each kind of layer, the number of committed keys of the longest row and the window. The tensor that
            such a layer gets as its mask has as many channels as its place here, counted from one: that survives
            whatever a model or the hooks of its modules do to masks.
        lengths: by the keys of the longest row and the device, what `_lengths` made.
    """

    words_BNW: Tensor
    views: list[tuple[int, int]] = field(default_factory=list)
    lengths: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)


@contextmanager
def kernel_attention(model: PreTrainedModel) -> Iterator[None]:
    """Run the model with the kernel for whole trees; it gets its own attention back on every exit.

    Args:
        model: whose own attention takes tree masks, and that runs an attention function in its place.
    """
    own = _compat.attention_implementation(model)
    name = f"{KERNEL}_{own}"
    with held(("attention", name), partial(_register, name, own)), _compat.switch_attention(model, name):
        yield


def _register(name: str, own: str) -> Callable[[], None]:
    return _compat.add_attention(name, partial(_attend, own), partial(_mask, own))


def _mask(own: str, **kwargs: Any) -> Any:
    tree = active_tree()
    starts = None if tree is None else _starts(tree, **kwargs)
    return _compat.mask_function_of(own)(**kwargs) if starts is None else starts


def _starts(
    tree: TreeContext,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor | None:
    """Int32 `[B, C, 1, 1]`, the key with which the text of each row begins; None where a mask is needed."""
    nodes = tree.slot_depths_BM.shape[1]
    prefix = tree.base - kv_offset
    whole = (batch_size, q_length) == tuple(tree.depths_BQ.shape) and q_length == nodes
    if not (whole and tree.padded_left and 0 <= prefix <= kv_length - nodes):
        return None
    window = _compat.mask_window(mask_function, local_size)
    if window is None:
        return None
    if KERNEL not in tree.seen:
        tree.seen[KERNEL] = _Plan(_packed(tree.visible_BQM) if tree.words_BNW is None else tree.words_BNW)
    plan: _Plan = tree.seen[KERNEL]
    if (prefix, window) not in plan.views:
        plan.views.append((prefix, window))
    if attention_mask is None:
        starts = torch.zeros(batch_size, dtype=torch.long, device=device)
    else:
        starts = (attention_mask.to(device) != 0).long().cumsum(-1).eq(0).sum(-1)
    starts = torch.minimum((starts - kv_offset).clamp(min=0), _lengths(tree, plan, prefix, starts.device)).int()
    return starts.view(-1, 1, 1, 1).expand(-1, plan.views.index((prefix, window)) + 1, 1, 1)


def _lengths(tree: TreeContext, plan: _Plan, prefix: int, device: torch.device) -> Tensor:
    """Int32 `[B]`, committed keys of each row: those of the longest are `prefix`."""
    if (prefix, device) not in plan.lengths:
        lengths = torch.full((len(tree.depths_BQ),), prefix, dtype=torch.int32, device=device)
        plan.lengths[prefix, device] = lengths if tree.shorter_B is None else lengths - tree.shorter_B.to(lengths)
    return plan.lengths[prefix, device]


def _packed(visible_BNM: Tensor) -> Tensor:
    """Words `[B, N, W]` of bools."""
    words = -(-visible_BNM.shape[-1] // 64)
    padded = torch.nn.functional.pad(visible_BNM, (0, 64 * words - visible_BNM.shape[-1]))
    lanes = padded.reshape(*visible_BNM.shape[:2], words, 64).long()
    # Bits of a word are different powers of two, the last one negative: their sum is the word.
    return (lanes << torch.arange(64, device=visible_BNM.device)).sum(-1)


def _attend(
    own: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """An attention function of transformers: `[B, N, H, D]` and the weights, which the kernel does not make."""
    tree = active_tree()
    plan: _Plan | None = None if tree is None else tree.seen.get(KERNEL)
    if plan is not None:
        _check_kind(module, attention_mask, query, key)
    if plan is None or tree is None or attention_mask is None or attention_mask.dtype != torch.int32:
        attend = _compat.attention_function_of(own, module)
        if attend is None:
            raise TreeSpecError(f"{type(module).__name__} has no eager attention function beside its class")
        named = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
        # A function may count by its own default what it is not given.
        given = {name: item for name, item in named.items() if item is not None}
        return attend(module, query, key, value, attention_mask, **given, **kwargs)
    from treespec_kernels import tree_attention

    if key.dtype != query.dtype:
        raise TreeSpecError(f"the kernel was given {query.dtype} queries and {key.dtype} keys, and no scales of these")
    prefix, window = plan.views[attention_mask.shape[1] - 1]
    query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
    device = query.device
    starts = attention_mask[:, 0, 0, 0].to(device).contiguous()
    out = tree_attention(
        query,
        key,
        value,
        plan.words_BNW.to(device),
        _lengths(tree, plan, prefix, device),
        kv_start=starts,
        depth=tree.depths_BQ.to(device),
        scale=scaling,
        window=window,
        softcap=softcap or 0.0,
        sinks=s_aux,
        max_len=prefix,
    )
    return out, None


def _check_kind(module: Any, mask: Tensor | None, query: Tensor, key: Tensor) -> None:
    """The beginnings of the rows, cast to another type, would pass for a mask of one query and one key."""
    if mask is None or mask.dtype == torch.int32 or tuple(mask.shape[-2:]) != (1, 1):
        return
    if (query.shape[2], key.shape[2]) != (1, 1):
        raise TreeSpecError(
            f"{type(module).__name__} gave attention='treespec' a mask of {mask.dtype} and shape {tuple(mask.shape)}; "
            "expected what its mask function had made, in torch.int32: the model casts its masks. Leave attention at "
            "'auto'"
        )
