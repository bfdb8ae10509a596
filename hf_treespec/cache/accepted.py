"""The accepted slots of one commit, as index tensors that are made once per device and not once per layer.

Shapes: B rows, A accepted slots of a row, L slots of the cache, M tree slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_treespec.cache.states import Axes

__all__ = ["Accepted", "keep_slots", "wide_index"]


class Accepted:
    """What one commit keeps.

    Args:
        slots: per row strictly increasing tree slots; 0 is the first slot behind the committed ones.
        before: physical slots of the cache before the tree.
        lengths: per row the slots that were not gap.
    """

    def __init__(self, slots: Sequence[Sequence[int]], before: int, lengths: Sequence[int]) -> None:
        self.slots = [list(row) for row in slots]
        self.before = before
        self.lengths = [length + len(row) for length, row in zip(lengths, self.slots, strict=True)]
        self.after = max(self.lengths)
        self._old_gaps = [before - length for length in lengths]
        self._gaps = [self.after - length for length in self.lengths]
        self._made: dict[tuple[str, torch.device], Tensor] = {}

    @property
    def count(self) -> int:
        """Slots that the cache grows by."""
        return self.after - self.before

    @property
    def uniform(self) -> bool:
        """Whether all rows keep equally many slots, so that no gap changes."""
        return self._gaps == self._old_gaps

    @property
    def same(self) -> bool:
        """Whether all rows keep the same slots."""
        return all(row == self.slots[0] for row in self.slots)

    @property
    def in_place(self) -> bool:
        """Whether the kept slots are the first ones of the tree already."""
        return self.uniform and all(row == list(range(len(row))) for row in self.slots)

    def picks(self, device: torch.device) -> Tensor:
        """int64 `[A]` of the first row."""
        return self._on("picks", device, lambda: torch.tensor(self.slots[0], dtype=torch.long))

    def picks_BA(self, device: torch.device) -> Tensor:
        """int64 `[B, A]`; rows must keep equally many slots."""
        return self._on("picks_BA", device, lambda: torch.tensor(self.slots, dtype=torch.long))

    def sources_BL(self, device: torch.device) -> Tensor:
        """Where each physical slot comes from: an old slot, `before` + a tree slot, or -1 for a gap."""
        return self._on("sources_BL", device, self._sources)

    def gathered(self, states: Tensor, axes: Axes, *, first: int = 0, keep: int | None = None) -> Tensor:
        """A layer's tensor rebuilt for the new lengths.

        Slots of a gap, and window slots that were dropped because the row never needs them, take any finite value.

        Args:
            states: old slots and tree slots.
            axes: where its rows and tokens are.
            first: physical index of its first slot.
            keep: how many of the newest slots the layer holds; None for all.
        """
        source_BL = self.sources_BL(states.device)
        if keep is not None:
            source_BL = source_BL[:, max(0, self.after - keep) :]
        return states.gather(axes.tokens, wide_index((source_BL - first).clamp(min=0), states, axes))

    def _on(self, name: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        key = (name, device)
        if key not in self._made:
            host = (name, torch.device("cpu"))
            if host not in self._made:
                self._made[host] = make()
            if key != host:
                self._made[key] = self._made[host].to(device)
        return self._made[key]

    def _sources(self) -> Tensor:
        source_BL = torch.full((len(self.slots), self.after), -1)
        for row, (old_gap, gap, accepted) in enumerate(zip(self._old_gaps, self._gaps, self.slots, strict=True)):
            places = [torch.arange(old_gap, self.before), self.before + torch.tensor(accepted, dtype=torch.long)]
            source_BL[row, gap:] = torch.cat(places)
        return source_BL


def keep_slots(states: Tensor, axes: Axes, accepted: Accepted) -> None:
    """Move the kept slots to the front of the tree, in place: at most M slots a row, never the whole cache.

    Args:
        states: a layer's tensor, written in place.
        axes: where its rows and tokens are.
        accepted: equally many slots in every row.
    """
    if accepted.in_place:
        return
    device = states.device
    target = states.narrow(axes.tokens, accepted.before, len(accepted.slots[0]))
    if accepted.same:
        target.copy_(states.index_select(axes.tokens, accepted.before + accepted.picks(device)))
    else:
        index_BA = accepted.before + accepted.picks_BA(device)
        target.copy_(states.gather(axes.tokens, wide_index(index_BA, states, axes)))


def wide_index(index_BA: Tensor, states: Tensor, axes: Axes) -> Tensor:
    """`[B, A]` as an index for `gather` along the token axis."""
    shape, wide = [1] * states.dim(), list(states.shape)
    shape[axes.rows] = index_BA.shape[0]
    shape[axes.tokens] = wide[axes.tokens] = index_BA.shape[1]
    return index_BA.reshape(shape).expand(wide)
