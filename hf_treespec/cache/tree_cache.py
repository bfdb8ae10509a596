"""`TreeCache`: a cache of our own for models with plain keys and values, dense or in 8 bits.

It is a transformers `Cache` and serves any call of such a model, with trees or without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_treespec import _compat
from hf_treespec.cache.memory import MemoryReport, memory_of
from hf_treespec.cache.slots import BUFFERS, STORAGES, Scratch
from hf_treespec.cache.tree_files import read_tree_cache, write_tree_cache
from hf_treespec.cache.tree_layer import TreeLayer
from hf_treespec.errors import TreeSpecError, UnsupportedCallError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

__all__ = ["TreeCache", "layer_fault"]


class TreeCache(_compat.Cache):
    """A cache that is written in place, grows in steps, and drops or keeps nodes of a tree without copying the text.

    With 8-bit storage each key and value vector has a scale of its own. Attention is given dense states: by default
    all layers share one buffer, in which a layer's states are dequantised for its attention, so that memory is saved;
    ``buffers="per_layer"`` keeps a dense copy of every layer instead, in which only new states are dequantised. The
    raw storage is at ``cache.layers[i].slots["keys"].parts`` (`QuantizedSlots`), for kernels that dequantise by
    themselves.

    Args:
        config: of the model.
        storage: ``"dense"``, ``"int8"`` or ``"fp8"``.
        buffers: ``"shared"`` or ``"per_layer"``; of dense storage there are none.

    Raises:
        UnsupportedCallError: if layers of this config keep more than keys and values.
    """

    def __init__(self, config: PreTrainedConfig, *, storage: str = "dense", buffers: str = "shared") -> None:
        self._make(_windows(_compat.make_cache(config).layers), storage, buffers)

    def _make(self, windows: Sequence[int | None], storage: str, buffers: str) -> None:
        """Empty layers: of so many tokens, of all (None), or of nothing (0)."""
        for name, value, known in (("storage", storage, STORAGES), ("buffers", buffers, BUFFERS)):
            if value not in known:
                raise ValueError(f"TreeCache({name}={value!r}): expected one of {', '.join(map(repr, known))}")
        self.storage, self.buffers = storage, buffers
        self._scratch = Scratch()
        scratch = self._scratch if buffers == "shared" else None
        super().__init__(
            layers=[
                _compat.EMPTY_LAYERS[0]()
                if window == 0
                else TreeLayer(storage, sliding_window=window, scratch=scratch)
                for window in windows
            ]
        )

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, int | None]]:
        """Keys, values and the window of every layer."""
        for layer in self._trees():
            yield layer.keys, layer.values, layer.sliding_window

    def _trees(self) -> list[TreeLayer]:
        return [layer for layer in self.layers if isinstance(layer, TreeLayer)]

    def reserve(self, slots: int) -> None:
        """Have room for so many tokens of a row at once, so that storage stays where it is until then."""
        for layer in self._trees():
            layer.reserve(slots)

    def memory_report(self) -> MemoryReport:
        """What the cache takes in memory, in all and layer by layer."""
        return memory_of(self._trees(), self._scratch)

    # --- to and from others ------------------------------------------------------------------------------------

    @classmethod
    def from_cache(
        cls,
        cache: _compat.Cache,
        config: PreTrainedConfig | None = None,
        *,
        storage: str = "dense",
        buffers: str = "shared",
    ) -> TreeCache:
        """The same text in a new cache; of a window only what the other still holds.

        Args:
            cache: dynamic, static, quantised, or another TreeCache. It is not changed.
            config: of the model; needed for static windows alone, which do not tell their size.
            storage: see the class. Codes of a TreeCache with the same storage are taken as they are.
            buffers: see the class.

        Raises:
            UnsupportedCallError: for a cache of another kind.
        """
        layers = list(getattr(cache, "layers", ()))
        if not isinstance(cache, _compat.Cache) or not layers:
            raise UnsupportedCallError(
                f"TreeCache.from_cache: {type(cache).__name__} has no layers of keys and values; of an empty cache "
                "make TreeCache(model.config), and of an EncoderDecoderCache there is none"
            )
        own = layers if config is None else _compat.make_cache(config).layers
        if len(own) != len(layers):
            raise UnsupportedCallError(
                f"TreeCache.from_cache: the cache has {len(layers)} layers and the config {len(own)}"
            )
        if fault := layer_fault(layers, _compat.FILLED_LAYERS):
            raise UnsupportedCallError(f"TreeCache.from_cache: {fault}")
        new = cls.__new__(cls)
        new._make(_windows(own, _compat.FILLED_LAYERS), storage, buffers)
        for old, layer in zip(layers, new.layers, strict=True):
            if not isinstance(layer, TreeLayer) or not old.is_initialized:
                continue
            if isinstance(old, TreeLayer) and old.storage == storage:
                layer.adopt(old.held(), length=_whole(old), dtypes=old.dtypes())
                continue
            states, length = (old.states(), _whole(old)) if isinstance(old, TreeLayer) else _compat.held_by(old)
            layer.dropped = length - int(states[0].shape[2])
            layer.update(*states)
        return new

    def to_dynamic(self) -> _compat.DynamicCache:
        """The same text in a `DynamicCache`, as plain decoding would have it."""
        layers: list[Any] = []
        for layer in self.layers:
            if not isinstance(layer, TreeLayer):
                layers.append(layer)
                continue
            window = layer.sliding_window
            other = _compat.dynamic_layer(window)
            if layer.is_initialized:
                length = _whole(layer)
                keys, values = layer.states()
                other.lazy_initialization(keys, values)
                if window is not None:
                    other.cumulative_length = length
                    keys, values = (states[:, :, 1 - window :] for states in (keys, values))
                other.keys, other.values = keys.clone(), values.clone()
            layers.append(other)
        return _compat.dynamic_cache_of(layers)

    def to_static(self, config: PreTrainedConfig, max_cache_len: int) -> _compat.Cache:
        """The same text in a `StaticCache` with room for `max_cache_len` tokens.

        Raises:
            UnsupportedCallError: if a layer has forgotten its first tokens, or the text is longer than the room.
        """
        return self._filled(_compat.static_cache(config, max_cache_len), max_cache_len)

    def to_quantized(self, config: PreTrainedConfig, backend: str, **options: Any) -> _compat.Cache:
        """The same text in a `QuantizedCache`, quantised as one prompt would be.

        Args:
            config: of the model.
            backend: as `QuantizedCache` knows it.
            options: of the backend.

        Raises:
            UnsupportedCallError: if a layer has forgotten its first tokens.
        """
        return self._filled(_compat.quantized_cache(config, backend, options), None)

    def _filled(self, other: _compat.Cache, room: int | None) -> _compat.Cache:
        for number, layer in enumerate(self.layers):
            if not isinstance(layer, TreeLayer) or not layer.is_initialized:
                continue
            length = _whole(layer)
            if layer.dropped or (room is not None and length > room):
                raise UnsupportedCallError(
                    f"a {type(other).__name__} of the text: layer {number} has {length} tokens, "
                    + (f"the first {layer.dropped} of them forgotten" if layer.dropped else f"and the room is {room}")
                    + "; use to_dynamic()"
                )
            other.update(*layer.states(), number)
        return other

    def save(self, path: str | Path) -> Path:
        """Write the text's states to one file of safetensors, codes and scales as they are.

        Args:
            path: of the file.

        Returns:
            The path.
        """
        return write_tree_cache(Path(path), self.layers, storage=self.storage, buffers=self.buffers)

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> TreeCache:
        """Read what `save` wrote.

        Args:
            path: of the file.
            device: where the states go.

        Raises:
            ValueError: if the file is not of that kind, or of a newer release.
        """
        read = read_tree_cache(Path(path), device)
        new = cls.__new__(cls)
        new._make(read.windows, read.storage, read.buffers)
        read.fill(new.layers)
        return new


def layer_fault(layers: Sequence[Any], more: tuple[type, ...] = ()) -> str | None:
    """Why a `TreeCache` cannot take the place of a cache with these layers, or None.

    Args:
        layers: of the other cache.
        more: classes that can be taken over besides those that `generate` makes by default.
    """
    known = (TreeLayer, *_compat.KEY_VALUE_LAYERS, *_compat.EMPTY_LAYERS, *more)
    if not layers:
        return "transformers names no cache layers for this config"
    if odd := sorted({type(layer).__name__ for layer in layers if type(layer) not in known}):
        return (
            f"cache layers of class {', '.join(odd)} keep more than keys and values; expected layers with full or "
            "sliding attention"
        )
    if any(getattr(layer, "sliding_window", None) == 1 for layer in layers):
        return "a layer has a window of one token, which is no cache"
    return None


def _windows(layers: Sequence[Any], more: tuple[type, ...] = ()) -> list[int | None]:
    """The window of each layer, None without, 0 for a layer that holds nothing."""
    if fault := layer_fault(layers, more):
        raise UnsupportedCallError(f"TreeCache: {fault}")
    windows: list[int | None] = []
    for layer in layers:
        if type(layer) is _compat.StaticSlidingWindowLayer:
            raise UnsupportedCallError(
                "TreeCache.from_cache: static windows do not tell the window they were made for; pass config too"
            )
        window = getattr(layer, "sliding_window", None)
        windows.append(0 if type(layer) in _compat.EMPTY_LAYERS else None if window is None else int(window))
    return windows


def _whole(layer: TreeLayer) -> int:
    """The length of all rows.

    Raises:
        TreeSpecError: if they differ, which is so inside of a call only.
    """
    if len(set(layer.lengths)) > 1:
        raise TreeSpecError("rows of a TreeCache have unequal lengths until the call is over")
    return layer.physical
