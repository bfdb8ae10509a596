"""How likely the target takes what a draft ranks j-th at depth d, learnt while decoding.

Every visited node tells of all children that were proposed below it, scored or not, which of them was right. So each
of them gives a sample of its depth and rank. Where the rule of verification throws coins, the probability that a child
is taken is known, and is the sample (a soft label); under the noise that draft and target share, and under greedy
decoding, it is 0 or 1 by itself.

Shapes: D depths, J ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hf_treespec.control.samples import Sample
from hf_treespec.tree import rank_acceptance

__all__ = ["Acceptance", "falling", "gains_by_depth"]

_DECAY, _FADE = 0.95, 0.995  # weight of the past, per judged tree, at depths that it tells of, and at others
_POOLED = 2.0  # samples that the curve of all depths counts for at each depth
_HOPED = 0.5  # samples that a good draft counts for behind the first depth: it matters where all before is good
_ABSENT = 0.5  # of a sample: a rank that was not offered where others were counts so far as wrong
_GUESS = 0.1  # samples that a rank which was never offered counts for when ranks are put in order
# The curve of all depths begins from a draft that is good, and holds it for little: what pays if it is so is tried.
_FIRST, _RATIO, _HELD = 0.75, 0.2, 3.0


def falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-increasing sequence nearest to `values` by weighted squares: pool adjacent violators.

    (Ayer et al. 1955; Barlow et al. 1972.)
    """
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        mean, mass, count = value, weight, 1
        while blocks and blocks[-1][0] < mean:
            above, more, length = blocks.pop()
            mean = (mean * mass + above * more) / (mass + more)
            mass, count = mass + more, count + length
        blocks.append((mean, mass, count))
    return [mean for mean, _, count in blocks for _ in range(count)]


class Acceptance:
    """Estimates of P(right | parent right) by depth and rank, shrunk to one curve of all depths.

    Args:
        max_depth: D.
        ranks: J.
        shared: estimates of all rows, whose curve this one is shrunk to and which it tells of its samples.
        earlier: estimates of an earlier call, which have a say in where these begin.
    """

    def __init__(
        self, max_depth: int, ranks: int, shared: Acceptance | None = None, earlier: Acceptance | None = None
    ) -> None:
        self.shape = max_depth, ranks
        self._shared = shared
        self._seen_DJ: NDArray[np.float64] = np.zeros(self.shape)
        self._right_DJ: NDArray[np.float64] = np.zeros(self.shape)
        self._start_J = np.array(rank_acceptance(ranks, first=_FIRST, ratio=_RATIO))
        if earlier is not None:
            known = earlier.pooled()[:ranks]
            self._start_J[: len(known)] += known
            self._start_J[: len(known)] /= 2.0
        # Of all that was seen, without decay.
        self.samples_DJ: NDArray[np.float64] = np.zeros(self.shape)
        self.hits_DJ: NDArray[np.float64] = np.zeros(self.shape)
        self.version = 0
        # Depth of the deepest node that was reached and had children.
        self.reached = 0

    def add(self, samples: Iterable[Sample]) -> None:
        """Take in a judged tree.

        Args:
            samples: of its nodes; none for a tree that had no nodes.
        """
        samples = list(samples)
        if not samples:
            return
        if self._shared is not None:
            self._shared.add(samples)
        self.version += 1
        seen, right = np.zeros(self.shape), np.zeros(self.shape)
        for sample in samples:
            if sample.depth < self.shape[0] and sample.rank < self.shape[1]:
                seen[sample.depth, sample.rank] += sample.weight
                right[sample.depth, sample.rank] += sample.weight * sample.hit
                if sample.weight >= 1.0:
                    self.reached = max(self.reached, sample.depth + 1)
        self.samples_DJ += seen
        self.hits_DJ += right
        told = seen[:, :1]
        factors = np.where(told > 0.0, 1.0 - (1.0 - _DECAY) * np.minimum(told, 1.0), _FADE)
        self._seen_DJ = factors * self._seen_DJ + np.maximum(seen, _ABSENT * told)
        self._right_DJ = factors * self._right_DJ + right

    def fade(self, keep: float) -> None:
        """Let what was seen weigh no more than `keep` samples of first ranks: it may have changed."""
        if self._shared is not None:
            self._shared.fade(keep)
        total = float(self._seen_DJ[:, :1].sum())
        if total > keep:
            self._seen_DJ *= keep / total
            self._right_DJ *= keep / total
        self.version += 1

    def pooled(self) -> NDArray[np.float64]:
        """The curve of all depths `[J]`."""
        start = self._start_J if self._shared is None else self._shared.pooled()
        held = _HELD if self._shared is None else _POOLED
        seen, right = self._seen_DJ.sum(0), self._right_DJ.sum(0)
        return np.asarray(_in_order((right + held * start) / (seen + held), seen))

    def table(self) -> NDArray[np.float64]:
        """P `[D, J]`, non-increasing in the rank, of sum 1 at most at each depth."""
        hoped = np.full((self.shape[0], 1), _HOPED)
        hoped[0] = 0.0
        right = self._right_DJ + _POOLED * self.pooled() + hoped * self._start_J
        mean = right / (self._seen_DJ + _POOLED + hoped)
        out = np.array([_in_order(row, mass) for row, mass in zip(mean, self._seen_DJ, strict=True)])
        # One child is right at most: the first ones have the say.
        before = np.cumsum(out, 1) - out
        return np.asarray(np.minimum(out, np.maximum(1.0 - before, 0.0)))


def _in_order(values: NDArray[np.float64], seen: NDArray[np.float64]) -> list[float]:
    return falling(values.tolist(), (seen + _GUESS).tolist())


def gains_by_depth(table_DJ: NDArray[np.float64], sizes: Sequence[int]) -> NDArray[np.float64]:
    """Accepted tokens to expect of the best static tree, by its depth and size.

    The best tree of n nodes holds the n most probable ones: see `hf_treespec.tree.best_first_shape`.

    Args:
        table_DJ: P(accepted | parent accepted), non-increasing in the rank.
        sizes: S nodes, ascending from 0.

    Returns:
        `[D + 1, S]`.
    """
    most = sizes[-1]
    level = np.ones(1)
    best = np.zeros(0)
    out = np.zeros((len(table_DJ) + 1, len(sizes)))
    for depth, ranks in enumerate(table_DJ, start=1):
        level = np.sort(np.outer(level, ranks).ravel())[::-1][:most]
        best = np.sort(np.concatenate([best, level]))[::-1][:most]
        sums = np.concatenate([[0.0], np.cumsum(best)])
        out[depth] = sums[np.minimum(sizes, len(best))]
    return out
