"""What a `TreeCache` takes in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_treespec.cache.slots import Scratch
from hf_treespec.cache.tree_layer import TreeLayer

__all__ = ["LayerMemory", "MemoryReport", "memory_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """Bytes of one layer.

    Args:
        used: of the tokens it holds: codes and scales, if it is quantised.
        reserved: of the room it has, those included.
        copied: of the dense copy that it keeps with ``buffers="per_layer"``, which is not among the reserved ones.
        dense: what the same tokens would take in the dtype of the model.
    """

    used: int
    reserved: int
    copied: int
    dense: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes of a cache.

    Args:
        layers: of each layer that holds something.
        shared: of the buffers that all layers share; 0 for dense storage.
    """

    layers: tuple[LayerMemory, ...]
    shared: int

    @property
    def used(self) -> int:
        """Of the tokens, without any buffer."""
        return sum(layer.used for layer in self.layers)

    @property
    def reserved(self) -> int:
        """Of the room, without any buffer."""
        return sum(layer.reserved for layer in self.layers)

    @property
    def buffers(self) -> int:
        """Of dense states that were made from 8-bit ones: the shared buffers, or the copies of all layers."""
        return self.shared + sum(layer.copied for layer in self.layers)

    @property
    def total(self) -> int:
        """All that the cache takes."""
        return self.reserved + self.buffers

    @property
    def dense(self) -> int:
        """What the tokens would take in the dtype of the model."""
        return sum(layer.dense for layer in self.layers)


def memory_of(layers: Sequence[TreeLayer], scratch: Scratch) -> MemoryReport:
    """The report of a cache."""
    return MemoryReport(layers=tuple(_of(layer) for layer in layers if layer.is_initialized), shared=scratch.bytes)


def _of(layer: TreeLayer) -> LayerMemory:
    here = layer.physical - layer.dropped
    slots = layer.slots.values()
    rows = len(layer.lengths)
    return LayerMemory(
        used=sum(one.bytes_of(here) for one in slots),
        reserved=sum(one.bytes_of(one.capacity) for one in slots),
        copied=sum(one.derived_bytes() for one in slots),
        dense=sum(rows * one.heads * here * one.head_size * one.dtype.itemsize for one in slots),
    )
