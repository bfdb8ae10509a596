"""The draft around each kind of head, and trees from Medusa and MLP heads.

Shapes: A rows with a budget, H hidden size, R nodes, V ids of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.draft.base import DraftRow
from hf_treespec.draft.heads.base import Borrowed, DraftHead
from hf_treespec.draft.heads.dflash import DFlashHead
from hf_treespec.draft.heads.dflash_draft import DFlashDraft
from hf_treespec.draft.heads.eagle import EagleHead
from hf_treespec.draft.heads.eagle_draft import EagleDraft
from hf_treespec.draft.heads.medusa import MedusaHead
from hf_treespec.draft.heads.mlp import MLPHead
from hf_treespec.draft.heads.mtp import MtpHead
from hf_treespec.draft.heads.mtp_draft import MtpDraft
from hf_treespec.draft.heads.rows import HeadDraft, LastStateDraft
from hf_treespec.draft.heads.shared_states import AssistantHead, SharedStatesDraft
from hf_treespec.draft.ranking import Ranker
from hf_treespec.errors import UnsupportedCallError
from hf_treespec.tree import Candidate, TokenTree, TreeBuilder, TreeLimits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["MLPDraft", "MedusaDraft", "head_draft"]


class MedusaDraft(LastStateDraft):
    """Independent laws of each depth: the tree is the best part of their product."""

    _head: MedusaHead

    def _grown(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[tuple[TokenTree, list[int]]]:
        active = [row for row, limit in enumerate(limits) if limit.max_nodes]
        with self._timed():
            logits_ADV = self._head(self._batch(active), depths=max(limit.max_depth for limit in limits))
        return self._product(rows, limits, dict(zip(active, logits_ADV, strict=True)))


class MLPDraft(LastStateDraft):
    """A chain of small states, one for each node; a level of the trees of all rows is one forward."""

    _head: MLPHead

    def _grown(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[tuple[TokenTree, list[int]]]:
        children = max(limit.max_children for limit in limits)
        start = {row: self._head.start(state) for row, state in enumerate(self._last) if state is not None}
        # Per row and node its state.
        states: list[dict[int, Tensor]] = [{} for _ in rows]

        def expand(builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]) -> list[list[list[Candidate]]]:
            places = [(row, node) for row, nodes in enumerate(frontier) for node in nodes]
            stage = builders[places[0][0]].depths[places[0][1]]
            if stage >= self._head.max_depth:
                return [[[] for _ in nodes] for nodes in frontier]
            above = [states[row][builders[row].parents[node]] if stage else start[row] for row, node in places]
            tokens = torch.tensor([builders[row].tokens[node] for row, node in places], device=self._head.device)
            with self._timed():
                new_RI, logits_RV = self._head.step(stage, torch.stack(above), tokens)
            for (row, node), state in zip(places, new_RI, strict=True):
                states[row][node] = state
            found, done = [], 0
            for source, builder, nodes in zip(rows, builders, frontier, strict=True):
                logits = logits_RV[done : done + len(nodes)]
                done += len(nodes)
                found.append(self._candidates(source, builder, nodes, children, logits) if nodes else [])
            return found

        return self._grow(rows, expand, limits)


def head_draft(head: DraftHead, target: PreTrainedModel, ranker: Ranker, *, growth: str) -> HeadDraft:
    """The draft around a head for one call.

    Args:
        head: the head.
        target: whose hidden states it will be given.
        ranker: chooses children.
        growth: policy of `hf_treespec.tree.grow`.

    Raises:
        UnsupportedCallError: for a kind of head that has no draft.
    """
    features = head.features(len(_compat.decoder_layers(target)))
    if isinstance(head, EagleHead):
        lent, readable = Borrowed.of(target), _compat.embedding_rows(target)
        return EagleDraft(head, ranker, growth=growth, features=features, lent=lent, readable=readable)
    if isinstance(head, DFlashHead):
        lent, readable = Borrowed.of(target), _compat.embedding_rows(target)
        return DFlashDraft(head, ranker, growth=growth, features=features, lent=lent, readable=readable)
    if isinstance(head, MedusaHead):
        return MedusaDraft(head, ranker, growth=growth, features=features)
    if isinstance(head, MLPHead):
        return MLPDraft(head, ranker, growth=growth, features=features)
    if isinstance(head, MtpHead):
        return MtpDraft(head, ranker, growth=growth, features=features, readable=_compat.embedding_rows(target))
    if isinstance(head, AssistantHead):
        lent, readable = Borrowed.of(target), _compat.embedding_rows(target)
        return SharedStatesDraft(head, ranker, growth=growth, features=features, lent=lent, readable=readable)
    raise UnsupportedCallError(
        f"assistant_model is a {type(head).__name__}: expected a MedusaHead, MLPHead, EagleHead, DFlashHead, MtpHead "
        "or AssistantHead"
    )
