"""The size policy: the tree that brings the most tokens a second by measured cost, which may be none.

Under coupled verification the text does not depend on the trees, so any policy is lossless.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import exp
from typing import Any

from hf_treespec.control.acceptance import Acceptance
from hf_treespec.control.confidence import ConfidenceMap, PathChances, confidences_of
from hf_treespec.control.costs import Costs, size_ladder
from hf_treespec.control.dear import DearDraft
from hf_treespec.control.depth import Reached, divergence, make_depth_control
from hf_treespec.control.estimates import GainCurve
from hf_treespec.control.proposals import BestParts, Proposal, ProposalLog
from hf_treespec.control.samples import Sample, by_chance
from hf_treespec.tree import NODES, Measure, TokenTree, TreeLimits

__all__ = ["SizePolicy"]

_TRIED = 1.03  # times the best known rate that a size which was never timed must promise to be tried
_RESHAPED = 32  # judged trees after which fixed shapes are made anew


class SizePolicy:
    """Chooses the size of each round's trees.

    A size is what the target reads for a tree, which is its nodes or, path by path, more (`tree.measure`). Whatever
    was proposed is cut to the size that pays, going by the draft's confidence in this very tree and by how much such
    confidence was worth so far. A cheap draft proposes whole trees every round. A dear one (a model) is told
    beforehand how deep to draft, which may be not at all, by what levels cost and how often they were right of late
    (`LevelPlan`).

    Args:
        limits: the configured size.
        fallback: "auto" to choose, "off" for the configured size always.
        cheap: whether proposing costs next to nothing beside a forward of the target.
        in_step: whether all rows advance by the same number of tokens.
        batch: rows.
        barred: whether no tree can serve this call.
        measure: what a tree costs the target to read; sizes are counted so.
        costs: what is known of costs; what rounds take is learnt into it.
        context: tokens of the longest row.
        learns: whether to judge trees though nothing is chosen.
        draft: what drafts, by the name that its costs are kept under.
        confident: whether scores are what the draft thinks of acceptance; a source that has nodes read for other ends
            gives them a worth instead, which is to be left as it is.
        depth_control: name of the controller, see `control.depth`.
        depth_options: all that it has.
    """

    def __init__(
        self,
        limits: TreeLimits,
        *,
        fallback: str,
        cheap: bool,
        in_step: bool,
        batch: int,
        barred: bool = False,
        measure: Measure = NODES,
        costs: Costs | None = None,
        context: int = 0,
        learns: bool = False,
        draft: str = "",
        confident: bool = True,
        depth_control: str = "cost",
        depth_options: Mapping[str, Any] | None = None,
    ) -> None:
        limits = limits.capped(max_nodes=0) if barred else limits
        self._limits = limits
        self._active = fallback == "auto" and limits.max_nodes > 0
        self._learns = self._active or learns
        self.draft = draft
        self._confident = confident
        self._cheap = cheap
        self._measure = measure
        self._sizes = size_ladder(limits.max_nodes)
        self._all_costs = Costs() if costs is None else costs
        self.costs = self._all_costs.at(context)
        self.gains = GainCurve(self._sizes)
        rows = list(range(batch))
        self._groups = [rows] if in_step else [[row] for row in rows]
        depth, ranks = max(1, min(limits.max_depth, limits.max_nodes)), limits.max_children
        self.acceptance = Acceptance(depth, ranks, earlier=self._all_costs.acceptance)
        self._all_costs.acceptance = self.acceptance
        alone = len(self._groups) == 1
        own = [self.acceptance if alone else Acceptance(depth, ranks, self.acceptance) for _ in self._groups]
        self._tables = own
        self.confidence = ConfidenceMap()
        chances = PathChances(self.confidence)
        self._control = make_depth_control(depth_control, depth, depth_options or {}, chances)
        self._logs = [ProposalLog(self._sizes, self.gains, partial(self._tell, table)) for table in own]
        self._dear: DearDraft | None = None
        if self._active and not cheap:
            self._dear = DearDraft(
                limits,
                self._sizes,
                acceptance=self.acceptance,
                own=own,
                chances=chances,
                control=self._control,
            )
            self._dear.settle(self.costs)
        self._ranks: tuple[tuple[float, ...], ...] | None = None
        self._shaped = 0  # version of the acceptance that the ranks are of
        self._drafting = 0.0
        self._levels = 0
        self._read_along = False  # whether the draft had read all but the latest tokens when it was asked
        self._before: dict[int, int] = {}
        self._depths: dict[int, int] = {}
        self._stated: list[list[float]] = []
        self.kept: list[list[int]] = []  # per row, which node of the proposed tree each node is that is scored
        self.plain = barred  # whether the latest round has no tree by choice

    @property
    def wants_shares(self) -> bool:
        """Whether `observe` is to be told the target's probabilities of children."""
        return self._control is not None and self._control.wants_divergences

    def limits(self) -> TreeLimits:
        """What the draft may propose this round."""
        whole, control = self._limits, self._control
        if control is not None:
            whole = replace(whole.capped(max_depth=control.depth), goes_on=control.goes_on)
        if not self._active:
            return whole
        whole = replace(whole, ranks=self._ranks)
        return whole if self._dear is None else self._dear.limits(whole)

    def leaves_out(self, row: int) -> bool:
        """Whether nothing is drafted for a row though it is for others: where rows advance apart, each is judged."""
        if self._dear is None or len(self._groups) == 1:
            return False
        return self._dear.leaves_out(row)

    def cut(
        self,
        trees: Sequence[TokenTree],
        lengths: Mapping[int, int],
        emitted: Sequence[int],
        *,
        drafting: float = 0.0,
        levels: int | None = None,
    ) -> list[TokenTree]:
        """The trees to score: of each the part that is best at the size which pays.

        Args:
            trees: one per batch row, as proposed within `limits()`.
            lengths: row -> text length with the root, of rows that have not ended.
            emitted: per batch row the tokens emitted so far.
            drafting: seconds that the draft took for them, whatever is scored of them.
            levels: that it read for them, where some were pruned away; default those that the trees have.
        """
        self.kept = [list(range(len(tree))) for tree in trees]
        self._drafting, self._before = drafting, dict(lengths)
        self._depths = {row: trees[row].max_depth for row in lengths}
        self._levels = max(self._depths.values(), default=0) if levels is None else levels
        limit = self.limits().max_nodes
        if self._dear is not None and self._levels:
            largest = max(trees[row].drafted for row in lengths)
            self._dear.proposed(largest, self._levels, limit)
        self.costs = self._all_costs.at(max(lengths.values(), default=0))
        states = self._confident and (self._learns or self.wants_shares)
        told = self._stated = [confidences_of(tree) if states else [] for tree in trees]
        if not self._learns:
            return list(trees)
        if self._active:
            trees = self._by_acceptance(trees)
        parts = [BestParts(tree, self._sizes, self._measure) for tree in trees]
        if self._active:
            size = self._cut_size(parts, lengths, drafting)
            self.plain = size == 0
        else:
            size, limit = self._sizes[-1], self._sizes[-1]
        for group, log in zip(self._groups, self._logs, strict=True):
            proposals = {row: Proposal(lengths[row], parts[row], told[row]) for row in group if row in lengths}
            if proposals:
                log.add(emitted[next(iter(proposals))], limit, proposals, scored=size > 0)
        out = list(trees)
        for row, tree in enumerate(trees if self._active else ()):
            # What was drawn at random is never dropped.
            if not tree.sampled:
                nodes = parts[row].of(size)
                out[row] = tree.part(nodes)
                self.kept[row] = [0, *sorted(nodes)]
        return out

    def observe(
        self,
        *,
        trees: Mapping[int, TokenTree],
        seconds: float,
        texts: Mapping[int, Sequence[int]],
        taken: Mapping[int, Sequence[float]] | None = None,
        shares: Mapping[int, Mapping[int, float]] | None = None,
    ) -> None:
        """Learn from a round.

        Args:
            trees: row -> tree that the target scored, of rows that had not ended.
            seconds: wall clock of the round without drafting, commit included.
            texts: row -> tokens so far, of rows that have not ended.
            taken: row -> how likely each node was to be accepted where its parent is, if coins decided.
            shares: row -> the target's probability of the children of accepted nodes, if `wants_shares`.
        """
        units = max(self._measure.units(tree) for tree in trees.values())
        costs = self.costs
        costs.target.add(units, seconds)
        if self._levels and not self._cheap:
            # The first tokens that a draft reads are a prompt, and after a pause all that came meanwhile.
            if self._read_along:
                costs.drafting.add(self._levels, self._drafting)
            self._read_along = True
        elif not self._cheap:
            self._read_along = False
        gained = {row: len(text) - self._before[row] for row, text in texts.items() if row in self._before}
        if self._control is not None:
            told = shares or {}
            self._control.observe(
                [
                    Reached(self._depths[row], count - 1, self._divergences(row, trees[row], told.get(row)))
                    for row, count in gained.items()
                    if row in trees and trees[row].drafted
                ]
            )
        if not self._learns:
            return
        costs.count()
        for group, log, table in zip(self._groups, self._logs, self._tables, strict=True):
            if taken is not None:
                log.by_coins()
                for row in set(group) & set(taken) & set(trees):
                    stated = self._stated[row]
                    confidences = [stated[node] for node in self.kept[row]] if stated else []
                    self._tell(table, list(by_chance(trees[row], taken[row])), confidences)
            log.judge({row: texts[row] for row in group if row in texts})
        self.confidence.learn()
        if self._confident and self.acceptance.version >= self._shaped + _RESHAPED:
            # Rounded, as shapes of equal figures are made once.
            self._shaped = self.acceptance.version
            self._ranks = tuple(tuple(row) for row in self.acceptance.table().round(2).tolist())
        if self._dear is not None:
            self._dear.cuttable = all(tree.scores is not None and not tree.sampled for tree in trees.values())
            self._dear.scored(max(tree.drafted for tree in trees.values()), units)
            self._dear.plan.account(
                seconds=seconds + self._drafting,
                tokens=sum(gained.values()) / len(gained) if gained else 1.0,
                plain=costs.target.seconds([0])[0],
            )
            self._dear.settle(costs)

    def promise(self, trees: Sequence[TokenTree], rows: Collection[int]) -> tuple[float, float] | None:
        """Tokens a round that are to be expected of the size that pays most, and its seconds, without drafting.

        Args:
            trees: one per batch row.
            rows: those that count.

        Returns:
            None where no sizes are chosen, or while they are timed.
        """
        if not self._active or self.costs.due:
            return None
        parts = [BestParts(tree, self._sizes, self._measure) for tree in self._by_acceptance(trees)]
        means = self._means(parts, rows)
        place = self._best(means)
        return 1.0 + means[place], self.costs.target.seconds(self._sizes)[place]

    def _cut_size(self, parts: Sequence[BestParts], rows: Collection[int], drafting: float) -> int:
        if self._cheap and self.costs.due:
            return self._sizes[0] if self.costs.due % 2 else self._sizes[-1]
        if self._dear is not None and not self._dear.plan.depth:
            return 0
        trees = [parts[row].tree for row in rows]
        if self._dear is not None and any(tree.scores is None or tree.sampled for tree in trees):
            return self._dear.plan.nodes
        means = self._means(parts, rows)
        return self._sizes[self._hoped(means, drafting)]

    def _by_acceptance(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The trees with scores by how often such confidence was right."""
        return [self.confidence.rescored(tree) for tree in trees] if self._confident else list(trees)

    def _means(self, parts: Sequence[BestParts], rows: Collection[int]) -> list[float]:
        """Accepted tokens to expect of each size, on average over the groups of rows."""
        predicted = [
            [min(row) for row in zip(*(parts[row].predicted for row in group), strict=True)]
            for group in ([row for row in group if row in rows] for group in self._groups)
            if group
        ]
        return [
            sum(self.gains.expected(place, group[place]) for group in predicted) / len(predicted)
            for place in range(len(self._sizes))
        ]

    def _best(self, gains: Sequence[float], drafting: float = 0.0) -> int:
        """Place of the size with the most tokens a second; the smaller one of equals."""
        # A round takes the time of its draft at every size: the more of it, the more a tree must bring.
        seconds = self.costs.target.seconds(self._sizes)
        rates = [(1.0 + gain) / (drafting + cost) for gain, cost in zip(gains, seconds, strict=True)]
        return rates.index(max(rates))

    def _hoped(self, gains: Sequence[float], drafting: float) -> int:
        """As `_best`, or the place of a size that was never timed and may be better by far: it is timed by that."""
        place, curve = self._best(gains, drafting), self.costs.target
        seconds = curve.seconds(self._sizes)
        known = _TRIED * (1.0 + gains[place]) / (drafting + seconds[place])
        least = curve.at_least(self._sizes)
        hoped = [
            0.0 if curve.is_known(size) else (1.0 + gain) / (drafting + cost)
            for size, gain, cost in zip(self._sizes, gains, least, strict=True)
        ]
        best = max(hoped)
        return hoped.index(best) if best > known else place

    def _divergences(self, row: int, tree: TokenTree, shares: Mapping[int, float] | None) -> list[float]:
        """KL divergence at each accepted node that has children, from the root down."""
        stated = self._stated[row] if row < len(self._stated) else []
        if not shares or not stated:
            return []
        confidences = [stated[node] for node in self.kept[row]]
        below: dict[int, list[int]] = {}
        for child in shares:
            below.setdefault(tree.parents[child], []).append(child)
        return [
            divergence([shares[child] for child in below[node]], [exp(confidences[child]) for child in below[node]])
            for node in sorted(below)
        ]

    def _tell(self, table: Acceptance, samples: Sequence[Sample], confidences: Sequence[float]) -> None:
        table.add(samples)
        self.confidence.add(samples, confidences)
