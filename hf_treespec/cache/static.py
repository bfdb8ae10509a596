"""Static layers: storage of a fixed size that is written in place, so no snapshot of its attributes can undo a tree.

A tree is written behind the committed slots, the accepted rows move to its front, and the layer's length is set back.
What lies behind the length is zero again afterwards, as it is in plain decoding.

Shapes: B rows, H heads, C capacity, M tree slots, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.cache.layers import STATIC, layer_kind
from hf_treespec.errors import UnsupportedCallError

__all__ = ["LayerState", "capacity", "check_windows", "keep_slots", "set_static_length"]


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
    """Set the length of an initialised static layer in place and clear what lies behind it.

    Args:
        layer: the layer.
        length: committed slots.
        used: slots that may hold anything; None for all.
    """
    layer.cumulative_length.fill_(length)
    if hasattr(layer, "cumulative_length_int"):
        layer.cumulative_length_int = length
    layer.keys[:, :, length:used].zero_()
    layer.values[:, :, length:used].zero_()


def keep_slots(storage: Tensor, base: int, slots: Sequence[Sequence[int]]) -> None:
    """Move accepted rows to the front of the tree block, in place: at most M slots a row, never the whole cache.

    Args:
        storage: `[B, H, *, D]`, written in place.
        base: first tree slot.
        slots: per row equally many strictly increasing tree slots.
    """
    count = len(slots[0])
    end = base + count
    if all(list(row) == list(range(count)) for row in slots):
        return
    if len({tuple(row) for row in slots}) == 1:
        index = base + torch.tensor(list(slots[0]), device=storage.device)
        storage[:, :, base:end] = storage.index_select(2, index)
    else:
        index = base + torch.tensor([list(row) for row in slots], device=storage.device)
        wide = index[:, None, :, None].expand(-1, storage.shape[1], -1, storage.shape[3])
        storage[:, :, base:end] = storage.gather(2, wide)


class LayerState:
    """What a layer was at one time.

    Args:
        layer: any cache layer.
        length: its length, if the caller knows it; reading it off a static layer waits for the device.
    """

    def __init__(self, layer: Any, length: int | None = None) -> None:
        self.layer = layer
        self._attributes = dict(layer.__dict__)
        self._length: int | None = None
        if layer_kind(layer) == STATIC:
            self._length = int(layer.cumulative_length) if length is None else length

    def restore(self) -> None:
        """Give the layer back as it was."""
        self.layer.__dict__.clear()
        self.layer.__dict__.update(self._attributes)
        if self._length is not None:
            if self.layer.is_initialized:
                set_static_length(self.layer, self._length)
            else:
                self.layer.cumulative_length.fill_(self._length)
