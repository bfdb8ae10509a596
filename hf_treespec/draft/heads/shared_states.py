"""Assistants that read the target's keys and values: no prefill, no cache, one small forward a level.

An assistant stands at the position of the root for the whole round. It attends to what the target has read, and to no
token of its own: what it knows of those lies in the state that it hands on from token to token. So a level of a tree
is one forward with a query for each node, all of which see the same keys. That is how the assistants of Gemma 4 are
made; transformers drafts chains with them.

Shapes: B rows, Q nodes of a level, L tokens that the target has read, H hidden size of the target, V ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.attention import TreeContext, tree_forward_context
from hf_treespec.cache import committed_states, right_aligned
from hf_treespec.draft.base import DraftRow, Features
from hf_treespec.draft.heads.base import Borrowed, DraftHead
from hf_treespec.draft.heads.rows import LastStateDraft
from hf_treespec.draft.layers import Lender
from hf_treespec.draft.ranking import Ranker
from hf_treespec.errors import TreeSpecError
from hf_treespec.tree import Candidate, TokenTree, TreeBuilder, TreeLimits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["AssistantHead", "SharedStatesDraft"]

States = Mapping[str, tuple[Tensor, Tensor]]


class AssistantHead(DraftHead):
    """An assistant of transformers as a head.

    Args:
        assistant: it is not changed.
        layers: per kind of layer the cache layer of the target whose states it reads.
    """

    def __init__(self, assistant: PreTrainedModel, layers: Mapping[str, int] | None = None) -> None:
        super().__init__(*_compat.assistant_sizes(assistant))
        self.kind = str(assistant.config.model_type)
        self.assistant = assistant
        self.layers = dict(layers or {})

    @property
    def drafter(self) -> PreTrainedModel:
        """The assistant."""
        return self.assistant

    def features(self, target_layers: int) -> Features:
        """The last hidden state."""
        return Features(last=True)

    def step(
        self, tokens: Tensor, above: Tensor, positions: Tensor, mask: Tensor | None, states: States, lent: Borrowed
    ) -> tuple[Tensor, Tensor]:
        """One token of each node.

        Args:
            tokens: int64 `[B, Q]`.
            above: `[B, Q, H]`, hidden states of the tokens before them: the target's, or what this gave.
            positions: int64 `[B, Q]`, those of the roots.
            mask: int64 `[B, L]` with 0 at padding, or None.
            states: of the target, on the assistant's device and in its type.
            lent: parts of the target.

        Returns:
            `[B, Q, H]`, to be read below; and logits `[B, Q, V]`.
        """
        table = lent.embeddings
        embeddings = self.placed(table(tokens.to(next(table.parameters()).device)))
        rows, queries = tokens.shape
        # The assistant counts keys from the end backwards, and queries from the end on: all of ours stand there.
        length = max(int(keys.shape[-2]) for keys, _ in states.values())
        context = TreeContext(
            base=length,
            depths_BQ=torch.full((rows, queries), -length),
            slot_depths_BM=torch.zeros((rows, 1), dtype=torch.long),
            visible_BQM=torch.zeros((rows, queries, 1), dtype=torch.bool),
            keys=length,
        )
        with tree_forward_context(context):
            return _compat.read_shared(
                self.assistant,
                torch.cat([embeddings, above], dim=-1),
                positions.to(self.device),
                None if mask is None else mask.to(self.device),
                states,
            )


class SharedStatesDraft(LastStateDraft):
    """Draft source over an assistant that reads the target's keys and values.

    Args:
        head: the assistant, with its layers.
        ranker: chooses children.
        growth: policy of `hf_treespec.tree.grow`.
        features: which hidden states it reads of the target.
        lent: parts of the target.
        readable: token ids that the target can read.
    """

    _head: AssistantHead

    def __init__(
        self,
        head: AssistantHead,
        ranker: Ranker,
        *,
        growth: str,
        features: Features,
        lent: Borrowed,
        readable: int,
    ) -> None:
        super().__init__(head, ranker, growth=growth, features=features)
        self._lent = lent
        self._readable = readable
        self._lender: Lender | None = None
        self._roots: list[int] = []

    def borrow(self, lender: Lender, rows: Sequence[DraftRow]) -> None:
        """See `BorrowingDraft.borrow`."""
        self._lender = lender
        self._roots = [len(row.tokens) - 1 for row in rows]

    def _grown(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[tuple[TokenTree, list[int]]]:
        lender = self._lender
        if lender is None:
            raise TreeSpecError(f"a {self.name} was asked for trees before `borrow`")
        children = max(limit.max_children for limit in limits)
        target = {kind: committed_states(lender.rows, layer) for kind, layer in self._head.layers.items()}
        states = {
            kind: (self._head.placed(keys), self._head.placed(values)) for kind, (keys, values) in target.items()
        }
        ahead = [len(row.tokens) - root for row, root in zip(rows, self._roots, strict=True)]
        places = lender.positions(ahead, torch.zeros((len(rows), 1), dtype=torch.long), 0)
        mask = right_aligned(lender.rows, lender.mask(0))
        # Per row `[nodes, H]` of the level above, and the place there of each node.
        above: list[Tensor] = []
        place: list[dict[int, int]] = [{} for _ in rows]

        def expand(builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]) -> list[list[list[Candidate]]]:
            nonlocal above
            width = max(map(len, frontier))
            tokens = torch.zeros((len(rows), width), dtype=torch.long)
            inputs = torch.zeros(
                (len(rows), width, self._head.hidden_size), device=self._head.device, dtype=self._head.dtype
            )
            for row, (builder, nodes) in enumerate(zip(builders, frontier, strict=True)):
                for query, node in enumerate(nodes):
                    tokens[row, query] = self._safe(builder.tokens[node])
                    state = above[row][place[row][builder.parents[node]]] if above else self._last[row]
                    assert state is not None
                    inputs[row, query] = state
                place[row] = {node: query for query, node in enumerate(nodes)}
            with self._timed():
                made, logits = self._head.step(
                    tokens, inputs, places.expand(*places.shape[:-1], width), mask, states, self._lent
                )
            above = list(made)
            return [
                self._candidates(source, builder, nodes, children, logits[row, : len(nodes)]) if nodes else []
                for row, (source, builder, nodes) in enumerate(zip(rows, builders, frontier, strict=True))
            ]

        return self._grow(rows, expand, limits)

    def _safe(self, token: int) -> int:
        """Ids beyond the table, as prompts with pictures have some, cannot be read; the text stays right."""
        return token if 0 <= token < self._readable else 0
