"""A `TreeCache` as one file of safetensors: tensors `layers.<i>.<keys or values>.<part>`, the rest in its metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_treespec.cache.slots import BUFFERS, STORAGES
from hf_treespec.cache.tree_layer import TreeLayer
from hf_treespec.errors import TreeSpecError

__all__ = ["StoredCache", "read_tree_cache", "write_tree_cache"]

_KEY = "hf_treespec.tree_cache"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class StoredCache:
    """What a file holds.

    Args:
        path: of the file.
        storage: of the cache.
        buffers: of the cache.
        entries: per layer its settings: `window` (0 for a layer that holds nothing), `length` and `dtypes`; those of
            a layer that was never filled have a window alone.
        tensors: by their names.
    """

    path: Path
    storage: str
    buffers: str
    entries: list[dict[str, Any]]
    tensors: dict[str, Tensor]

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer, None without, 0 for a layer that holds nothing."""
        return [entry["window"] for entry in self.entries]

    def fill(self, layers: Sequence[Any]) -> None:
        """Put the text into new layers.

        Raises:
            ValueError: if settings and tensors do not belong together.
        """
        try:
            for number, (entry, layer) in enumerate(zip(self.entries, layers, strict=True)):
                if "length" in entry:
                    self._fill(number, entry, layer)
        except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
            raise _damaged(self.path, error) from error

    def _fill(self, number: int, entry: dict[str, Any], layer: Any) -> None:
        held: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            _, at, states, part = name.split(".")
            if int(at) == number:
                held.setdefault(states, {})[part] = tensor
        dtypes = {name: getattr(torch, dtype) for name, dtype in entry["dtypes"].items()}
        layer.adopt(held, length=int(entry["length"]), dtypes=dtypes)


def write_tree_cache(path: Path, layers: Sequence[Any], *, storage: str, buffers: str) -> Path:
    """Write the layers of a cache; see `TreeCache.save`."""
    entries: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for number, layer in enumerate(layers):
        if not isinstance(layer, TreeLayer):
            entries.append({"window": 0})
            continue
        entry: dict[str, Any] = {"window": layer.sliding_window}
        if layer.is_initialized:
            if len(set(layer.lengths)) > 1:
                raise TreeSpecError("rows of a TreeCache have unequal lengths until the call is over")
            entry["length"] = layer.physical
            entry["dtypes"] = {name: str(dtype).removeprefix("torch.") for name, dtype in layer.dtypes().items()}
            for states, parts in layer.held().items():
                for part, tensor in parts.items():
                    # A copy of its own: what the file is made of must not share memory.
                    tensors[f"layers.{number}.{states}.{part}"] = tensor.detach().cpu().contiguous().clone()
        entries.append(entry)
    about = {"version": _VERSION, "storage": storage, "buffers": buffers, "layers": entries}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"format": "pt", _KEY: json.dumps(about)})
    return path


def read_tree_cache(path: Path, device: str | torch.device) -> StoredCache:
    """Read what `write_tree_cache` wrote; see `TreeCache.load`."""
    with safe_open(path, framework="pt", device=str(device)) as file:
        text = (file.metadata() or {}).get(_KEY)
        if text is None:
            raise ValueError(f"{path}: no file of TreeCache.save: its metadata lack {_KEY!r}")
        about = _about(path, text)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return StoredCache(path, about["storage"], about["buffers"], about["layers"], tensors)


def _about(path: Path, text: str) -> dict[str, Any]:
    """The metadata, looked through."""
    try:
        about = json.loads(text)
        version, storage = about["version"], about["storage"]
        if version == _VERSION and storage in STORAGES:
            windows = [entry["window"] for entry in about["layers"]]
            if about["buffers"] not in BUFFERS or not all(isinstance(window, int | None) for window in windows):
                raise ValueError(f"buffers={about['buffers']!r}, windows={windows}")
            return dict(about)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error
    raise ValueError(
        f"{path}: version {version} with storage {storage!r}; this release reads version {_VERSION}: upgrade "
        "hf-treespec to read it"
    )


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path}: damaged metadata of a TreeCache ({type(error).__name__}: {error}); expected those of "
        "TreeCache.save: save the cache anew"
    )
