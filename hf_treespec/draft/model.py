"""Trees from a draft model: one forward a level, its own cache, the target's noise.

The draft never calls `generate`. A round of it is one cache transaction: the committed tokens that it has not read yet
ride along with the root in the first forward, then each level of the tree is one more forward; afterwards the accepted
nodes are committed and the rest undone, as in the target.

Shapes: B rows, Q tokens of a forward, R nodes ranked at once, V vocabulary common to both models.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.attention import learned_position_limit
from hf_treespec.cache import CacheTransaction, RowCache
from hf_treespec.draft.base import DraftRow
from hf_treespec.draft.levels import LevelReader, Reader, left_padded
from hf_treespec.draft.ranking import Ranker
from hf_treespec.draft.sampling import ChildSampler
from hf_treespec.draft.vocabulary import with_rows
from hf_treespec.routes import Route
from hf_treespec.tree import CountedLevels, TokenTree, TreeLimits, grow, grow_adapted
from hf_treespec.verify import DraftLaws

if TYPE_CHECKING:
    from transformers import LogitsProcessorList, PreTrainedModel

__all__ = ["ModelDraft"]


class ModelDraft(Reader):
    """Draft source over a causal LM that takes trees by one of the masked routes.

    Args:
        model: the draft; neither it nor its config is changed.
        growth: policy of `hf_treespec.tree.grow`.
        vocab_size: ids that the target knows; the draft proposes no others.
        processors: processors to shape the draft's law like the target's. Only those that look at logits alone may be
            given. They change how much is accepted, never the text.
        device: where the processors' tensors lie, if the draft may lie elsewhere.
        route: of the draft. If its model counts by slots, what it counts is to be corrected around all calls, see
            `hf_treespec.attention.counted_by_depth`.
        sampler: draws children at random, for verification by independent draws; they are ranked without one.
        ids: the only ids that the draft proposes, all different and below `vocab_size`; None for all. The rows of its
            LM head for others are not evaluated, see `hf_treespec.draft.vocabulary`.
    """

    name = "model"
    cheap = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        growth: str,
        vocab_size: int,
        processors: LogitsProcessorList | None = None,
        device: torch.device | None = None,
        route: Route = Route.MASK,
        sampler: ChildSampler | None = None,
        ids: Sequence[int] | None = None,
    ) -> None:
        self.model = model if ids is None else with_rows(model, ids)
        self.forward_seconds = 0.0
        # Per row, the score of each node of the tree last proposed: log probability that it is accepted.
        self.scores: list[list[float]] = []
        self.levels_read = 0
        self._growth = growth
        self._vocab = min(vocab_size, _compat.vocabulary_size(model)) if ids is None else len(ids)
        self._readable = _compat.embedding_rows(model)
        self._sampler = sampler
        ids_V = None if ids is None else torch.tensor(ids, device=device)
        self._ranker = Ranker(vocab_size, processors=processors, device=device, sampler=sampler, ids_V=ids_V)
        self._by_slots = not route.told_positions
        # Positions that a model counts itself it is not told.
        self._tells_positions = route is Route.MASK or (route is Route.ALIBI and _compat.accepts_position_ids(model))
        self._wants_mask = route is Route.ALIBI
        limits = [learned_position_limit(model, _compat.max_positions(model))]
        if self._by_slots:
            limits.append(_compat.max_sequence(model))
        self._position_limit = min((limit for limit in limits if limit is not None), default=None)
        self._rows: RowCache | None = None
        self._open: ExitStack | None = None
        self._pass: LevelReader | None = None

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[TokenTree]:
        """One tree per row; see `Draft.propose`."""
        self.abandon()
        self.levels_read = 0
        if self._sampler is not None:
            self._sampler.begin()
        roots = [row.tokens[-1] for row in rows]
        self.scores = [[0.0] for _ in rows]
        limits = [self._within_positions(row, limit) for row, limit in zip(rows, limits, strict=True)]
        if not any(limit.max_nodes for limit in limits):
            return [TokenTree.root_only(token) for token in roots]
        cache = self._cache(rows, limits)
        self._open = ExitStack()
        transaction = self._open.enter_context(self._transaction(cache))
        room = cache.room
        if self._by_slots and self._position_limit is not None:
            left = self._position_limit - cache.physical
            room = left if room is None else min(room, left)
        children = max(limit.max_children for limit in limits)
        self._pass = LevelReader(self, rows, cache, transaction, children, by_slots=self._by_slots, room=room)
        counted = CountedLevels(self._pass.expand)
        try:
            if self._sampler is None:
                grown = grow(roots, counted, limits, self._growth)
            else:
                grown = grow_adapted(roots, counted, limits)
        except BaseException:
            self.abandon()
            raise
        self.levels_read = counted.levels
        self._pass.kept = [kept for _, kept in grown]
        for row, builder in enumerate(self._pass.builders):
            self.scores[row] = [builder.scores[node] for node in self._pass.kept[row]]
        return [tree for tree, _ in grown]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the accepted nodes that the draft has read; see `Draft.commit`."""
        if self._pass is not None and self._open is not None:
            self._pass.commit(paths)
        self.abandon()

    def abandon(self) -> None:
        """Undo an unfinished round, for example after an exception elsewhere in it."""
        if self._open is not None:
            self._open.close()
        self._open = self._pass = None

    def _within_positions(self, row: DraftRow, limit: TreeLimits) -> TreeLimits:
        if self._position_limit is None:
            return limit
        # A node at depth d is read at position len(tokens) - 1 + d; the deepest level is never read.
        return limit.capped(max_depth=self._position_limit - len(row.tokens) + 1)

    def _cache(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> RowCache:
        """The draft's cache, which holds all that was committed but the last few tokens of each row."""
        if self._rows is None:
            self._rows = self._prefill(rows, limits)
        return self._rows

    def _transaction(self, cache: RowCache) -> AbstractContextManager[CacheTransaction]:
        return cache.transaction()

    def _prefill(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> RowCache:
        """Read everything but the root, as one left-padded batch; rows without a budget may be too long to read."""
        texts = [
            row.tokens[: -1 if row.settled is None else min(row.settled, len(row.tokens) - 1)]
            if limit.max_nodes
            else []
            for row, limit in zip(rows, limits, strict=True)
        ]
        cache = RowCache(_compat.make_cache(self.model.config), [0] * len(rows))
        if not any(texts):
            return cache
        ids, positions, mask = left_padded([[self.safe(token) for token in text] for text in texts])
        self.forward(ids, positions, cache, mask, logits_to_keep=1)
        cache.lengths = [len(text) for text in texts]
        return cache

    def forward(
        self, ids: Tensor, positions: Tensor, rows: RowCache, mask: Tensor | None, *, logits_to_keep: int = 0
    ) -> Tensor:
        """One timed forward of the draft; logits `[B, Q or logits_to_keep, V]`."""
        device = _compat.input_device(self.model, ids.device)
        if mask is None and self._wants_mask:
            mask = torch.ones((len(ids), _compat.cache_length(rows.cache) + ids.shape[1]), dtype=torch.long)
        start = time.perf_counter()
        logits = _compat.model_forward(
            self.model,
            input_ids=ids.to(device),
            position_ids=positions.to(device) if self._tells_positions else None,
            attention_mask=None if mask is None else mask.to(device),
            cache=rows.cache,
            logits_to_keep=logits_to_keep,
        )
        self.forward_seconds += time.perf_counter() - start
        return logits[..., : self._vocab]

    def safe(self, token: int) -> int:
        """Ids beyond the draft's table cannot be read; the guess after them is poor, the text stays right."""
        return token if token < self._readable else 0

    def laws(self, batch: int) -> DraftLaws | None:
        """The laws that the random children of the trees last proposed were drawn from."""
        return self._ranker.laws(batch)
