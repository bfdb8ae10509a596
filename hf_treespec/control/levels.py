"""How deep a dear draft drafts: as deep as brings the most tokens a second, which may be not at all.

Every level is a forward of the draft, so that depth is what costs. The gain of a depth is that of the best tree by the
estimated acceptance, its cost that of the levels and of what the target reads. Where a depth was never timed, it is
taken to cost what a smaller one does: if it would pay then, it is tried.

What is not drafted is not learnt either. So while nothing pays, one level is drafted now and then: as often as costs a
small share of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

from hf_treespec.control.costs import RoundCosts
from hf_treespec.tree import TreeLimits

__all__ = ["FORGET", "LevelPlan"]

_TRIED = 1.03  # times the best known rate that an untimed depth must promise
_PROBE_ROUNDS, _PAUSE = 3, 16  # rounds of a probe, and at least between two
_PROBE_SHARE = 0.015  # of the time, that drafts which do not pay may take
_PROBE_NODES = 2
_TRIAL = 8  # rounds with drafts, after a pause, that count as a trial of it
FORGET = 3.0  # samples that what was seen before a probe counts for
_FIRST_LEVEL = 0.25  # of a plain round, that a level is taken to cost before the first one is timed


class LevelPlan:
    """Chooses depth and nodes of the next round.

    Args:
        limits: the configured size.
        sizes: the ladder of nodes.

    Attributes:
        depth: levels of the next round; 0 for plain decoding.
        nodes: drafted nodes of the best static tree of that depth.
        rate: tokens a second that are expected.
        bound: levels that may be drafted at most: twice as deep as is known to be reached.
        probing: whether the next round is a probe.
    """

    def __init__(self, limits: TreeLimits, sizes: Sequence[int]) -> None:
        self.depth = self.nodes = 0
        self.rate = 0.0
        self.bound = 1
        self.probing = False
        self._deepest = min(limits.max_depth, limits.max_nodes)
        self._sizes = sizes
        self._idle = self._probing = self._streak = 0
        # Seconds: lost by trials, spent on everything, lost by the latest probe.
        self._lost = self._spent = self._probe_lost = 0.0

    def account(self, *, seconds: float, tokens: float, plain: float) -> None:
        """Take in a round.

        Args:
            seconds: of the round, drafting included.
            tokens: that a row gained.
            plain: seconds of a plain round.
        """
        self._spent += seconds
        if not self.depth:
            self._streak = 0
            return
        self._idle = 0
        self._streak += 1
        if self._streak <= _TRIAL:
            loss = seconds - tokens * plain
            self._lost = max(0.0, self._lost + loss)
            # A draft that was not asked for long has a lot to read first.
            self._probe_lost = loss if self._streak == 1 else self._probe_lost + loss

    def rest(self) -> None:
        """Have the next round be plain."""
        self.depth = self.nodes = 0

    def choose(
        self, gains_DS: NDArray[np.float64], costs: RoundCosts, *, reached: int, width: float, spread: float = 1.0
    ) -> bool:
        """Settle the next round.

        Args:
            gains_DS: accepted tokens to expect by depth and size, see `gains_by_depth`.
            costs: of texts as long as now.
            reached: depth that is known to be reached; a draft goes twice as deep at most.
            width: nodes that the draft was seen to fill of each level.
            spread: what the target reads for a node.

        Returns:
            Whether a probe begins, so that what was seen before should count for less.
        """
        self.probing = False
        if not costs.target.is_known(0):
            # Whatever drafts cost is compared with it.
            self.rest()
            return False
        units = [ceil(size * spread) for size in self._sizes]
        target_S = np.array(costs.target.seconds(units))
        plain = float(target_S[0])
        self.bound = deepest = min(self._deepest, max(1, 2 * reached)) if costs.drafting else 1
        depths = range(1, deepest + 1)
        drafting_D = np.array(costs.drafting.seconds(depths)) if costs.drafting else np.array([_FIRST_LEVEL * plain])
        rates_DS = _rates(gains_DS, drafting_D, target_S)
        within_DS = np.array(self._sizes) <= np.ceil(width * np.array(depths))[:, None]
        rates_DS *= within_DS
        depth, place = np.unravel_index(int(rates_DS.argmax()), rates_DS.shape)
        rate, best = float(rates_DS.max()), (int(depth) + 1, int(place))
        if rate <= 1.0 / plain:
            rate, best = 1.0 / plain, (0, 0)
        self.rate = rate
        hoped_DS = self._hoped(gains_DS, costs, units, depths) * within_DS
        if float(hoped_DS.max()) > _TRIED * rate:
            depth, place = np.unravel_index(int(hoped_DS.argmax()), hoped_DS.shape)
            best = int(depth) + 1, int(place)
        self.depth, self.nodes = best[0], self._sizes[best[1]]
        return False if self.depth else self._probe(target_S, drafting_D)

    def _hoped(
        self, gains_DS: NDArray[np.float64], costs: RoundCosts, units: Sequence[int], depths: Sequence[int]
    ) -> NDArray[np.float64]:
        """Rates where depth or size was never timed, if they cost what smaller ones do; 0 where both were."""
        if not costs.drafting:
            return np.zeros((len(depths), len(units)))
        new_D = np.array([not costs.drafting.is_known(depth) for depth in depths])
        new_S = np.array([not costs.target.is_known(size) for size in units])
        drafting_D, target_S = costs.drafting.at_least(depths), costs.target.at_least(units)
        rates_DS = _rates(gains_DS, np.array(drafting_D), np.array(target_S))
        return np.where(new_D[:, None] | new_S, rates_DS, 0.0)

    def _probe(self, target_S: NDArray[np.float64], drafting_D: NDArray[np.float64]) -> bool:
        """Whether one level is drafted though it is not expected to pay, and a series of such rounds begins."""
        begins = False
        if self._probing:
            self._probing -= 1
        else:
            self._idle += 1
            begins = self._idle > _PAUSE and self._lost + self._probe_lost <= _PROBE_SHARE * self._spent
            # A chain that is right all along brings the most.
            chains = np.minimum(np.searchsorted(self._sizes, np.arange(1, len(drafting_D) + 1)), len(target_S) - 1)
            ahead = np.arange(2, len(drafting_D) + 2) / (drafting_D + target_S[chains])
            begins = begins and float(ahead.max()) > 1.0 / float(target_S[0])
            if not begins:
                return False
            self._probing = _PROBE_ROUNDS - 1
        self.probing = True
        self.depth, self.nodes = 1, min(_PROBE_NODES, self._sizes[-1])
        return begins


def _rates(
    gains_DS: NDArray[np.float64], drafting_D: NDArray[np.float64], target_S: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Tokens a second by depth from 1 on and size; without nodes none."""
    gains = gains_DS[1 : len(drafting_D) + 1]
    rates = (1.0 + gains) / (drafting_D[:, None] + target_S)
    rates[:, 0] = 0.0
    return np.asarray(rates)
