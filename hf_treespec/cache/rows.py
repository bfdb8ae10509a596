"""A cache whose rows have lengths of their own, and the transaction around one tree.

transformers' caches are rectangular. Rows that accepted less are kept right-aligned: their slots move right and the
gap at the left becomes padding, which every model handles, and which keeps each row's sliding window whole. In a
`TreeCache` nothing moves: rows begin at slot 0, and the tree of each lies right behind its text.

Shapes: B rows, L physical length, M tree slots, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.cache.accepted import Accepted, keep_slots
from hf_treespec.cache.layers import (
    DENSE,
    EMPTY,
    QUANTIZED,
    REPLAYED,
    STATIC,
    TREE,
    cache_parts,
    check_cache,
    layer_kind,
)
from hf_treespec.cache.moves import SlotMoves
from hf_treespec.cache.quantized import QuantizedRecorder, path_limit
from hf_treespec.cache.replay import ReplayRecorder
from hf_treespec.cache.sliding import SlidingRecorder
from hf_treespec.cache.snapshot import LayerState
from hf_treespec.cache.states import held_states
from hf_treespec.cache.static import capacity, set_static_length
from hf_treespec.cache.tree_layer import TreeLayer
from hf_treespec.errors import TreeSpecError

__all__ = ["CacheTransaction", "RowCache", "restored_on_error"]


@contextmanager
def restored_on_error(cache: _compat.Cache | None) -> Iterator[None]:
    """Give a cache its layers back as they were if the forward inside, such as a prefill, fails half-way."""
    if cache is None:
        yield
        return
    parts = [(part, list(part.layers)) for part in cache_parts(cache)]
    states = [LayerState(layer) for _, layers in parts for layer in layers]
    read = dict(getattr(cache, "is_updated", {}))
    try:
        yield
    except BaseException:
        for part, layers in parts:
            part.layers[:] = layers
        for state in states:
            state.restore()
        if isinstance(cache, _compat.EncoderDecoderCache):
            cache.is_updated.clear()
            cache.is_updated.update(read)
        raise


class RowCache:
    """A transformers cache with one length per row.

    Args:
        cache: the cache, which stays the same object.
        lengths: slots of each row that are not gap; the prompt's own padding counts as slots.

    Attributes:
        roots_only: whether no tree may be read, only its root.

    Raises:
        UnsupportedCallError: if a layer cannot take a tree.
    """

    def __init__(self, cache: _compat.Cache, lengths: Sequence[int]) -> None:
        check_cache(cache)
        self.cache = cache
        self.lengths = list(lengths)
        self.roots_only = False
        self._capacity = capacity(self.layers)
        self._in_place = any(layer_kind(layer) == TREE for layer in self.layers)

    @property
    def capacity(self) -> int | None:
        """Slots of a cache of a fixed size, or None if it grows."""
        return self._capacity

    @property
    def room(self) -> int | None:
        """Slots that a tree with its root may take, or None if there is no bound."""
        if self.roots_only:
            return 1
        return None if self._capacity is None else self._capacity - self.physical

    @property
    def path_limit(self) -> int | None:
        """Depth that a tree must not exceed, or None."""
        return path_limit(self.layers)

    @property
    def layers(self) -> list[Any]:
        """Layers that grow with the text."""
        return cache_parts(self.cache)[0].layers

    @property
    def physical(self) -> int:
        """L."""
        return max(self.lengths)

    @property
    def gaps(self) -> list[int]:
        """Empty slots at the left of each row."""
        if self._in_place:
            return [0] * len(self.lengths)
        physical = self.physical
        return [physical - length for length in self.lengths]

    def shorter(self, device: torch.device | str) -> Tensor | None:
        """How many slots each row is shorter than the longest, if rows begin at slot 0: int64 `[B]`, or None."""
        physical = self.physical
        if not self._in_place or min(self.lengths) == physical:
            return None
        return torch.tensor([physical - length for length in self.lengths], device=device)

    def mask(self, extra: int, prompt_mask_BP: Tensor | None, device: torch.device | str) -> Tensor | None:
        """The 2D attention mask of a forward.

        Args:
            extra: slots behind the committed ones, all real.
            prompt_mask_BP: int64 `[B, P]`, 0 where the first P slots of a row are padding; None if there is none.
            device: device of the mask.

        Returns:
            int64 `[B, L + extra]`, or None if nothing is masked.
        """
        gaps = self.gaps
        # What lies behind a row that begins at slot 0 is told by the tree, if there is one.
        ends = self.lengths if self._in_place and not extra else [self.physical + extra] * len(gaps)
        if prompt_mask_BP is None and not any(gaps) and len(set(ends)) == 1:
            return None
        mask = torch.ones((len(gaps), self.physical + extra), dtype=torch.long, device=device)
        for row, gap in enumerate(gaps):
            mask[row, :gap] = 0
            mask[row, ends[row] :] = 0
            if prompt_mask_BP is not None:
                mask[row, gap : gap + prompt_mask_BP.shape[1]] = prompt_mask_BP[row].to(mask)
        return mask

    def transaction(self) -> CacheTransaction:
        """A context: forwards inside append tree slots; what is not committed is undone on exit."""
        return CacheTransaction(self)


class CacheTransaction:
    """Snapshot, tree forwards, then commit of one path per row, or nothing at all.

    Layers are restored from the snapshot on every exit without a commit, so an exception in a forward, a processor or
    a stopping criterion leaves the committed prefix.
    """

    def __init__(self, rows: RowCache) -> None:
        self._rows = rows
        self._dense: list[LayerState] = []
        self._static: list[LayerState] = []
        self._recorders: list[SlidingRecorder | ReplayRecorder] = []
        self._quantized: list[QuantizedRecorder] = []
        self._tree: list[LayerState] = []
        self._lengths: list[int] = []
        self._open = False

    def __enter__(self) -> CacheTransaction:
        self._lengths = list(self._rows.lengths)
        # `generate` may hand over a cache whose layers appear at the first update; by now they exist.
        for layer in self._rows.layers:
            kind = layer_kind(layer)
            if kind == DENSE:
                self._dense.append(LayerState(layer))
            elif kind == TREE:
                self._tree.append(LayerState(layer))
            elif kind == STATIC:
                self._static.append(LayerState(layer, self._rows.physical))
            elif kind == QUANTIZED:
                self._quantized.append(QuantizedRecorder(layer))
            elif kind == REPLAYED:
                self._recorders.append(ReplayRecorder(layer))
            elif kind != EMPTY:
                self._recorders.append(SlidingRecorder(layer))
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self._open = False
            self._undo()

    def _undo(self) -> None:
        self._rows.lengths = self._lengths
        for state in (*self._dense, *self._static, *self._tree):
            state.restore()
        for recorder in self._recorders:
            recorder.remove()
        for quantized in self._quantized:
            quantized.remove()

    def commit(self, slots: Sequence[Sequence[int]]) -> None:
        """Keep the accepted tree slots of every row, in order, and drop all others.

        Args:
            slots: per row strictly increasing tree slots (0 is the first slot behind the committed ones).
        """
        if not self._open:
            raise TreeSpecError("commit outside of an open cache transaction")
        if not any(slots):
            self.__exit__(None, None, None)
            return
        accepted = Accepted(slots, self._rows.physical, self._rows.lengths)
        self._rows.lengths = accepted.lengths
        if not accepted.uniform and (self._static or self._quantized):
            raise TreeSpecError(f"rows of {type(self._rows.cache).__name__} must all accept equally many nodes")

        for state in self._dense:
            _commit_dense(state.layer, accepted)
        _commit_trees([state.layer for state in self._tree], slots, self._lengths)
        static = [state.layer for state in self._static if state.layer.is_initialized]
        used = int(static[0].get_seq_length()) if static else 0
        for layer in static:
            _commit_static(layer, accepted, used)
        for quantized in self._quantized:
            quantized.commit(slots)
        for recorder in self._recorders:
            recorder.commit(accepted)
        # Only now: an interrupt between two layers must still undo them all.
        self._open = False


def _commit_dense(layer: Any, accepted: Accepted) -> None:
    for name, states, axes in held_states(layer):
        if accepted.uniform:
            # Storage made by the tree's own `update`: no older reference sees the writes.
            states = states if axes.owned or accepted.in_place else states.clone()
            keep_slots(states, axes, accepted)
            setattr(layer, name, states.narrow(axes.tokens, 0, accepted.after))
        else:
            setattr(layer, name, accepted.gathered(states, axes))


def _commit_trees(layers: Sequence[TreeLayer], slots: Sequence[Sequence[int]], before: Sequence[int]) -> None:
    moves: SlotMoves | None = None
    for layer in layers:
        # Some models never fill a layer, or not in a forward like this one.
        if layer.is_initialized and layer.lengths != tuple(before):
            moves = moves or SlotMoves(slots, before, layer.physical - max(before))
            layer.commit(moves)


def _commit_static(layer: Any, accepted: Accepted, used: int) -> None:
    for name, states, axes in held_states(layer):
        if axes.owned:
            keep_slots(states, axes, accepted)
        else:
            # A tensor of the model's own beside the storage, as long as the text.
            states = states if accepted.in_place else states.clone()
            keep_slots(states, axes, accepted)
            setattr(layer, name, states.narrow(axes.tokens, 0, accepted.after))
    set_static_length(layer, accepted.after, used)
