"""One layer of a `TreeCache`: keys and values in room that is made in advance, with a length for each row.

Row b holds its tokens in slots `[0, lengths[b])`. An update writes Q tokens behind the end of every row, in place; a
tree is such an update, and a commit moves the accepted slots to the front of the tree, at most M a row. So neither
costs more in a long text than in a short one. Room grows by as much as there is, up to 4096 slots at a time: doubling
makes copies rare in a short text, and in a long one a copy of the layer every 4096 tokens is less than a thousandth of
what attention reads meanwhile, while doubling would leave half of the memory empty.

Shapes: B rows, H heads, L physical length (that of the longest row), Q tokens of an update, M tree slots, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.cache.moves import SlotMoves, Tail, behind
from hf_treespec.cache.slots import Place, Scratch, Slots, make_slots
from hf_treespec.errors import TreeSpecError

__all__ = ["TreeLayer"]

_BLOCK = 64
_MOST_AHEAD = 4096
_NAMES = ("keys", "values")


class TreeLayer(_compat.CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer that takes trees in place. Works as a layer of any transformers cache does.

    A sliding layer keeps its whole text (so that it can be cropped anywhere) and shows its window.

    Args:
        storage: one of `slots.STORAGES`.
        sliding_window: tokens that a query sees, itself among them; None for all.
        scratch: of the cache, for quantised storage; None to keep a dense copy of all.

    Attributes:
        lengths: per row the tokens it holds, those that were dropped included.
        dropped: tokens at the start that are not here: a cache of another kind had forgotten them.
        slots: storage of "keys" and "values"; see `Slots.parts` for the tensors.
    """

    is_compileable = False
    is_croppable = True

    def __init__(
        self, storage: str = "dense", *, sliding_window: int | None = None, scratch: Scratch | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storage = storage
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.lengths: tuple[int, ...] = ()
        self.dropped = 0
        self.slots: dict[str, Slots] = {}
        self._scratch = scratch
        self._wanted = 0

    # --- what attention asks -----------------------------------------------------------------------------------

    @property
    def keys(self) -> Tensor | None:
        """Keys `[B, H, L, D]` as attention sees them; of dense storage a view."""
        return self.states()[0] if self.is_initialized else None

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._no_setting("keys", value)

    @property
    def values(self) -> Tensor | None:
        """Values `[B, H, L, D]` as attention sees them; of dense storage a view."""
        return self.states()[1] if self.is_initialized else None

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._no_setting("values", value)

    def states(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens that are here, for a layer that has been updated."""
        keys, values = (self.slots[name].read(0, self.physical - self.dropped, fresh=True) for name in _NAMES)
        return keys, values

    def _no_setting(self, name: str, value: Tensor | None) -> None:
        # The base class declares them so.
        if value is not None:
            raise AttributeError(f"{name} of a TreeLayer are written by update() alone")

    @property
    def physical(self) -> int:
        """L, with what was dropped."""
        return max(self.lengths, default=0)

    @property
    def capacity(self) -> int:
        """Slots there is room for."""
        return min((one.capacity for one in self.slots.values()), default=0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take shape, dtype and device from the first states `[B, H, Q, D]`."""
        self.lengths = (self.dropped,) * int(key_states.shape[0])
        self.slots = {
            name: make_slots(self.storage, states, name, self._scratch)
            for name, states in zip(_NAMES, (key_states, value_states), strict=True)
        }
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append states to every row.

        Args:
            key_states: `[B, H, Q, D]`.
            value_states: `[B, H, Q, D]`; its D may be another.
            args: not read.
            kwargs: not read.

        Returns:
            Keys and values of the slots that `get_mask_sizes` told, the new ones included.

        Raises:
            ValueError: for states that require gradients, or of another number of rows.
        """
        if key_states.requires_grad or value_states.requires_grad:
            raise ValueError("a TreeCache is written in place and keeps no graph: run the model under torch.no_grad()")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, count = int(key_states.shape[0]), int(key_states.shape[2])
        if batch != len(self.lengths):
            raise ValueError(
                f"states of {batch} rows for a TreeCache of {len(self.lengths)}: make a new cache, or change the rows "
                "by batch_repeat_interleave, batch_select_indices or reorder_cache"
            )
        first, end = self._first(), self.physical + count
        self._make_room(end)
        place = self._place(count, key_states.device)
        for name, states in zip(_NAMES, (key_states, value_states), strict=True):
            self.slots[name].write(states, place)
        self.lengths = tuple(length + count for length in self.lengths)
        keys, values = (self.slots[name].read(first - self.dropped, end - self.dropped) for name in _NAMES)
        return keys, values

    def _first(self) -> int:
        """The first slot that a query behind the text sees."""
        if self.sliding_window is None:
            return self.dropped
        return max(self.dropped, min(self.lengths, default=self.dropped) - self.sliding_window + 1)

    def _place(self, count: int, device: torch.device) -> Place:
        """So many slots behind every row."""
        if min(self.lengths, default=0) == self.physical:
            return Place(start=self.physical - self.dropped)
        rows, slots = behind(self.lengths, count, device)
        return Place(rows=rows, slots=slots - self.dropped)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many slots the next update shows, and the first of them."""
        first = self._first()
        return self.physical + query_length - first, first

    def get_seq_length(self) -> int:
        """L."""
        return self.physical

    def get_max_length(self) -> int:
        """-1: there is no bound."""
        return -1

    # --- room and rounds ---------------------------------------------------------------------------------------

    def reserve(self, slots: int) -> None:
        """Have room for so many tokens of a row; before the first update it is noted for then."""
        self._wanted = max(slots, self._wanted)
        self._make_room(slots)

    def _make_room(self, end: int) -> None:
        needed = max(end, self._wanted) - self.dropped
        if not self.is_initialized or needed <= self.capacity:
            return
        spare = 0 if self._wanted >= end else min(needed, _MOST_AHEAD)
        room = -(-(needed + spare) // _BLOCK) * _BLOCK
        for one in self.slots.values():
            if one.capacity < room:
                one.grow(room)

    def commit(self, moves: SlotMoves) -> None:
        """Keep the accepted slots of a tree, and clear the others."""
        for one in self.slots.values():
            moves.apply(one, self.dropped)
        self.lengths = moves.lengths

    def truncate(self, lengths: Sequence[int]) -> None:
        """Go back to these lengths of the rows; what lies behind is cleared."""
        if not self.is_initialized or self.lengths == tuple(lengths):
            return
        tail = Tail(lengths, self.lengths)
        self.lengths = tuple(lengths)
        for one in self.slots.values():
            tail.clear(one, self.dropped)

    def held(self) -> dict[str, dict[str, Tensor]]:
        """By "keys" and "values", and by part, the tensors of all tokens that are here: `[B, H, L, ...]`."""
        return {name: one.held(self.physical - self.dropped) for name, one in self.slots.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes in which attention reads "keys" and "values"."""
        return {name: one.dtype for name, one in self.slots.items()}

    def adopt(
        self, held: Mapping[str, Mapping[str, Tensor]], *, length: int, dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """Take what another layer of the same storage held as the text of this one, which is empty.

        Args:
            held: of the other.
            length: its length, with what it had dropped.
            dtypes: of the other.
        """
        # Any part but the scales has the shape of the states.
        largest = {name: next(part for part in parts.values() if part.dim() == 4) for name, parts in held.items()}
        self.lazy_initialization(*(largest[name][:, :, :0].to(dtypes[name]) for name in _NAMES))
        for name, parts in held.items():
            self.slots[name].adopt(parts)
        self.dropped = length - self.capacity
        self.lengths = (length,) * len(self.lengths)

    # --- what users of a cache ask -----------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of every row.

        Args:
            tokens_to_remove: a negative number of tokens; or a positive number of tokens that stay, the first ones,
                as older releases of transformers have it; or zero.

        Raises:
            ValueError: if a window would then miss tokens that were dropped before.
        """
        if tokens_to_remove > 0:
            left = [min(length, tokens_to_remove) for length in self.lengths]
        else:
            left = [max(0, length + tokens_to_remove) for length in self.lengths]
        shorter = tuple(left) != self.lengths
        if self.dropped and shorter and min(left) < self.dropped + (self.sliding_window or 1) - 1:
            raise ValueError(
                f"crop({tokens_to_remove}): the cache was made from one that had forgotten its first {self.dropped} "
                "tokens, which would be seen again; read the text anew"
            )
        self.truncate(left)

    def reset(self) -> None:
        """Forget everything, the storage too."""
        self.lengths, self.dropped, self.slots, self.is_initialized = (), 0, {}, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row `beam_idx[i]` was."""
        self._pick(beam_idx.tolist(), lambda part: part.index_select(0, beam_idx.to(part.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows only."""
        kept = torch.arange(len(self.lengths))[indices.cpu()]
        self._pick(kept.tolist(), lambda part: part.index_select(0, kept.to(part.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have every row `repeats` times."""
        rows = [row for row in range(len(self.lengths)) for _ in range(repeats)]
        self._pick(rows, lambda part: part.repeat_interleave(repeats, dim=0))

    def _pick(self, rows: Sequence[int], change: Callable[[Tensor], Tensor]) -> None:
        if not self.is_initialized:
            return
        for one in self.slots.values():
            one.each_row(change)
        self.lengths = tuple(self.lengths[row] for row in rows)

    def offload(self) -> None:
        """Refused: offloading moves whole tensors, and this layer writes in place.

        Raises:
            TreeSpecError: always.
        """
        raise TreeSpecError("a TreeCache cannot be offloaded; use kv_cache='int8' to save memory")
