"""The target's own cache as the cache of a draft that is the target without some of its layers.

What the target has read, such a draft need not read again: it attends to the target's keys and values. Its own tokens
lie behind them for the length of a transaction that is never committed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from hf_treespec.cache.rows import CacheTransaction, RowCache

__all__ = ["lent"]


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
