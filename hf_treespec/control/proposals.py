"""Proposed trees on their way to being judged, whether the target scored them or not.

Whatever the trees, the text that follows is the target's. So once the next tokens of a row are known, by whatever way,
they tell how many tokens each size of an earlier tree would have brought: the acceptance of trees that were never
scored comes for free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp

from hf_treespec.control.estimates import GainCurve
from hf_treespec.control.samples import Sample, by_text
from hf_treespec.tree import NODES, Measure, TokenTree

__all__ = ["BestParts", "Proposal", "ProposalLog"]


class BestParts:
    """Of a tree the best part of each size of a ladder, found when it is first asked for, and once.

    Args:
        tree: with the scores that say what is best.
        sizes: the ladder.
        measure: how sizes are counted.
    """

    def __init__(self, tree: TokenTree, sizes: Sequence[int], measure: Measure = NODES) -> None:
        self.tree = tree
        self._sizes = sizes
        self._measure = measure

    @cached_property
    def nodes(self) -> list[list[int]]:
        """Per size the drafted nodes of the part."""
        return self._measure.kept(self.tree, self._sizes)

    @cached_property
    def predicted(self) -> list[float]:
        """Per size the accepted tokens that the scores promise; 0 for trees without scores."""
        if self.tree.scores is None:
            return [0.0] * len(self._sizes)
        worth = [exp(score) for score in self.tree.scores]
        return [sum(map(worth.__getitem__, nodes)) for nodes in self.nodes]

    def of(self, size: int) -> list[int]:
        """The drafted nodes of the part of a size of the ladder."""
        return self.nodes[self._sizes.index(size)]


def _accepted_tokens(parts: BestParts, ahead: Sequence[int]) -> list[int] | None:
    """Accepted tokens per size, given the tokens behind the root; None while more of them are needed."""
    tree, node, path = parts.tree, 0, set()
    for token in ahead:
        child = tree.child(node, token)
        if child is None:
            break
        node = child
        path.add(node)
    else:
        if tree.children(node):
            return None
    return [len(path.intersection(nodes)) for nodes in parts.nodes]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tree of one row.

    Args:
        length: of the row's text, root included, when it was made.
        parts: of its tree, with scores by which it is cut, for the ladder of the log.
        confidences: of the draft in its nodes, as it states them; empty if it states none.
    """

    length: int
    parts: BestParts
    confidences: Sequence[float] = ()


@dataclass(slots=True)
class _Pending:
    emitted: int
    limit: int
    proposals: Mapping[int, Proposal]
    scored: bool
    by_coins: bool = False


class ProposalLog:
    """Trees of one group of rows that advance together, judged in the order in which they were proposed.

    Every tree that was scored counts. Trees proposed in plain rounds overlap: for each size a decoder is imagined that
    uses trees of that size only, and of those trees only the ones at which it would have begun a round count.

    Args:
        sizes: the ladder.
        gains: learns of every judged tree.
        tell: likewise; called with the samples of each tree and its confidences.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        gains: GainCurve,
        tell: Callable[[Sequence[Sample], Sequence[float]], None] | None = None,
    ) -> None:
        self._tell = tell
        self._sizes = sizes
        self._gains = gains
        self._pending: deque[_Pending] = deque()
        self._next_round = [0] * len(sizes)

    def add(self, emitted: int, limit: int, proposals: Mapping[int, Proposal], *, scored: bool = False) -> None:
        """Note the trees of one round.

        Args:
            emitted: tokens that the rows of the group have emitted so far.
            limit: nodes that the draft was allowed; larger sizes learn nothing from these trees.
            proposals: by row, of rows that have not ended.
            scored: whether the target scores any part of them.
        """
        self._pending.append(_Pending(emitted, limit, dict(proposals), scored))

    def by_coins(self) -> None:
        """Leave out of `tell` what was added last: coins decided it, and what they made likely is told elsewhere."""
        if self._pending:
            self._pending[-1].by_coins = True

    def judge(self, texts: Mapping[int, Sequence[int]]) -> None:
        """Judge what can be judged by now.

        Args:
            texts: row -> tokens so far, of rows that have not ended.
        """
        while self._pending:
            first = self._pending[0]
            going = [(texts[row][one.length :], one) for row, one in first.proposals.items() if row in texts]
            accepted = [_accepted_tokens(one.parts, ahead) for ahead, one in going]
            if None in accepted:
                return
            self._pending.popleft()
            if self._tell is not None and not first.by_coins:
                for ahead, one in going:
                    self._tell(list(by_text(one.parts.tree, ahead)), one.confidences)
            if going:
                predicted = [one.parts.predicted for _, one in going]
                self._learn(first, [row for row in accepted if row is not None], predicted)

    def _learn(
        self, pending: _Pending, accepted: Sequence[Sequence[int]], predicted: Sequence[Sequence[float]]
    ) -> None:
        for place, size in enumerate(self._sizes):
            if size <= pending.limit and (pending.scored or pending.emitted >= self._next_round[place]):
                # The shortest row decides how far the group advances.
                tokens = min(row[place] for row in accepted)
                self._gains.add(place, tokens, min(row[place] for row in predicted))
                self._next_round[place] = pending.emitted + tokens + 1
