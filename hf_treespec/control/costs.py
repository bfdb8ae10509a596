"""What rounds cost, by what they read: learnt while decoding, and remembered between the calls of a model."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from hf_treespec.control.acceptance import Acceptance

__all__ = [
    "CostCurve",
    "CostKey",
    "Costs",
    "RoundCosts",
    "costs_of",
    "forget_texts",
    "interpolated",
    "known_of",
    "rung",
    "size_ladder",
]

_WEIGHT = 0.25  # of a new timing in the average
_CLAMP = 2.0  # a single timing counts as at most so many times the average: pauses of the machine are no cost
_TIMED_AGAIN = 256  # rounds after which all is timed anew: machines get busy, or idle
_SURE = 2  # timings of a size before it counts as known
_PRIOR_SLOPE = 0.01  # share of a plain round that one more node costs, where nothing was timed yet
_SMALLEST_CONTEXT = 7  # bits: contexts below 128 tokens are one bucket


def size_ladder(max_nodes: int) -> tuple[int, ...]:
    """Tree sizes that are worth telling apart, `max_nodes` itself among them.

    All up to 8; then 12, 16, 24, 32, 48, ... and of each the one below: a forward reads a node more than are drafted,
    and where its time is a staircase, steps end at round numbers of tokens.
    """
    sizes = {0, max_nodes, *range(1, min(8, max_nodes) + 1)}
    step = 8
    while step <= max_nodes:
        for size in (step, step + step // 2):
            sizes |= {one for one in (size - 1, size) if one <= max_nodes}
        step *= 2
    return tuple(sorted(sizes))


def rung(size: int) -> int:
    """The size of the endless ladder that a tree of this size counts as."""
    if size <= 8:
        return size
    step = 1 << (size.bit_length() - 1)
    rungs = (step, step + step // 2 - 1, step + step // 2, 2 * step - 1)
    return next(one for one in rungs if size <= one)


def _by_nodes(size: int) -> float:
    return 1.0 + _PRIOR_SLOPE * size


class CostCurve:
    """Seconds by size: averages of timings, interpolated where there are none.

    Args:
        shape: seconds by size up to a factor, to interpolate along; default: nodes, each of them cheap.
        rounded: which size a timing counts for.
    """

    def __init__(self, shape: Callable[[int], float] = _by_nodes, *, rounded: Callable[[int], int] = rung) -> None:
        self._shape = shape
        self._rounded = rounded
        # What was known before, and per size the timings since: count and average.
        self._base: dict[int, float] = {}
        self._timed: dict[int, tuple[int, float]] = {}
        self._told: dict[tuple[int, ...], list[float]] = {}

    def add(self, size: int, seconds: float) -> None:
        """Take in a timing."""
        size = self._rounded(size)
        count, mean = self._timed.get(size, (0, 0.0))
        if count < _SURE:
            # The first of a size is often a warm-up.
            mean = min(mean, seconds) if count else seconds
        else:
            mean += _WEIGHT * (min(seconds, _CLAMP * mean) - mean)
        self._timed[size] = count + 1, mean
        self._told.clear()

    def assume(self, known: Mapping[int, float]) -> None:
        """Begin from a curve that was measured elsewhere, instead of any timings before; those since count on."""
        self._base, self._timed = dict(known), {}
        self._told.clear()

    def renew(self) -> None:
        """Have all sizes timed anew; until then, and between those that are, the curve keeps its form."""
        self._base, self._timed = self.known(), {}
        self._told.clear()

    def known(self) -> dict[int, float]:
        """Seconds of the sizes that there is a figure for."""
        sizes = sorted({*self._base, *self._timed})
        return dict(zip(sizes, self.seconds(sizes), strict=True))

    def timings(self, size: int) -> int:
        """How many timings there are of a size since the last renewal."""
        return self._timed.get(self._rounded(size), (0, 0.0))[0]

    def is_known(self, size: int) -> bool:
        """Whether the figure of a size rests on more than its neighbours."""
        return size in self._base or self.timings(size) >= _SURE

    def __bool__(self) -> bool:
        """Whether anything is known."""
        return bool(self._base or self._timed)

    def seconds(self, sizes: Sequence[int]) -> list[float]:
        """Estimate per size; before any timing the shape alone."""
        asked = tuple(sizes)
        if asked not in self._told:
            self._told[asked] = self._estimates(asked)
        return self._told[asked]

    def _estimates(self, sizes: Sequence[int]) -> list[float]:
        prior = [self._shape(size) for size in sizes]
        base = _ratios(self._base, self._shape)
        if base:
            prior = [value * _interpolate(base, size) for value, size in zip(prior, sizes, strict=True)]
        timed = {size: mean for size, (_, mean) in self._timed.items()}

        def before(size: int) -> float:
            return self._shape(size) * (_interpolate(base, size) if base else 1.0)

        since = _ratios(timed, before)
        if since:
            prior = [value * _interpolate(since, size) for value, size in zip(prior, sizes, strict=True)]
        return prior

    def at_least(self, sizes: Sequence[int]) -> list[float]:
        """What each size takes at the very least, as no size takes less than a smaller one does."""
        known = [size for size in sorted({*self._base, *self._timed}) if self.is_known(size)]
        values = self.seconds(known)
        out = []
        for size, estimate in zip(sizes, self.seconds(sizes), strict=True):
            place = bisect_left(known, size)
            exact = place < len(known) and known[place] == size
            out.append(estimate if exact or not place else min(estimate, values[place - 1]))
        return out


def _ratios(known: Mapping[int, float], shape: Callable[[int], float]) -> list[tuple[int, float]]:
    return [(size, known[size] / shape(size)) for size in sorted(known) if shape(size) > 0.0]


def interpolated(known: Mapping[int, float], size: int) -> float:
    """Seconds of a size by those of others: piecewise linear, along a line behind the last."""
    points = sorted(known.items())
    if size > points[-1][0] and len(points) > 1:
        (low, below), (high, above) = points[-2:]
        return above + (above - below) * (size - high) / (high - low)
    return _interpolate(points, size)


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


class RoundCosts:
    """Costs of rounds over texts of about one length.

    Attributes:
        target: seconds of a round without drafting, by what the target reads beside the roots.
        drafting: seconds of a draft, by the levels of its trees.
        due: rounds that are to time the smallest and the largest tree, in turn.
    """

    def __init__(self) -> None:
        self.target = CostCurve()
        self.drafting = CostCurve(float, rounded=int)
        self.due = 2 * _SURE
        self._rounds = 0

    def assume(self, *, target: Mapping[int, float], drafting: Mapping[int, float]) -> None:
        """Begin from curves that were measured before; an empty one changes nothing."""
        if target:
            self.target.assume(target)
            self.due = 0
        if drafting:
            self.drafting.assume(drafting)

    def count(self) -> None:
        """Count a round; after so many of them everything is timed anew."""
        self.due = max(0, self.due - 1)
        self._rounds += 1
        if self._rounds >= _TIMED_AGAIN:
            self.target.renew()
            self.drafting.renew()
            self._rounds, self.due = 0, 2 * _SURE


class CostKey(NamedTuple):
    """What costs depend on besides the sizes and the length of the text.

    Attributes:
        batch: rows, rounded up to a power of two.
        dtype: of the target.
        device: of the target.
        attention: its implementation.
        route: how trees enter it, and by which cache.
        threads: of the CPU.
        draft: what drafts.
    """

    batch: int
    dtype: str
    device: str
    attention: str
    route: str
    threads: int
    draft: str


class Costs:
    """Costs under one key, by the length of the text.

    Attributes:
        acceptance: what the latest call found of how often its draft was right.
    """

    def __init__(self) -> None:
        self.acceptance: Acceptance | None = None
        self._buckets: dict[int, RoundCosts] = {}

    def at(self, context: int) -> RoundCosts:
        """Those of texts of about this length.

        What is known of the nearest other length is where they begin: of rounds and of drafts each, as calibration
        measures the two at lengths of their own.
        """
        bucket = _bucket(context)
        found = self._buckets.setdefault(bucket, RoundCosts())
        if not found.target or not found.drafting:
            near = [self._buckets[one] for one in sorted(self._buckets, key=lambda one: abs(one - bucket))]
            if not found.target:
                found.assume(target=next((one.target.known() for one in near if one.target), {}), drafting={})
            if not found.drafting:
                found.assume(target={}, drafting=next((one.drafting.known() for one in near if one.drafting), {}))
        return found

    def assume(self, context: int, *, target: Mapping[int, float], drafting: Mapping[int, float]) -> None:
        """Begin from curves that were measured before, for texts of about this length."""
        self._buckets.setdefault(_bucket(context), RoundCosts()).assume(target=target, drafting=drafting)

    def take(self, curves: Iterable[tuple[int, Mapping[int, float], Mapping[int, float]]]) -> None:
        """Begin anew, at all lengths, from curves that were measured just now; what they do not tell of stays.

        Args:
            curves: of each the length of the texts, and target and drafting as for `assume`.
        """
        measured = Costs()
        for context, target, drafting in curves:
            measured.assume(context, target=target, drafting=drafting)
        for bucket in sorted({*self._buckets, *measured._buckets}):
            near = measured.at(_longest(bucket))
            own = self._buckets.setdefault(bucket, RoundCosts())
            own.assume(target=near.target.known(), drafting=near.drafting.known())

    def of_rounds(self) -> Costs:
        """A copy, without what texts had to do with."""
        copy = Costs()
        copy._buckets = deepcopy(self._buckets)
        return copy


def _bucket(context: int) -> int:
    return max(_SMALLEST_CONTEXT, context.bit_length())


def _longest(bucket: int) -> int:
    """Context of a bucket."""
    return (1 << bucket) - 1


_BOOK: weakref.WeakKeyDictionary[Any, dict[CostKey, Costs]] = weakref.WeakKeyDictionary()


def costs_of(model: Any, key: CostKey, begin: Callable[[CostKey], Costs] | None = None) -> Costs:
    """What is known of a model under a key; it lives as long as the model, and what rounds take is learnt into it.

    Args:
        model: the target.
        key: of the call.
        begin: makes what a key begins from; default nothing.
    """
    known = _BOOK.setdefault(model, {})
    if key not in known:
        known[key] = Costs() if begin is None else begin(key)
    return known[key]


def known_of(model: Any) -> Mapping[CostKey, Costs]:
    """All that is known of a model, by key."""
    return _BOOK.get(model, {})


def forget_texts(of: Callable[[Any], bool]) -> None:
    """Forget what texts had to do with, of the models that a function picks; what rounds cost is known on."""
    for model in [model for model in list(_BOOK) if of(model)]:
        for costs in _BOOK[model].values():
            costs.acceptance = None
