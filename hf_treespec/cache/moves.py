"""Which slots of a `TreeCache` a commit moves and clears, and where the tokens of an update go when rows part.

Index tensors are made once for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hf_treespec.cache.slots import Place, Slots

__all__ = ["SlotMoves", "Tail", "behind"]


class SlotMoves:
    """One commit: which slots of a tree stay, as index tensors that are made once per device and not once per layer.

    Args:
        slots: per row strictly increasing tree slots.
        before: per row the slots before the tree.
        count: M.
    """

    def __init__(self, slots: Sequence[Sequence[int]], before: Sequence[int], count: int) -> None:
        self.lengths = tuple(length + len(row) for length, row in zip(before, slots, strict=True))
        self.tail = Tail(self.lengths, [length + count for length in before])
        self._before, self._slots = tuple(before), [list(row) for row in slots]
        self._rows_alike = len(set(self._before)) == 1 and all(row == self._slots[0] for row in self._slots)
        self._made: dict[torch.device, Tensor] = {}

    def apply(self, slots: Slots, dropped: int) -> None:
        """Move what stays, and clear what does not.

        Args:
            slots: of a layer.
            dropped: tokens at the start that it does not hold.
        """
        if any(row != list(range(len(row))) for row in self._slots):
            index = self._index(slots.device)
            if self._rows_alike:
                slots.move_alike(_behind(index, dropped), self._before[0] - dropped)
            else:
                rows, sources, targets = index
                slots.move(rows, _behind(sources, dropped), _behind(targets, dropped))
        self.tail.clear(slots, dropped)

    def _index(self, device: torch.device) -> Tensor:
        """int64 `[n]`, where the slots of all rows come from; or `[3, n]`: rows, sources and targets of each slot."""
        if device not in self._made:
            if self._rows_alike:
                self._made[device] = torch.tensor([self._before[0] + slot for slot in self._slots[0]], device=device)
            else:
                entries = [
                    (row, length + slot, length + to)
                    for row, (length, kept) in enumerate(zip(self._before, self._slots, strict=True))
                    for to, slot in enumerate(kept)
                    if slot != to
                ]
                self._made[device] = _index(entries, device)
        return self._made[device]


class Tail:
    """What lies behind the text of each row and has to be cleared.

    Args:
        first: per row the first slot of it.
        end: per row the slot behind the last one.
    """

    def __init__(self, first: Sequence[int], end: Sequence[int]) -> None:
        self._first, self._end = tuple(first), tuple(end)
        self._same = len({*zip(self._first, self._end, strict=True)}) == 1

    def clear(self, slots: Slots, dropped: int) -> None:
        """Make it zero."""
        if self._same:
            slots.clear(Place(start=self._first[0] - dropped), self._end[0] - self._first[0])
            return
        rows, index = _between(self._first, self._end, slots.device)
        if rows.numel():
            slots.clear(Place(rows=rows, slots=_behind(index, dropped)))


def _behind(index: Tensor, dropped: int) -> Tensor:
    """Where slots are in a layer that does not hold the first ones."""
    return index - dropped if dropped else index


def _index(entries: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """int64 `[k, n]` of n entries of k numbers."""
    return torch.tensor(entries, dtype=torch.long).T.contiguous().to(device)


@lru_cache(maxsize=4)
def behind(lengths: tuple[int, ...], count: int, device: torch.device) -> Tensor:
    """int64 `[2, n]`: rows and slots of so many slots behind every row. All layers of a forward ask for the same."""
    return _index([(row, slot) for row, n in enumerate(lengths) for slot in range(n, n + count)], device)


@lru_cache(maxsize=4)
def _between(first: tuple[int, ...], end: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 `[2, n]`: rows and slots from `first` to `end` of every row. All layers of a round ask for the same."""
    pairs = [(row, slot) for row, (one, two) in enumerate(zip(first, end, strict=True)) for slot in range(one, two)]
    return _index(pairs, device) if pairs else torch.zeros((2, 0), dtype=torch.long, device=device)
