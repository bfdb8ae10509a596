"""The draft around a head: what it has read of the target, and trees grown by its `_expand`.

Shapes: B rows, F features side by side of a token, R nodes, V ids of the head.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hf_treespec.draft.base import DraftRow, Features
from hf_treespec.draft.heads.base import DraftHead
from hf_treespec.draft.ranking import Ranker
from hf_treespec.tree import Candidate, CountedLevels, Expander, TokenTree, TreeBuilder, TreeLimits, grow, grow_adapted
from hf_treespec.verify import DraftLaws

__all__ = ["HeadDraft", "LastStateDraft"]


class HeadDraft:
    """What drafts from heads share; see `Draft` and `FeatureDraft`.

    Args:
        head: the head, which is not changed.
        ranker: chooses children.
        growth: policy of `hf_treespec.tree.grow`.
        features: which hidden states the head reads of this target.
    """

    cheap = False

    def __init__(self, head: DraftHead, ranker: Ranker, *, growth: str, features: Features) -> None:
        self.name = head.kind
        self.features = features
        self.forward_seconds = 0.0
        self.levels_read = 0
        self._head = head
        self._ranker = ranker
        self._growth = growth

    def read(self, states: Sequence[Tensor | None]) -> None:
        """Take hidden states; see `FeatureDraft.read`."""
        raise NotImplementedError

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[TokenTree]:
        """One tree per row; see `Draft.propose`."""
        self.levels_read = 0
        if self._ranker.sampler is not None:
            self._ranker.sampler.begin()
        limits = [
            limit.capped(max_nodes=None if self._reads(row.index) else 0, max_depth=self._head.max_depth)
            for row, limit in zip(rows, limits, strict=True)
        ]
        roots = [row.tokens[-1] for row in rows]
        if not any(limit.max_nodes for limit in limits):
            return [TokenTree.root_only(token) for token in roots]
        return [tree for tree, _ in self._grown(rows, limits)]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Nothing to keep; see `Draft.commit`."""

    def laws(self, batch: int) -> DraftLaws | None:
        """The laws that the random children of the trees last proposed were drawn from."""
        return self._ranker.laws(batch)

    def _reads(self, row: int) -> bool:
        """Whether there is a hidden state of the row."""
        raise NotImplementedError

    def _grown(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[tuple[TokenTree, list[int]]]:
        """Trees as `grow` gives them; some row has a budget."""
        raise NotImplementedError

    def _grow(
        self, rows: Sequence[DraftRow], expand: Expander, limits: Sequence[TreeLimits]
    ) -> list[tuple[TokenTree, list[int]]]:
        roots = [row.tokens[-1] for row in rows]
        counted = CountedLevels(expand)
        if self._ranker.sampler is None:
            grown = grow(roots, counted, limits, self._growth)
        else:
            grown = grow_adapted(roots, counted, limits)
        self.levels_read = counted.levels
        return grown

    def _candidates(
        self, source: DraftRow, builder: TreeBuilder, nodes: Sequence[int], children: int, logits_RV: Tensor
    ) -> list[list[Candidate]]:
        """Children of some nodes of a row; `logits_RV` may have one row for all."""
        # The child of a node of depth d takes position offset + len(tokens) + d.
        first = source.offset + len(source.tokens)
        counts = [builder.wanted.get(node, children) for node in nodes]
        drawn = self._ranker.sample(source.index, first - 1, nodes, counts, logits_RV.expand(len(nodes), -1))
        if drawn is not None:
            return drawn
        noise = [source.noise(first + builder.depths[n]) if source.noise else None for n in nodes[: len(logits_RV)]]
        ranked = self._ranker.rank(logits_RV, noise, children)
        return ranked if len(ranked) == len(nodes) else ranked * len(nodes)

    def _product(
        self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits], laws_DV: Mapping[int, Tensor]
    ) -> list[tuple[TokenTree, list[int]]]:
        """Trees from independent laws of each depth: the best part of their product.

        Args:
            rows: all rows.
            limits: budget per row.
            laws_DV: raw logits by the index of each row with a budget.
        """
        depth = max(limit.max_depth for limit in limits)
        children = max(limit.max_children for limit in limits)

        def expand(builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]) -> list[list[list[Candidate]]]:
            found: list[list[list[Candidate]]] = []
            for source, builder, nodes in zip(rows, builders, frontier, strict=True):
                level = builder.depths[nodes[0]] if nodes else 0
                if not nodes or level >= depth:
                    found.append([[] for _ in nodes])
                    continue
                # One law, and one noise, for all nodes of a depth.
                logits = laws_DV[source.index][level : level + 1]
                found.append(self._candidates(source, builder, nodes, children, logits))
            return found

        return self._grow(rows, expand, limits)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.forward_seconds += time.perf_counter() - start


class LastStateDraft(HeadDraft):
    """A draft that needs the last token's hidden state only, and no cache."""

    def __init__(self, head: DraftHead, ranker: Ranker, *, growth: str, features: Features) -> None:
        super().__init__(head, ranker, growth=growth, features=features)
        # Per row `[F]`, of the token in front of the root.
        self._last: list[Tensor | None] = []

    def read(self, states: Sequence[Tensor | None]) -> None:
        """Keep the last of each row; see `FeatureDraft.read`."""
        self._last = self._last or [None] * len(states)
        for row, state in enumerate(states):
            if state is not None and len(state):
                self._last[row] = self._head.placed(state[-1])

    def _reads(self, row: int) -> bool:
        return row < len(self._last) and self._last[row] is not None

    def _batch(self, active: Sequence[int]) -> Tensor:
        """`[A, F]` of these rows."""
        return torch.stack([state for row in active if (state := self._last[row]) is not None])
