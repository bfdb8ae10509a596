"""Which caches are refused, by the exact class of their layers."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticIndexedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from hf_treespec import UnsupportedCallError, _compat
from hf_treespec.cache import RowCache, check_cache, layer_kind, needs_equal_rows

CONFIG = LlamaConfig(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
)


class OwnLayer(DynamicLayer):
    """A subclass may keep more than its parent."""


def bare(name: str) -> Any:
    """A layer of that class without its constructor, which may want a package that is not here."""
    cls = getattr(cache_utils, name)
    return cls.__new__(cls)


TAKEN = (
    "DynamicLayer",
    "DynamicIndexedLayer",
    "DynamicSlidingWindowLayer",
    "StaticIndexedLayer",
    "StaticLayer",
    "StaticSlidingWindowLayer",
    *(cls.__name__ for cls in (*_compat.FP8_LAYERS, *_compat.GROUPED_LAYERS, *_compat.EMPTY_LAYERS)),
)
KNOWN_LAYERS = sorted(
    name
    for name, cls in vars(cache_utils).items()
    if isinstance(cls, type)
    and (name.endswith("Layer") or name.endswith("LayerMixin"))
    and name not in TAKEN
    and not getattr(cls, "__abstractmethods__", None)
)


def test_classes_that_take_a_tree() -> None:
    static = [StaticLayer(8), StaticSlidingWindowLayer(8, 4)]
    layers = [DynamicLayer(), DynamicSlidingWindowLayer(4), *static, *(cls() for cls in _compat.FP8_LAYERS)]
    layers += [DynamicIndexedLayer(), StaticIndexedLayer(8), *(cls() for cls in _compat.EMPTY_LAYERS)]
    kinds = ["dense", "sliding", "static", "static", *["quantized" for _ in _compat.FP8_LAYERS]]
    kinds += ["dense", "static", *["empty" for _ in _compat.EMPTY_LAYERS]]
    assert [layer_kind(layer) for layer in layers] == kinds
    for cache in (Cache(layers=layers), DynamicCache(), DynamicCache(config=CONFIG)):
        check_cache(cache)
        RowCache(cache, [0])


@pytest.mark.parametrize("layer", [StaticLayer(8), *(cls() for cls in _compat.FP8_LAYERS)], ids=repr)
def test_caches_without_gaps_need_equal_rows(layer: Any) -> None:
    assert needs_equal_rows(Cache(layers=[DynamicLayer(), layer]))
    assert not needs_equal_rows(Cache(layers=[DynamicLayer(), DynamicSlidingWindowLayer(4)]))
    assert not needs_equal_rows(DynamicCache()) and not needs_equal_rows(None)


def test_a_window_of_one_token_is_refused() -> None:
    """Transformers then keeps everything, so its masks and its cache disagree."""
    assert layer_kind(DynamicSlidingWindowLayer(2)) == "sliding"
    assert layer_kind(DynamicSlidingWindowLayer(1)) is None


@pytest.mark.parametrize("name", KNOWN_LAYERS)
def test_every_other_class_of_transformers_is_refused_by_name(name: str) -> None:
    layer = bare(name)
    assert layer_kind(layer) is None
    with pytest.raises(UnsupportedCallError, match=f"cache layers of class {name} cannot take a tree"):
        check_cache(Cache(layers=[DynamicLayer(), layer]))


def test_the_list_above_holds_the_classes_that_matter() -> None:
    assert {
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
    } <= set(KNOWN_LAYERS)


def offloaded(cache: Cache) -> Cache:
    """As if made for offloading, which needs streams of an accelerator from its first line on."""
    cache.offloading = True
    return cache


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (offloaded(StaticCache(config=CONFIG, max_cache_len=16)), "an offloaded cache"),
        (Cache(layer_class_to_replicate=OwnLayer), "class OwnLayer cannot take a tree"),
        (Cache(layer_class_to_replicate=DynamicSlidingWindowLayer), "class DynamicSlidingWindowLayer cannot"),
        (Cache(layers=[OwnLayer(), OwnLayer()]), "class OwnLayer cannot"),
        (offloaded(DynamicCache(config=CONFIG)), "an offloaded cache"),
        (((None, None),), "cache of type tuple: expected a transformers Cache"),
        (None, "cache of type NoneType"),
    ],
)
def test_caches_that_cannot_give_back_a_node_are_refused(cache: Any, message: str) -> None:
    with pytest.raises(UnsupportedCallError, match=message):
        check_cache(cache)
    with pytest.raises(UnsupportedCallError, match=message):
        RowCache(cache, [0])
