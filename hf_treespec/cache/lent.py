"""The target's own cache as the cache of a draft that is the target without some of its layers.

What the target has read, such a draft need not read again: it attends to the target's keys and values. Its own tokens
lie behind them for the length of a transaction that is never committed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hf_treespec import _compat
from hf_treespec.cache.layers import DENSE, QUANTIZED, SLIDING, STATIC, TREE, layer_kind
from hf_treespec.cache.rows import CacheTransaction, RowCache
from hf_treespec.errors import UnsupportedCallError

__all__ = ["check_readable", "committed_states", "lent"]


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

    They are not copied and must not be written to.

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
    elif kind == TREE and layer.sliding_window is not None:
        # As a sliding layer of transformers has them.
        keys, values = (states[:, :, 1 - layer.sliding_window :] for states in (keys, values))
    return keys, values
