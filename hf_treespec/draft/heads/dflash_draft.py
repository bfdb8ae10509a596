"""Trees from a DFlash head: one forward a round, and the best part of the product of its laws.

Shapes: B rows, C new tokens of context at most, F features side by side, S tokens of a block, V ids of the head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_treespec.draft.base import DraftRow, Features
from hf_treespec.draft.heads.base import Borrowed
from hf_treespec.draft.heads.block_context import BlockContext
from hf_treespec.draft.heads.dflash import DFlashHead
from hf_treespec.draft.heads.rows import HeadDraft
from hf_treespec.draft.ranking import Ranker
from hf_treespec.tree import TokenTree, TreeLimits

__all__ = ["DFlashDraft"]


class DFlashDraft(HeadDraft):
    """Draft source over a DFlash head.

    Args:
        head: the head.
        ranker: chooses children.
        growth: policy of `hf_treespec.tree.grow`.
        features: which hidden states it reads of this target.
        lent: parts of the target.
        readable: token ids that the target can read.
    """

    _head: DFlashHead

    def __init__(
        self, head: DFlashHead, ranker: Ranker, *, growth: str, features: Features, lent: Borrowed, readable: int
    ) -> None:
        super().__init__(head, ranker, growth=growth, features=features)
        self._lent = lent
        self._readable = readable if head.embed_tokens is None else head.vocab_size
        # Per row the features, in pieces `[tokens, F]`, of tokens that the head has not read.
        self._fresh: list[list[Tensor]] = []
        self._kept: BlockContext | None = None

    def read(self, states: Sequence[Tensor | None]) -> None:
        """Keep the features of new tokens; see `FeatureDraft.read`."""
        self._fresh = self._fresh or [[] for _ in states]
        for fresh, state in zip(self._fresh, states, strict=True):
            if state is not None and len(state):
                fresh.append(self._head.placed(state))

    def _reads(self, row: int) -> bool:
        return row < len(self._fresh) and (bool(self._fresh[row]) or (self._kept is not None and self._known(row) > 0))

    def _known(self, row: int) -> int:
        return 0 if self._kept is None else self._kept.lengths[row]

    def _grown(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[tuple[TokenTree, list[int]]]:
        with self._timed():
            logits_BDV = self._block(rows, limits)
        return self._product(rows, limits, {row.index: logits_BDV[place] for place, row in enumerate(rows)})

    def _block(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> Tensor:
        """Logits `[B, D, V]` of all rows; those of a row without a budget mean nothing, and it reads nothing."""
        head = self._head
        if self._kept is None:
            self._kept = BlockContext(len(rows))
        asked = [row for row, limit in enumerate(limits) if limit.max_nodes]
        counts = [sum(map(len, self._fresh[row])) if row in asked else 0 for row in range(len(rows))]
        width = max(counts)
        context = torch.zeros((len(rows), width, head.feature_size), device=head.device, dtype=head.dtype)
        tokens = torch.full((len(rows), head.block_size), head.mask_token_id)
        for row in asked:
            if counts[row]:
                context[row, width - counts[row] :] = torch.cat(self._fresh[row])
            tokens[row, 0] = self._safe(rows[row].tokens[-1])
        self._kept.begin(counts, head.block_size)
        roots = [row.offset + len(row.tokens) - 1 for row in rows]
        logits = head.read(tokens, context, roots, self._kept, self._lent)
        for row in asked:
            self._fresh[row] = []
        return logits

    def _safe(self, token: int) -> int:
        """Ids beyond the table cannot be read; the text stays right."""
        return token if 0 <= token < self._readable else 0
