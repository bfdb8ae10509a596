"""Trees from the target itself, read without some of its layers: early exit and layer skip.

The draft has no weights and no cache of its own. It reads behind the target's committed text: its first forward of a
round holds the root alone, whatever the length of the prompt, and nothing that it wrote stays. Of the layers in front
of the first skipped one the target's keys and values are the very ones that the draft would have made. Behind it they
are better: the target made them with all of its layers, so that a skipped layer is missed in the tokens of the tree
alone. That is what drafts by skipped layers are measured with in the literature, and the text is the target's anyway.

Early exit: LayerSkip (Elhoushi et al. 2024); a set of skipped layers: Draft & Verify (Zhang et al. 2023).

Shapes: B rows, Q tokens of a forward.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from hf_treespec.cache import CacheTransaction, RowCache, lent
from hf_treespec.draft.base import DraftRow
from hf_treespec.draft.model import ModelDraft
from hf_treespec.draft.skipping import LayerPlan, skipping
from hf_treespec.errors import TreeSpecError
from hf_treespec.tree import TokenTree, TreeLimits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["BorrowingDraft", "LayerDraft", "Lender"]


class Lender(Protocol):
    """The target side: its cache, and a forward over it."""

    @property
    def rows(self) -> RowCache:
        """The target's cache; it holds all committed tokens but the roots."""
        ...

    def positions(self, ahead: Sequence[int], depths_BQ: Tensor, first: int) -> Tensor:
        """Position ids `[..., B, Q]` of tree slots from `first` on; `ahead` says how far the roots are in the text."""
        ...

    def mask(self, slots: int) -> Tensor | None:
        """2D mask of the cache and so many tree slots."""
        ...

    def read(self, tokens_BQ: Tensor, positions: Tensor, mask: Tensor | None, *, keep: int, bare: bool) -> Any:
        """Outputs of a forward under the active tree; `bare` leaves out whatever the call wants besides logits."""
        ...


@runtime_checkable
class BorrowingDraft(Protocol):
    """What a source has besides that reads the target's cache."""

    def borrow(self, lender: Lender, rows: Sequence[DraftRow]) -> None:
        """Read behind the target's text from now on.

        Args:
            lender: the target side.
            rows: as they are now, with one token behind the prompt.
        """
        ...


class LayerDraft(ModelDraft):
    """Draft source over the target without some of its layers.

    Args:
        model: the target, under `skippable` for as long as the source is used.
        plan: its layers.
        skipped: numbers of the skipped ones; the others are read.
        name: what the statistics call it.
        more: further arguments of `ModelDraft`.
    """

    def __init__(
        self, model: PreTrainedModel, plan: LayerPlan, skipped: Sequence[int], *, name: str, **more: Any
    ) -> None:
        super().__init__(model, **more)
        self.name = name
        self._skipped = plan.layers(model, skipped)
        self._read = frozenset(range(len(plan.names))) - frozenset(skipped)
        self._lender: Lender | None = None
        self._roots: list[int] = []
        self._ahead: list[int] = []

    def borrow(self, lender: Lender, rows: Sequence[DraftRow]) -> None:
        """Read behind the target's text from now on.

        Args:
            lender: the target side.
            rows: as they are now, with one token behind the prompt.
        """
        self._lender = lender
        self._roots = [len(row.tokens) - 1 for row in rows]

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[TokenTree]:
        """One tree per row; see `Draft.propose`. The target's cache is its own again afterwards."""
        self._ahead = [len(row.tokens) - root for row, root in zip(rows, self._roots, strict=True)]
        try:
            return super().propose(rows, limits)
        finally:
            self.abandon()

    def forward(
        self, ids: Tensor, positions: Tensor, rows: RowCache, mask: Tensor | None, *, logits_to_keep: int = 0
    ) -> Tensor:
        """One timed forward without the skipped layers; logits `[B, Q or logits_to_keep, V]`."""
        start = time.perf_counter()
        with skipping(self._skipped):
            outputs = self._target.read(ids, positions, mask, keep=logits_to_keep, bare=True)
        self.forward_seconds += time.perf_counter() - start
        logits: Tensor = outputs.logits[..., : self._vocab]
        return logits[:, -logits_to_keep:] if logits_to_keep else logits

    def unread(self, row: DraftRow, rows: RowCache) -> list[int]:
        """The root: all before it is in the target's cache."""
        return row.tokens[-1:]

    def positions(self, rows: RowCache, depths_BQ: Tensor, first: int) -> Tensor:
        """As the target counts them."""
        return self._target.positions(self._ahead, depths_BQ, first)

    def mask(self, rows: RowCache, slots: int) -> Tensor | None:
        """The target's, with the padding of its prompt."""
        return self._target.mask(slots)

    @property
    def _target(self) -> Lender:
        if self._lender is None:
            raise TreeSpecError(f"a draft of {type(self.model).__name__} itself was asked for trees before `borrow`")
        return self._lender

    def _cache(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> RowCache:
        return self._target.rows

    def _transaction(self, cache: RowCache) -> AbstractContextManager[CacheTransaction]:
        return lent(cache, self._read)

    def _within_positions(self, row: DraftRow, limit: TreeLimits) -> TreeLimits:
        # The target reads one level more than the draft, so that its own bounds are the closer ones.
        return limit
