"""Which cache layers can hold a tree, by exact class: a subclass may keep more state than its parent.

Classes that are not named here can when a trial has found how they are called (`calls.CallTrial`).
"""

from __future__ import annotations

from typing import Any

from hf_treespec import _compat
from hf_treespec.cache.calls import call_plan
from hf_treespec.cache.states import states_of
from hf_treespec.cache.tree_cache import TreeCache
from hf_treespec.cache.tree_layer import TreeLayer
from hf_treespec.errors import UnsupportedCallError

__all__ = [
    "DENSE",
    "EMPTY",
    "QUANTIZED",
    "REPLAYED",
    "SLIDING",
    "STATIC",
    "TREE",
    "cache_parts",
    "check_cache",
    "is_named",
    "is_order_bound",
    "layer_kind",
    "needs_equal_rows",
]

DENSE = "dense"
EMPTY = "empty"
REPLAYED = "replayed"
SLIDING = "sliding"
STATIC = "static"
QUANTIZED = "quantized"
TREE = "tree"
_KINDS: dict[type, str] = {
    _compat.DynamicLayer: DENSE,
    _compat.DynamicIndexedLayer: DENSE,
    _compat.DynamicSlidingWindowLayer: SLIDING,
    _compat.StaticLayer: STATIC,
    _compat.StaticIndexedLayer: STATIC,
    _compat.StaticSlidingWindowLayer: STATIC,
    TreeLayer: TREE,
    **dict.fromkeys((*_compat.FP8_LAYERS, *_compat.GROUPED_LAYERS), QUANTIZED),
    **dict.fromkeys(_compat.EMPTY_LAYERS, EMPTY),
}


def layer_kind(layer: Any) -> str | None:
    """The kind of a layer, or None for a class that cannot take a tree, or has not been tried.

    `DENSE` layers replace tensors that grow, `SLIDING` ones keep a window of them, `STATIC` ones write in place,
    `QUANTIZED` ones round, `TREE` ones are our own, `EMPTY` ones hold nothing. `REPLAYED` ones are known by their
    calls alone.
    """
    kind = _KINDS.get(type(layer))
    if kind is None:
        return DENSE if states_of(type(layer)) is not None else REPLAYED if call_plan(type(layer)) else None
    # A window of one token is kept whole by transformers (its slice [-0:] is everything): not to be relied on.
    return None if kind == SLIDING and layer.sliding_window < 2 else kind


def is_named(cls: type) -> bool:
    """Whether the class is known here; others are known by a trial, if at all."""
    return cls in _KINDS


def cache_parts(cache: Any) -> tuple[_compat.Cache, ...]:
    """The caches inside: self-attention first, then cross-attention if the cache is a pair of the two."""
    if isinstance(cache, _compat.EncoderDecoderCache):
        return cache.self_attention_cache, cache.cross_attention_cache
    return (cache,)


def needs_equal_rows(cache: Any) -> bool:
    """Whether the cache can hold no gaps, so that all rows must grow by equally many tokens a round."""
    layers = [layer for part in cache_parts(cache) for layer in getattr(part, "layers", ())]
    return any(layer_kind(layer) in (STATIC, QUANTIZED, REPLAYED) for layer in layers)


def is_order_bound(cache: Any) -> bool:
    """Whether a cache holds more than attention states that can be taken and dropped slot by slot."""
    return not all(
        (_compat.is_plain_cache(part) or type(part) is TreeCache)
        and all(layer_kind(layer) is not None for layer in part.layers)
        for part in cache_parts(cache)
    )


def check_cache(cache: Any, *, as_a_whole: bool = False) -> _compat.Cache:
    """Refuse caches that cannot give back a rejected node.

    Args:
        cache: any object.
        as_a_whole: whether the cache is kept, repeated and given back as a whole, which any layer allows.

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
    if as_a_whole:
        return cache
    odd = {type(layer).__name__ for part in cache_parts(cache) for layer in part.layers if layer_kind(layer) is None}
    # Layers may be made one by one during the first forward, when it is too late to refuse.
    for part in cache_parts(cache):
        later = getattr(part, "layer_class_to_replicate", None)
        if later is not None and _KINDS.get(later) != DENSE:
            odd.add(later.__name__)
    if odd:
        raise UnsupportedCallError(
            f"cache layers of class {', '.join(sorted(odd))} cannot take a tree; expected "
            f"{', '.join(kind.__name__ for kind in _KINDS)}. Leave out cache_implementation, or pass a DynamicCache"
        )
    return cache
