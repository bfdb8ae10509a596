"""Trees from an EAGLE head: its own cache over committed pairs, and one forward a level.

Only pairs with the target's own hidden states stay in the cache. What the head made of its own guesses is dropped
after the round, accepted or not, and read again with what the target made of them.

Shapes: B rows, Q pairs of a forward, M tree slots so far, E width of the head, V ids of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.cache import RowCache
from hf_treespec.draft.base import DraftRow, Features
from hf_treespec.draft.heads.base import Borrowed
from hf_treespec.draft.heads.eagle import EagleHead
from hf_treespec.draft.heads.pieces import Pieces
from hf_treespec.draft.heads.rows import HeadDraft
from hf_treespec.draft.levels import LevelReader, Reader, left_padded
from hf_treespec.draft.ranking import Ranker
from hf_treespec.tree import Candidate, TokenTree, TreeBuilder, TreeLimits

__all__ = ["EagleDraft"]


class _Levels(LevelReader):
    """Remembers whose states the next forward starts from."""

    # Per row the slots of the parents of the nodes of the level; None for the first, which has the target's states.
    above: list[list[int]] | None = None
    # Per row how many pairs the first forward reads.
    fresh: Sequence[int] = ()

    def expand(
        self, builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]
    ) -> list[list[list[Candidate]]]:
        self.above = None
        if not any(self._slot_of):
            self.fresh = [len(pairs) if nodes else 0 for pairs, nodes in zip(self._fresh, frontier, strict=True)]
        else:
            self.above = [
                [slots[builder.parents[node]] for node in nodes]
                for slots, builder, nodes in zip(self._slot_of, builders, frontier, strict=True)
            ]
        return super().expand(builders, frontier)


class EagleDraft(HeadDraft, Reader):
    """Draft source over an EAGLE head.

    Args:
        head: the head.
        ranker: chooses children.
        growth: policy of `hf_treespec.tree.grow`.
        features: which hidden states it reads of this target.
        lent: parts of the target.
        readable: token ids that the target can read.
    """

    _head: EagleHead

    def __init__(
        self, head: EagleHead, ranker: Ranker, *, growth: str, features: Features, lent: Borrowed, readable: int
    ) -> None:
        super().__init__(head, ranker, growth=growth, features=features)
        self._lent = lent
        self._readable = readable if head.embed_tokens is None else head.vocab_size
        # Per row the features `[pairs, F]` of pairs that are not in the cache.
        self._fresh: list[Pieces] = []
        # Per row the token of its first pair; known at the first proposal.
        self._first: list[int] = []
        self._shifts = torch.zeros((0, 1), dtype=torch.long)
        self._rows: RowCache | None = None
        self._open: ExitStack | None = None
        self._levels: _Levels | None = None
        # `[B, M, E]`, what came out at the slots of this round.
        self._states: Tensor | None = None

    def read(self, states: Sequence[Tensor | None]) -> None:
        """Add the features of new pairs; see `FeatureDraft.read`."""
        if not self._fresh:
            width = next(state.shape[1] for state in states if state is not None)
            nothing = torch.zeros((0, width), device=self._head.device, dtype=self._head.dtype)
            self._fresh = [Pieces(nothing) for _ in states]
        for row, state in enumerate(states):
            if state is not None:
                self._fresh[row].add(self._head.placed(state))

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[TokenTree]:
        """One tree per row; see `Draft.propose`."""
        self.abandon()
        if self._fresh and not self._first:
            # Of a text whose beginning lies in a cache that was passed in there are no features, and there may be
            # some of a prompt whose ids nobody knows.
            self._first = [max(0, len(row.tokens) - len(self._fresh[row.index])) for row in rows]
            counts = [len(row.tokens) - first for row, first in zip(rows, self._first, strict=True)]
            for fresh, count in zip(self._fresh, counts, strict=True):
                fresh.drop(len(fresh) - count)
            shifts = [[row.offset + first - 1] for row, first in zip(rows, self._first, strict=True)]
            self._shifts = torch.tensor(shifts)
        return super().propose(rows, limits)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the pairs that were read with the target's states; see `Draft.commit`."""
        if self._levels is not None and self._open is not None and self._rows is not None:
            before = list(self._rows.lengths)
            self._levels.commit(paths)
            for row, (then, now) in enumerate(zip(before, self._rows.lengths, strict=True)):
                self._fresh[row].drop(now - then)
        self.abandon()

    def abandon(self) -> None:
        """Undo an unfinished round, for example after an exception elsewhere in it."""
        if self._open is not None:
            self._open.close()
        self._open = self._levels = self._states = None

    def _reads(self, row: int) -> bool:
        return row < len(self._fresh) and len(self._fresh[row]) > 0

    def _grown(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[tuple[TokenTree, list[int]]]:
        pairs = [self._pairs(row) for row in rows]
        if self._rows is None:
            self._rows = self._prefill(pairs, limits)
        self._open = ExitStack()
        transaction = self._open.enter_context(self._rows.transaction())
        children = max(limit.max_children for limit in limits)
        self._levels = _Levels(self, pairs, self._rows, transaction, children)
        try:
            grown = self._grow(rows, self._levels.expand, limits)
        except BaseException:
            self.abandon()
            raise
        self._levels.kept = [kept for _, kept in grown]
        return grown

    def _pairs(self, row: DraftRow) -> DraftRow:
        """The row as the head sees it: its pairs, named by their tokens; nothing it drafted is settled."""
        first = self._first[row.index]
        tokens = row.tokens[first:]
        return replace(row, tokens=tokens, offset=row.offset + first, settled=len(tokens))

    def _prefill(self, pairs: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> RowCache:
        """Read all pairs but that of the root, as one left-padded batch."""
        rows = RowCache(_compat.make_cache(self._head.config), [0] * len(pairs))
        texts = [pair.tokens[:-1] if limit.max_nodes else [] for pair, limit in zip(pairs, limits, strict=True)]
        if not any(texts):
            return rows
        ids, positions, mask = left_padded([[self.safe(token) for token in text] for text in texts])
        fresh = [row.whole[: len(text)] for row, text in zip(self._fresh, texts, strict=True)]
        self._read(ids, self._placed(fresh, ids.shape[1]), positions, mask, rows)
        for row, text in enumerate(texts):
            rows.lengths[row] = len(text)
            self._fresh[row].drop(len(text))
        return rows

    def _placed(self, features: Sequence[Tensor], width: int) -> Tensor:
        """States `[B, width, E]` of the target, right-aligned behind zeros."""
        return self._aligned([self._head.fuse(row) for row in features], width)

    def _aligned(self, states: Sequence[Tensor], width: int) -> Tensor:
        out = states[0].new_zeros((len(states), width, self._head.width))
        for row, state in enumerate(states):
            if len(state):
                out[row, width - len(state) :] = state
        return out

    def _read(self, ids: Tensor, states: Tensor, positions: Tensor, mask: Tensor | None, rows: RowCache) -> Tensor:
        device = self._head.device
        with self._timed():
            return self._head.read(
                self._head.embed(ids, self._lent),
                states,
                positions=(positions + self._shifts).clamp(min=0).to(device),
                mask=None if mask is None else mask.to(device),
                cache=rows.cache,
            )

    # -- the model side of `LevelReader` --

    def forward(
        self, ids: Tensor, positions: Tensor, rows: RowCache, mask: Tensor | None, *, logits_to_keep: int = 0
    ) -> Tensor:
        """Logits `[B, Q or logits_to_keep, V]`; see `Reader.forward`."""
        assert self._levels is not None
        width = ids.shape[1]
        above = self._levels.above
        if above is None:
            counts = self._levels.fresh
            states = self._placed(
                [fresh.whole[:count] for fresh, count in zip(self._fresh, counts, strict=True)], width
            )
        else:
            assert self._states is not None
            states = self._aligned([row[slots] for row, slots in zip(self._states, above, strict=True)], width)
        out = self._read(ids, states, positions, mask, rows)
        self._states = out if self._states is None else torch.cat([self._states, out], dim=1)
        return self._head.logits(out[:, -logits_to_keep:] if logits_to_keep else out, self._lent)

    def safe(self, token: int) -> int:
        """Ids beyond the table, as prompts with pictures have some, cannot be read; the text stays right."""
        return token if 0 <= token < self._readable else 0
