"""Static layers: storage of a fixed size that is written in place, so no snapshot of its attributes can undo a tree.

A tree is written behind the committed slots, the accepted rows move to its front, and the layer's length is set back.
What lies behind the length is zero again afterwards, as it is in plain decoding.

Shapes: B rows, H heads, C capacity, M tree slots, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hf_treespec import _compat
from hf_treespec.cache.layers import STATIC, layer_kind
from hf_treespec.errors import UnsupportedCallError

__all__ = ["capacity", "check_windows", "set_static_length"]


def capacity(layers: Iterable[Any]) -> int | None:
    """Slots of the smallest static layer, or None if no layer is static."""
    return min((int(layer.max_cache_len) for layer in layers if layer_kind(layer) == STATIC), default=None)


def check_windows(cache: Any, tokens: int | None) -> None:
    """Refuse a static window that the call could fill: once it wraps it cannot give back what a tree overwrote.

    Args:
        cache: the cache of the call, or None.
        tokens: tokens that the cache holds when the call has run to its limit, or None without a limit.

    Raises:
        UnsupportedCallError: naming the layer class and both lengths.
    """
    for layer in getattr(cache, "layers", ()):
        if type(layer) is _compat.StaticSlidingWindowLayer:
            size = int(layer.max_cache_len)
            if tokens is None or tokens > size:
                many = "any number of" if tokens is None else tokens
                raise UnsupportedCallError(
                    f"cache layers of class StaticSlidingWindowLayer hold {size} tokens and the call may write "
                    f"{many}: a static window that wraps cannot drop rejected nodes. Lower max_new_tokens so that the "
                    "text fits, or leave out cache_implementation='static'"
                )


def set_static_length(layer: Any, length: int, used: int | None = None) -> None:
    """Set the length of a static layer in place and clear what lies behind it.

    Args:
        layer: the layer; an indexer beside its states, if any, has read as many tokens or none.
        length: committed slots.
        used: slots that may hold anything; None for all.
    """
    layer.cumulative_length.fill_(length)
    if hasattr(layer, "cumulative_length_int"):
        layer.cumulative_length_int = length
    indexed = getattr(layer, "is_indexer_initialized", False)
    if isinstance(getattr(layer, "indexer_cumulative_length", None), Tensor):
        layer.indexer_cumulative_length.fill_(length if indexed else 0)
    if layer.is_initialized:
        layer.keys[:, :, length:used].zero_()
        layer.values[:, :, length:used].zero_()
    if indexed:
        layer.indexer_keys[:, length:used].zero_()
