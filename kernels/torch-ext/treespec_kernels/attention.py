"""Attention of tree nodes over a committed prefix and over their own ancestors.

Shapes: B batch rows, H query heads, G key and value heads (H a multiple of G), N tree nodes, S slots of the storage,
D head dimension, W = ceil(N / 64) words a node.
"""

import importlib

import torch

from ._attention_checks import check_arguments, check_values
from ._backend import choose_backend
from ._names import operator_name
from .attention_reference import tree_attention_reference

__all__ = ["tree_attention"]


def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tree_words: torch.Tensor,
    prefix_len: torch.Tensor,
    *,
    kv_start: torch.Tensor | None = None,
    depth: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    max_len: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attends from each node to the committed slots of its row and to its ancestors, itself included.

    Node i of row b sees the slots `kv_start[b]` to `prefix_len[b]` - 1, and slot `prefix_len[b]` + j if bit j of its
    words is set. Lengths stay on the device and nothing waits for them. Scores are q.k * scale, capped by
    softcap * tanh(score / softcap), and a sink takes part in the softmax with no value. A node that sees nothing
    gives zeros, and -inf as its log-sum-exp. Slots before `kv_start`, before every window and behind the tree may hold
    anything, NaNs included.

    On an accelerator the values of `prefix_len` and `kv_start` are not checked: they must leave room for the tree.

    Args:
        q: [B, H, N, D], float16, bfloat16 or float32 (float64 with backend "torch"); any strides with D contiguous.
        k: [B, G, S, D] of q's dtype, int8 or float8_e4m3fn; any strides with D contiguous.
        v: like `k`.
        tree_words: int64 [B or 1, N, W]; bit j of word w of node i: node 64 w + j is i itself or an ancestor of i.
            A padding node may have no bits, or its own alone.
        prefix_len: int32 or int64 [B], committed slots of each row, left padding included; the tree lies behind.
        kv_start: int32 or int64 [B], slots of left padding; none by default.
        depth: int32 or int64 [B or 1, N], edges from the root; needed with `window`.
        k_scale: float32, broadcastable to [B, G, S]: factors of stored keys. None is 1.
        v_scale: the same for values.
        scale: factor of the scores; D ** -0.5 by default.
        window: positions that a node sees, its own included (position = `prefix_len` + depth); 0 for all.
        softcap: cap of the scores; 0 for none.
        sinks: [H], floating point: the score of a sink for each query head.
        max_len: bound on `prefix_len` that is known on the host, S - N by default. It decides into how many parts
            the keys are split, and is best rounded up to a power of two.
        return_lse: whether to return the log-sum-exp as well.
        backend: "triton", "torch", or "auto" for triton wherever it can run (a GPU, or TRITON_INTERPRET=1 on a CPU).

    Returns:
        [B, N, H, D] in q's dtype; with `return_lse` also float32 [B, H, N] (float64 for float64), the natural log of
        the softmax's denominator, the sink included.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, stride, device or number is wrong, or the backend cannot run the call.
        ImportError: backend "triton" without triton.
    """
    out, lse = _tree_attention(
        q,
        k,
        v,
        tree_words,
        prefix_len,
        kv_start,
        depth,
        k_scale,
        v_scale,
        sinks,
        float(q.shape[-1] ** -0.5 if scale is None else scale),
        window,
        softcap,
        max_len,
        backend,
    )
    return (out, lse) if return_lse else out


@torch.library.custom_op(operator_name("tree_attention"), mutates_args=())
def _tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tree_words: torch.Tensor,
    prefix_len: torch.Tensor,
    kv_start: torch.Tensor | None,
    depth: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    max_len: int | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_arguments(
        q, k, v, tree_words, prefix_len, kv_start, depth, k_scale, v_scale, sinks, window, softcap, max_len
    )
    if q.is_cpu:
        check_values(q, k, prefix_len, kv_start, max_len)
    numbers = {"scale": scale, "window": window, "softcap": softcap}
    # Imported by name at the call, so that the package needs no triton.
    if choose_backend("tree_attention", backend, q, q.shape[-1], "_attention_launch") == "triton":
        bound = k.shape[2] - q.shape[2] if max_len is None else max_len
        launch = importlib.import_module("._attention_launch", __package__).launch
        tensors = (q, k, v, tree_words, prefix_len, kv_start, depth, k_scale, v_scale, sinks)
        result: tuple[torch.Tensor, torch.Tensor] = launch(*tensors, **numbers, max_len=bound)
        return result
    return tree_attention_reference(
        q,
        k,
        v,
        tree_words,
        prefix_len,
        kv_start=kv_start,
        depth=depth,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        max_len=max_len,
        **numbers,
    )


@_tree_attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tree_words: torch.Tensor,
    prefix_len: torch.Tensor,
    kv_start: torch.Tensor | None,
    depth: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    max_len: int | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_arguments(
        q, k, v, tree_words, prefix_len, kv_start, depth, k_scale, v_scale, sinks, window, softcap, max_len
    )
    B, H, N, D = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(B, N, H, D), q.new_empty(B, H, N, dtype=lse_dtype)
