"""Which cache layers can hold a tree, by exact class: a subclass may keep more state than its parent."""

from __future__ import annotations

from typing import Any

from hf_treespec import _compat
from hf_treespec.errors import UnsupportedCallError

__all__ = ["DENSE", "SLIDING", "cache_parts", "check_cache", "layer_kind"]

DENSE = "dense"
SLIDING = "sliding"
_KINDS: dict[type, str] = {_compat.DynamicLayer: DENSE, _compat.DynamicSlidingWindowLayer: SLIDING}


def layer_kind(layer: Any) -> str | None:
    """`DENSE`, `SLIDING`, or None for a class that cannot take a tree."""
    kind = _KINDS.get(type(layer))
    # A window of one token is kept whole by transformers (its slice [-0:] is everything): not to be relied on.
    return None if kind == SLIDING and layer.sliding_window < 2 else kind


def cache_parts(cache: Any) -> tuple[_compat.Cache, ...]:
    """The caches inside: self-attention first, then cross-attention if the cache is a pair of the two."""
    if isinstance(cache, _compat.EncoderDecoderCache):
        return cache.self_attention_cache, cache.cross_attention_cache
    return (cache,)


def check_cache(cache: Any) -> _compat.Cache:
    """Refuse caches that cannot give back a rejected node.

    Returns:
        The cache.

    Raises:
        UnsupportedCallError: naming the class that is in the way.
    """
    if not isinstance(cache, _compat.Cache):
        raise UnsupportedCallError(f"cache of type {type(cache).__name__}: expected a transformers Cache")
    if any(_compat.is_offloaded(part) for part in cache_parts(cache)):
        raise UnsupportedCallError(
            "an offloaded cache moves its layers during the forward and cannot take a tree; pass a DynamicCache, or "
            "leave out cache_implementation"
        )
    layers = [layer for part in cache_parts(cache) for layer in part.layers]
    odd = sorted({type(layer).__name__ for layer in layers if layer_kind(layer) is None})
    if odd:
        raise UnsupportedCallError(
            f"cache layers of class {', '.join(odd)} cannot take a tree; expected "
            f"{', '.join(kind.__name__ for kind in _KINDS)}. Leave out cache_implementation, or pass a DynamicCache"
        )
    return cache
