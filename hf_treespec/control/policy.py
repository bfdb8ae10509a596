"""The size policy: the tree that brings the most tokens a second by measured cost, which may be none.

Under coupled verification the text does not depend on the trees, so any policy is lossless.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hf_treespec.control.estimates import CostCurve, GainCurve, size_ladder
from hf_treespec.control.proposals import ProposalLog, predicted_tokens
from hf_treespec.tree import NODES, Measure, TokenTree, TreeLimits

__all__ = ["SizePolicy"]

_TIMINGS = 2  # timings of the smallest and the largest size before a choice rests on them
_TIMED_AGAIN = 256  # rounds after which all sizes are timed anew: the context grows, machines get busy
_TRIAL_ROUNDS = 8  # whole trees before the size of a dear draft is first chosen, enough for the means to settle
_PROBE_ROUNDS = 4  # whole trees that test whether a dear draft pays again
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 128  # rounds between such probes; doubles while whole trees do not pay
_PROBE_SHARE = 0.05  # of the time, that probes may take more than plain rounds; beyond it they become rarer still


class SizePolicy:
    """Chooses the size of each round's trees.

    A size is what the target reads for a tree, which is its nodes or, path by path, more (`tree.measure`).
    A cheap draft proposes whole trees every round, and the policy cuts them to the size that pays, going by the
    draft's confidence in this very tree and by how much such confidence was worth so far. A dear draft (a model) is
    told the size beforehand, chosen by what trees of that size brought of late; probes of whole trees keep that known.

    Args:
        limits: the configured size.
        fallback: "auto" to choose, "off" for the configured size always.
        cheap: whether proposing costs next to nothing beside a forward of the target.
        in_step: whether all rows advance by the same number of tokens.
        batch: rows.
        barred: whether no tree can serve this call.
        measure: what a tree costs the target to read; sizes are counted so.
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
    ) -> None:
        limits = limits.capped(max_nodes=0) if barred else limits
        self._limits = limits
        self._active = fallback == "auto" and limits.max_nodes > 0
        self._cheap = cheap
        self._measure = measure
        self._sizes = size_ladder(limits.max_nodes)
        self.costs = CostCurve(self._sizes)
        self.gains = GainCurve(self._sizes)
        rows = list(range(batch))
        self._groups = [rows] if in_step else [[row] for row in rows]
        self._logs = [ProposalLog(self._sizes, self.gains, measure) for _ in self._groups]
        self._rounds = 0  # since all sizes were timed
        self._size = limits.max_nodes
        self._whole = _TRIAL_ROUNDS
        self._pause = self._until_probe = _FIRST_PAUSE
        self._longest = _LONGEST_PAUSE
        self.kept: list[list[int]] = []  # per row, which node of the proposed tree each node is that is scored
        self.plain = barred  # whether the latest round has no tree by choice

    def limits(self) -> TreeLimits:
        """What the draft may propose this round."""
        if not self._active or self._cheap:
            return self._limits
        return self._limits.capped(max_nodes=self._size)

    def cut(
        self,
        trees: Sequence[TokenTree],
        lengths: Mapping[int, int],
        emitted: Sequence[int],
        *,
        drafting: float = 0.0,
    ) -> list[TokenTree]:
        """The trees to score: of each the part that is best at the size which pays.

        Args:
            trees: one per batch row, as proposed within `limits()`.
            lengths: row -> text length with the root, of rows that have not ended.
            emitted: per batch row the tokens emitted so far.
            drafting: seconds that a cheap draft took for them, whatever is scored of them.
        """
        self.kept = [list(range(len(tree))) for tree in trees]
        if not self._active:
            return list(trees)
        size = self._cut_size(trees, lengths, drafting) if self._cheap else self._size
        self.plain = size == 0
        limit = self.limits().max_nodes
        for group, log in zip(self._groups, self._logs, strict=True):
            proposals = {row: (lengths[row], trees[row]) for row in group if row in lengths}
            if proposals:
                log.add(emitted[next(iter(proposals))], limit, proposals, scored=size > 0)
        out = list(trees)
        for row, tree in enumerate(trees):
            # What was drawn at random is never dropped.
            if not tree.sampled:
                (nodes,) = self._measure.kept(tree, [size])
                out[row] = tree.part(nodes)
                self.kept[row] = [0, *sorted(nodes)]
        return out

    def observe(self, *, trees: Sequence[TokenTree], seconds: float, texts: Mapping[int, Sequence[int]]) -> None:
        """Learn from a round.

        Args:
            trees: those that the target scored, of rows that had not ended.
            seconds: wall clock of the round, commit included; drafting too if the draft is dear.
            texts: row -> tokens so far, of rows that have not ended.
        """
        if not self._active:
            return
        self.costs.add(max(self._measure.units(tree) for tree in trees), seconds)
        self._rounds += 1
        if self._rounds >= _TIMED_AGAIN:
            self._rounds = 0
            self.costs.forget()
        for group, log in zip(self._groups, self._logs, strict=True):
            log.judge({row: texts[row] for row in group if row in texts})
        if not self._cheap:
            self._plan()

    def promise(self, trees: Sequence[TokenTree], rows: Collection[int]) -> tuple[float, float] | None:
        """Tokens a round that are to be expected of the size that pays most, and its seconds, without drafting.

        Args:
            trees: one per batch row.
            rows: those that count.

        Returns:
            None where no sizes are chosen, or while they are timed.
        """
        if not self._active or self._rounds < 2 * _TIMINGS:
            return None
        means = self._means(trees, rows)
        place = self._sizes.index(self._best(means))
        return 1.0 + means[place], self.costs.seconds()[place]

    def _cut_size(self, trees: Sequence[TokenTree], rows: Collection[int], drafting: float) -> int:
        if self._rounds < 2 * _TIMINGS:
            return self._sizes[0] if self._rounds % 2 else self._sizes[-1]
        return self._best(self._means(trees, rows), drafting)

    def _means(self, trees: Sequence[TokenTree], rows: Collection[int]) -> list[float]:
        """Accepted tokens to expect of each size, on average over the groups of rows."""
        predicted = [
            [
                min(row)
                for row in zip(
                    *(predicted_tokens(trees[row], self._sizes, self._measure) for row in group), strict=True
                )
            ]
            for group in ([row for row in group if row in rows] for group in self._groups)
            if group
        ]
        return [
            sum(self.gains.expected(place, group[place]) for group in predicted) / len(predicted)
            for place in range(len(self._sizes))
        ]

    def _best(self, gains: Sequence[float], drafting: float = 0.0) -> int:
        """Size with the most tokens a second; the smaller one of equals."""
        # A round takes the time of its draft at every size: the more of it, the more a tree must bring.
        rates = [(1.0 + gain) / (drafting + cost) for gain, cost in zip(gains, self.costs.seconds(), strict=True)]
        return self._sizes[rates.index(max(rates))]

    def _plan(self) -> None:
        """Choose what a dear draft is asked for next."""
        whole, before = self._sizes[-1], self._size
        self._pace_probes()
        self._whole = max(0, self._whole - 1)
        if self._whole:
            self._size = whole
            return
        means = [self.gains.mean(place) for place in range(len(self._sizes))]
        # However much is accepted: what a draft costs may be more than that is worth.
        self._size = 0 if self.costs.timings(0) < _TIMINGS else self._best(means)
        if self._size == whole:
            self._pause = self._until_probe = _FIRST_PAUSE
            return
        self._until_probe -= before != whole
        if not self._until_probe:
            self._pause = self._until_probe = min(2 * self._pause, self._longest)
            if self._may_pay():
                self._whole, self._size = _PROBE_ROUNDS, whole

    def _pace_probes(self) -> None:
        """Let the time of a probe be a small share of what lies between two."""
        if self.costs.timings(0) and any(self.costs.timings(size) for size in self._sizes[1:]):
            plain, *_, whole = self.costs.seconds()
            self._longest = max(_LONGEST_PAUSE, round(_PROBE_ROUNDS * (whole / plain - 1) / _PROBE_SHARE))

    def _may_pay(self) -> bool:
        """Whether whole trees would pay if all of their depth were accepted."""
        plain, *_, whole = self.costs.seconds()
        deepest = min(self._limits.max_depth, self._limits.max_nodes)
        return (1 + deepest) * plain > whole
