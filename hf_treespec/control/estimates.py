"""What a round costs and what it brings, by tree size."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median_low

__all__ = ["CostCurve", "GainCurve", "size_ladder"]

_RECENT = 4  # timings kept per size
_PRIOR_SLOPE = 0.01  # share of a plain round that one more node costs, where nothing was timed yet
_DECAY = 0.9  # weight of the past in the estimate of acceptance
_PRIOR_TOKENS = 1.0  # predicted and accepted tokens that trust in the draft starts from; forgotten like any sample


def size_ladder(max_nodes: int) -> tuple[int, ...]:
    """Tree sizes that are worth telling apart: 0, 1, 2, 3, 4, 6, 8, 12, 16, ... and `max_nodes` itself.

    Neighbours differ by half at most; finer steps drown in the noise of a timing.
    """
    sizes = {0, max_nodes}
    step = 1
    while step <= max_nodes:
        sizes |= {size for size in (step, step + step // 2) if size <= max_nodes}
        step *= 2
    return tuple(sorted(sizes))


class CostCurve:
    """Seconds of a round by drafted nodes: medians of the latest timings, interpolated where there are none.

    Args:
        sizes: the ladder, ascending from 0.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._recent: dict[int, deque[float]] = {size: deque(maxlen=_RECENT) for size in sizes}

    def add(self, nodes: int, seconds: float) -> None:
        """Take in a round of that many drafted nodes (of its largest row)."""
        place = min(bisect_left(self._sizes, nodes), len(self._sizes) - 1)
        self._recent[self._sizes[place]].append(seconds)

    def forget(self) -> None:
        """Drop all timings."""
        for recent in self._recent.values():
            recent.clear()

    def timings(self, size: int) -> int:
        """How many recent timings there are of a size of the ladder."""
        return len(self._recent[size])

    def seconds(self) -> list[float]:
        """Estimate per size of the ladder; all proportional to a mild prior slope before any timing."""
        prior = [1.0 + _PRIOR_SLOPE * size for size in self._sizes]
        # The lower median: of two timings the first is often a warm-up.
        known = [
            (size, median_low(self._recent[size]) / base)
            for size, base in zip(self._sizes, prior, strict=True)
            if self._recent[size]
        ]
        if not known:
            return prior
        return [base * _interpolate(known, size) for size, base in zip(self._sizes, prior, strict=True)]


def _interpolate(known: Sequence[tuple[int, float]], size: int) -> float:
    """Piecewise linear through `known`, constant beyond its ends."""
    right = bisect_left(known, (size,))
    if right == len(known):
        return known[-1][1]
    high, above = known[right]
    if right == 0 or high == size:
        return above
    low, below = known[right - 1]
    return below + (above - below) * (size - low) / (high - low)


class GainCurve:
    """Accepted drafted tokens of a round by tree size, and how far the draft's own prediction is to be trusted.

    Args:
        sizes: the ladder.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        # Decayed sums: rounds, accepted; and accepted over predicted, which starts from full trust.
        self._rounds = [0.0] * len(sizes)
        self._accepted = [0.0] * len(sizes)
        self._right = [_PRIOR_TOKENS] * len(sizes)
        self._predicted = [_PRIOR_TOKENS] * len(sizes)

    def add(self, place: int, accepted: int, predicted: float) -> None:
        """Take in one round of the ladder's size number `place`, scored or not.

        Args:
            place: index into the ladder.
            accepted: drafted tokens that the target agreed with.
            predicted: how many the draft expected: the sum of its node probabilities.
        """
        for sums, sample in (
            (self._rounds, 1.0),
            (self._accepted, accepted),
            (self._right, accepted),
            (self._predicted, predicted),
        ):
            sums[place] = _DECAY * sums[place] + sample

    def mean(self, place: int) -> float:
        """Accepted tokens a round of late; 0 before the first."""
        return self._accepted[place] / self._rounds[place] if self._rounds[place] else 0.0

    def expected(self, place: int, predicted: float) -> float:
        """The draft's prediction for a tree at hand, corrected by how earlier predictions turned out."""
        return predicted * self._right[place] / self._predicted[place]
