"""What a cache layer was at one time, whatever it keeps and however it writes.

Layers that replace their tensors need a copy of their attributes alone. Static layers write in place: their length is
noted, and what lies behind it is cleared; so it is with our own. Of a layer of any other class every tensor is copied,
in containers too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from hf_treespec.cache.layers import DENSE, EMPTY, QUANTIZED, SLIDING, STATIC, TREE, layer_kind
from hf_treespec.cache.static import set_static_length

__all__ = ["LayerState"]

# Attributes hold all there is of these: their tensors are never written in place.
_REPLACING = (DENSE, SLIDING, QUANTIZED, EMPTY)


class LayerState:
    """A snapshot of one layer.

    Args:
        layer: any cache layer.
        length: its length, if the caller knows it; reading it off a static layer waits for the device.
    """

    def __init__(self, layer: Any, length: int | None = None) -> None:
        self.layer = layer
        self.attributes: dict[str, Any] = dict(layer.__dict__)
        kind = layer_kind(layer)
        self._length: int | None = None
        self._saved: Callable[[], Any] | None = None
        self._kept = kind == TREE
        if kind == STATIC:
            self._length = int(layer.cumulative_length) if length is None else length
        elif kind == TREE:
            # Its room may grow meanwhile, which need not be undone.
            self._saved = partial(layer.truncate, layer.lengths) if layer.is_initialized else None
        elif kind not in _REPLACING:
            self._saved = _saved(self.attributes)

    def restore(self) -> None:
        """Give the layer back as it was."""
        if self._saved is not None:
            self._saved()
            if self._kept:
                return
        self.layer.__dict__.clear()
        self.layer.__dict__.update(self.attributes)
        if self._length is not None:
            set_static_length(self.layer, self._length)


def _saved(value: Any) -> Callable[[], Any]:
    """A function that makes the very object `value` what it is now, and returns it."""
    if isinstance(value, Tensor):
        copy, version = value.clone(), _version(value)

        def tensor() -> Tensor:
            if version is None or _version(value) != version:
                value.copy_(copy)
            return value

        return tensor
    if isinstance(value, dict):
        parts = {key: _saved(part) for key, part in value.items()}

        def mapping() -> dict[Any, Any]:
            now = {key: part() for key, part in parts.items()}
            value.clear()
            value.update(now)
            return value

        return mapping
    if isinstance(value, list):
        items = [_saved(part) for part in value]

        def sequence() -> list[Any]:
            value[:] = [item() for item in items]
            return value

        return sequence
    if isinstance(value, tuple):
        held = [_saved(part) for part in value]

        def fixed() -> tuple[Any, ...]:
            for item in held:
                item()
            return value

        return fixed
    return lambda: value


def _version(tensor: Tensor) -> int | None:
    """How often the tensor was written; inference tensors do not count."""
    return None if tensor.is_inference() else tensor._version
