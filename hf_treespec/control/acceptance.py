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

__all__ = ["Acceptance", "falling", "gains_by_depth", "tables"]

_DECAY, _FADE = 0.95, 0.995  # weight of the past, per judged tree, at depths that it tells of, and at others
_POOLED = 2.0  # samples that the curve of all depths counts for at each depth
_HOPED = 0.5  # samples that a good draft counts for behind the first depth: it matters where all before is good
_ABSENT = 0.5  # of a sample: a rank that was not offered where others were counts so far as wrong
_GUESS = 0.1  # samples that a rank which was never offered counts for when ranks are put in order
# The curve of all depths begins from a draft that is good, and holds it for little: what pays if it is so is tried.
_FIRST, _RATIO, _HELD = 0.75, 0.2, 3.0


def falling(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Along the last axis the non-increasing sequence nearest to `values` by squares with positive `weights`.

    By its min-max formula over the means of all runs (Ayer et al. 1955; Barlow et al. 1972, theorem 1.4).
    """
    length = values.shape[-1]
    zero = np.zeros((*values.shape[:-1], 1))
    sums = np.concatenate([zero, np.cumsum(values * weights, -1)], -1)
    mass = np.concatenate([zero, np.cumsum(weights, -1)], -1)
    # Mean of the run from a up to b, in the cell [a, b]; runs that end before they begin count for nothing.
    with np.errstate(divide="ignore", invalid="ignore"):
        means = (sums[..., None, 1:] - sums[..., :-1, None]) / (mass[..., None, 1:] - mass[..., :-1, None])
    means = np.where(np.tri(length, k=-1, dtype=bool), -np.inf, means)
    # The best mean that a run from a to i or beyond has, and of these the least over all a up to i.
    best = np.maximum.accumulate(means[..., ::-1], -1)[..., ::-1]
    best = np.where(np.tri(length, k=-1, dtype=bool), np.inf, best)
    return np.asarray(best.min(-2))


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
        return np.asarray(_curves([self])[0])

    def table(self) -> NDArray[np.float64]:
        """P `[D, J]`, non-increasing in the rank, of sum 1 at most at each depth."""
        return np.asarray(tables([self])[0])


def _curves(of: Sequence[Acceptance]) -> NDArray[np.float64]:
    """Of each the curve of all depths `[B, J]`."""
    shared = list({id(one._shared): one._shared for one in of if one._shared is not None}.values())
    known = dict(zip(map(id, shared), _curves(shared), strict=True)) if shared else {}
    start_BJ = np.stack([one._start_J if one._shared is None else known[id(one._shared)] for one in of])
    held_B1 = np.array([[_HELD if one._shared is None else _POOLED] for one in of])
    seen_BJ = np.stack([one._seen_DJ for one in of]).sum(1)
    right_BJ = np.stack([one._right_DJ for one in of]).sum(1)
    return _in_order((right_BJ + held_B1 * start_BJ) / (seen_BJ + held_B1), seen_BJ)


def tables(of: Sequence[Acceptance]) -> NDArray[np.float64]:
    """`Acceptance.table` of several of one shape, `[B, D, J]`."""
    seen_BDJ = np.stack([one._seen_DJ for one in of])
    right_BDJ = np.stack([one._right_DJ for one in of])
    start_B1J = np.stack([one._start_J for one in of])[:, None]
    hoped_D1 = np.full((seen_BDJ.shape[1], 1), _HOPED)
    hoped_D1[0] = 0.0
    right_BDJ = right_BDJ + _POOLED * _curves(of)[:, None] + hoped_D1 * start_B1J
    out = _in_order(right_BDJ / (seen_BDJ + _POOLED + hoped_D1), seen_BDJ)
    # One child is right at most: the first ones have the say.
    before = np.cumsum(out, -1) - out
    return np.asarray(np.minimum(out, np.maximum(1.0 - before, 0.0)))


def _in_order(values: NDArray[np.float64], seen: NDArray[np.float64]) -> NDArray[np.float64]:
    return falling(values, seen + _GUESS)


def gains_by_depth(table_DJ: NDArray[np.float64], sizes: Sequence[int]) -> NDArray[np.float64]:
    """Accepted tokens to expect of the best static tree, by its depth and size.

    The best tree of n nodes holds the n most probable ones: see `hf_treespec.tree.best_first_shape`.

    Args:
        table_DJ: P(accepted | parent accepted), non-increasing in the rank; of several rows at once `[B, D, J]`.
        sizes: S nodes, ascending from 0.

    Returns:
        `[D + 1, S]`, or `[B, D + 1, S]`.
    """
    most = sizes[-1]
    *rows, depths, _ = table_DJ.shape
    level = np.ones((*rows, 1))
    best = np.zeros((*rows, 0))
    out = np.zeros((*rows, depths + 1, len(sizes)))
    for depth in range(depths):
        level = _largest((level[..., None] * table_DJ[..., depth, None, :]).reshape(*rows, -1), most)
        best = _largest(np.concatenate([best, level], -1), most)
        sums = np.concatenate([np.zeros((*rows, 1)), np.cumsum(best, -1)], -1)
        out[..., depth + 1, :] = sums[..., np.minimum(sizes, best.shape[-1])]
    return out


def _largest(values: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Along the last axis, falling."""
    return np.sort(values, -1)[..., ::-1][..., :count]
