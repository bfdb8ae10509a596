"""What a dear draft is asked for: levels beforehand, and each further level while the trees at hand promise to pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from hf_treespec.control.acceptance import Acceptance, gains_by_depth, tables
from hf_treespec.control.confidence import PathChances
from hf_treespec.control.costs import RoundCosts
from hf_treespec.control.depth import DepthControl
from hf_treespec.control.levels import FORGET, LevelPlan
from hf_treespec.tree import TreeBuilder, TreeLimits

__all__ = ["DearDraft"]

_ANY = 1e9
_SPREAD_DECAY = 0.9
_LEFT_OUT = 0.1  # tokens a round, below which a row of a batch is not drafted for
_ASKED_AGAIN = 16  # rounds after which it is tried again


class DearDraft:
    """Settles every round what a draft that costs forwards may propose.

    Args:
        limits: the configured size.
        sizes: the ladder.
        acceptance: estimates over all rows.
        own: those of each group of rows that advances together.
        chances: of nodes that are right down from the root.
        control: another controller of the depth; None for this one.
    """

    def __init__(
        self,
        limits: TreeLimits,
        sizes: Sequence[int],
        *,
        acceptance: Acceptance,
        own: Sequence[Acceptance],
        chances: PathChances,
        control: DepthControl | None,
    ) -> None:
        self.plan = LevelPlan(limits, sizes)
        self.cuttable = False
        self._sizes = sizes
        self._acceptance = acceptance
        self._tables = own
        self._chances = chances
        self._control = control
        self._costs = RoundCosts()
        self._width = _ANY  # nodes that the draft is known to fill of each level
        self._spread = 1.0  # what the target reads for a node
        self._table = acceptance.table()
        # Version of the tables, and the gains by them.
        self._own: NDArray[np.float64] = np.zeros((len(own), 1, 1))
        self._gains: tuple[int, NDArray[np.float64]] = (-1, np.zeros((1, 1)))
        self._most = 0
        # Per table: what its rows gain by the plan, and for how many rounds nothing was drafted for them.
        self._left_out = [0] * len(own)

    def limits(self, whole: TreeLimits) -> TreeLimits:
        """What may be proposed this round, of what the controller of the depth allows."""
        plan = self.plan
        if self._control is not None and plan.depth and not plan.probing:
            return whole.capped(max_depth=plan.bound)
        if not self.cuttable or plan.probing:
            return whole.capped(max_nodes=plan.nodes, max_depth=plan.depth)
        # Room for a tree that turns out better than most; what does not pay is cut, or not drafted.
        capped = whole.capped(max_nodes=2 * plan.nodes, max_depth=min(2 * plan.depth, plan.bound))
        self._most = capped.max_nodes
        return replace(capped, goes_on=self._pays)

    def proposed(self, largest: int, levels: int, allowed: int) -> None:
        """Take in a proposal.

        Args:
            largest: nodes of its largest tree.
            levels: depth of its deepest.
            allowed: nodes that it was allowed.
        """
        width = largest / levels
        if largest >= allowed:
            self._width = max(width, self._width)
        else:
            # What is left of its nodes it has no candidates for, at this depth.
            self._width = width if self._width == _ANY else max(width, self._width)

    def settle(self, costs: RoundCosts) -> None:
        """Choose what is asked for next.

        Args:
            costs: of texts as long as now.
        """
        self._costs = costs
        if costs.due and costs.target.is_known(0):
            # Of the two ends only plain rounds are not timed anyway.
            costs.due = 0
            self.plan.rest()
            return
        version = sum(table.version for table in self._tables)
        if version != self._gains[0]:
            self._own = gains_by_depth(tables(self._tables), self._sizes)
            self._gains = version, self._own.mean(0)
            self._table = self._acceptance.table()
        reached = max(table.reached for table in self._tables)
        if self.plan.choose(self._gains[1], costs, reached=reached, width=self._width, spread=self._spread):
            for table in self._tables:
                table.fade(FORGET)
        self._leave_out()

    def leaves_out(self, group: int) -> bool:
        """Whether nothing is drafted for the rows of a group though it is for others."""
        return bool(self._left_out[group])

    def _leave_out(self) -> None:
        """Per group of rows: is what they gain worth their part of the draft?"""
        plan = self.plan
        if len(self._tables) == 1 or not plan.depth or plan.probing:
            self._left_out = [0] * len(self._tables)
            return
        place = self._sizes.index(plan.nodes)
        for group, table in enumerate(self._tables):
            left = self._left_out[group]
            if left >= _ASKED_AGAIN:
                # Whatever it was before, it is judged by what comes now.
                table.fade(FORGET)
                self._left_out[group] = 0
            elif left or float(self._own[group, plan.depth, place]) < _LEFT_OUT:
                self._left_out[group] = left + 1

    def scored(self, nodes: int, units: int) -> None:
        """Take in what the target read for a tree of so many nodes."""
        if nodes:
            self._spread += (1.0 - _SPREAD_DECAY) * (units / nodes - self._spread)

    def _pays(self, builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]) -> bool:
        """Whether some more levels of these trees bring more tokens than their time would bring elsewhere."""
        growing = [row for row, builder in enumerate(builders) if len(builder) > 1]
        row = next(row for row in growing if frontier[row])
        depth, most = builders[row].depths[frontier[row][0]], self._most
        width = max(len(nodes) for nodes in frontier)
        nodes = min(max(len(builder) for builder in builders) - 1, most)
        gain = sum(self._chances.of(builders, row, node) for row in growing for node in frontier[row]) / len(growing)
        # One more may not pay alone: where costs are stairs, several may.
        ahead = range(1, max(self.plan.bound - depth, 1) + 1)
        drafting = self._costs.drafting.seconds([depth, *(depth + levels for levels in ahead)])
        sizes = [ceil(min(nodes + levels * width, most) * self._spread) for levels in (0, *ahead)]
        target = self._costs.target.at_least(sizes)
        total = 0.0
        for levels in ahead:
            gain *= float(self._table[min(depth + levels, len(self._table)) - 1].sum())
            total += gain
            if total > self.plan.rate * (drafting[levels] - drafting[0] + target[levels] - target[0]):
                return True
        return False
