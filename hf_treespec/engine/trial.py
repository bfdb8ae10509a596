"""Calls that are made to measure: trees of given sizes, and a look at what their policies learnt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from hf_treespec import clock
from hf_treespec.control import Setting, SizePolicy
from hf_treespec.draft import Draft, DraftRow
from hf_treespec.tree import NODES, PATHS, TokenTree, TreeLimits, best_first_shape
from hf_treespec.verify import DraftLaws

__all__ = ["SizedTrees", "Trial", "current_trial", "on_trial"]

_CURRENT: ContextVar[Trial | None] = ContextVar("treespec_trial", default=None)


class SizedTrees:
    """Draft source of trees of given sizes in turn, which times the rounds that they are scored in.

    Args:
        sizes: drafted nodes.
        repeats: how often each is timed; the sizes take turns, so that a slow spell of the machine hits all of them.
        by_paths: whether the target reads each path as a row, so that sizes are those of all rows together.
        vocab_size: tokens are below it.
    """

    name = "calibration"
    cheap = True

    def __init__(self, sizes: Sequence[int], repeats: int, *, by_paths: bool, vocab_size: int) -> None:
        self.seconds: dict[int, list[float]] = {}
        self._measure = PATHS if by_paths else NODES
        self._vocab = vocab_size
        # The first of each size are warm-ups.
        self._left = [size for _ in range(repeats + 1) for size in sizes]
        self._warm_ups = len(sizes)
        self._running: tuple[int, int, float] | None = None  # size, units, start
        self._timed: set[int] = set()
        self._sizes = tuple(sizes)

    @property
    def rounds_left(self) -> int:
        """Rounds that are still to be timed."""
        return len(self._left)

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[TokenTree]:
        """One tree of the next size per row; see `Draft.propose`."""
        now = clock.now()
        if self._running is not None:
            size, units, start = self._running
            self._timed.add(size)
            self.seconds.setdefault(units, []).append(now - start)
            self._running = None
        size = self._left[0] if self._left else 0
        if any(limit.max_nodes < size or not limit.max_depth for limit in limits):
            return [TokenTree.root_only(row.tokens[-1]) for row in rows]
        trees = [self._tree(row.tokens[-1], size, limit) for row, limit in zip(rows, limits, strict=True)]
        if self._left:
            self._left.pop(0)
            if self._warm_ups:
                self._warm_ups -= 1
            else:
                self._running = size, self._measure.units(trees[0]), clock.now()
        return trees

    def _tree(self, root: int, size: int, limits: TreeLimits) -> TokenTree:
        shape = best_first_shape(limits.capped(max_nodes=size))
        # Any tokens do, as long as siblings differ.
        return TokenTree((root, *((root + 1 + rank) % self._vocab for rank in shape.tokens[1:])), shape.parents)

    def end(self) -> None:
        """Leave the round that was begun last untimed, for another text: what follows it is no proposal."""
        if self._running is not None:
            self._left.insert(0, self._running[0])
        self._running = None

    @property
    def missing(self) -> list[int]:
        """Sizes that were never timed."""
        return [size for size in self._sizes if size not in self._timed]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """See `Draft.commit`."""

    def laws(self, batch: int) -> DraftLaws | None:
        """None: no node is random; see `Draft.laws`."""
        return None


@dataclass(slots=True)
class Trial:
    """What calls inside of `on_trial` do besides.

    Args:
        source: drafts instead of what the call says; None for that.
        policies: of the calls, in order; they learn even where no sizes are chosen.
        setting: what the costs of the latest call hold for; a call may change the attention.
    """

    source: Draft | None = None
    policies: list[SizePolicy] = field(default_factory=list)
    setting: Setting | None = None


def current_trial() -> Trial | None:
    """The trial that the call is part of."""
    return _CURRENT.get()


@contextmanager
def on_trial(trial: Trial) -> Iterator[Trial]:
    """All calls with a tree inside, of this thread, are part of the trial."""
    token = _CURRENT.set(trial)
    try:
        yield trial
    finally:
        _CURRENT.reset(token)
