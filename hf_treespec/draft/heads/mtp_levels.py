"""One module for multi-token prediction: its cache over committed pairs, and what it reads in one round.

Shapes: B rows, Q pairs of a forward, M slots of a round, H hidden size, R nodes, V ids of the target.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.cache import CacheTransaction, RowCache
from hf_treespec.draft.base import DraftRow
from hf_treespec.draft.heads.mtp import MtpHead
from hf_treespec.draft.heads.pieces import Pieces
from hf_treespec.draft.levels import LevelReader, Reader, left_padded
from hf_treespec.draft.ranking import Ranker
from hf_treespec.tree import Candidate, TreeBuilder

__all__ = ["ModulePass", "MtpModule"]


class MtpModule(Reader):
    """One module: its cache over committed pairs, and inputs of pairs that are not in it.

    Args:
        head: all modules.
        number: of this one.
        cache: of all modules.
        ranker: chooses children.
        readable: token ids that the target can read.
        first: per row the token of its first pair.
        offsets: per row the position of the first token.
        fresh: per row inputs of the pairs behind those in the cache.
    """

    def __init__(
        self,
        head: MtpHead,
        number: int,
        cache: _compat.Cache,
        ranker: Ranker,
        readable: int,
        *,
        first: Sequence[int],
        offsets: Sequence[int],
        fresh: list[Pieces],
    ) -> None:
        self._head = head
        self._number = number
        self._all = cache
        self._ranker = ranker
        self._readable = readable
        self._first = list(first)
        self._shifts = torch.tensor([[start + offset] for start, offset in zip(first, offsets, strict=True)])
        self.rows = RowCache(_compat.cache_of_module(cache, number), [0] * len(fresh))
        self.fresh = fresh
        # `[B, Q, H]`, inputs of the next forward.
        self.inputs: Tensor | None = None

    def next_pair(self, row: int) -> int:
        """The token of the first pair that is not in the cache."""
        return self._first[row] + self.rows.lengths[row]

    def take(self, row: int, count: int, made: Tensor | None) -> None:
        """Forget the inputs of pairs that are in the cache now, after those that the module before has made."""
        if made is not None:
            self.fresh[row].add(made)
        self.fresh[row].drop(count)

    def aligned(self, inputs: Sequence[Tensor], width: int) -> Tensor:
        """`[B, width, H]`, right-aligned behind zeros."""
        out = inputs[0].new_zeros((len(inputs), width, inputs[0].shape[-1]))
        for row, states in enumerate(inputs):
            if len(states):
                out[row, width - len(states) :] = states
        return out

    def prefill(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Read the first pairs of each row as one left-padded batch; returns per row what was made of them."""
        ids, positions, mask = left_padded([[self.safe(token) for token in text] for text in texts])
        width = ids.shape[1]
        self.inputs = self.aligned(
            [fresh.whole[: len(text)] for fresh, text in zip(self.fresh, texts, strict=True)], width
        )
        out = self.forward(ids, self._shifts + positions, self.rows, mask)
        self.rows.lengths = [len(text) for text in texts]
        return [out[row, width - len(text) :] for row, text in enumerate(texts)]

    # -- the model side of `LevelReader` --

    def forward(
        self, ids: Tensor, positions: Tensor, rows: RowCache, mask: Tensor | None, *, logits_to_keep: int = 0
    ) -> Tensor:
        """What the module makes of the pairs, `[B, Q, H]`: in place of logits, which few of them need."""
        assert self.inputs is not None
        return self._head.read(self._number, ids, self.inputs, positions=positions, mask=mask, cache=self._all)

    def safe(self, token: int) -> int:
        """Ids beyond the table, as prompts with pictures have some, cannot be read; the text stays right."""
        return token if 0 <= token < self._readable else 0

    def unread(self, row: DraftRow, rows: RowCache) -> list[int]:
        """Tokens of committed pairs that are not in the cache, the root last."""
        return row.tokens[self.next_pair(row.index) :]

    def positions(self, rows: RowCache, depths_BQ: Tensor, first: int) -> Tensor:
        """Those of the tokens."""
        return super().positions(rows, depths_BQ, first) + self._shifts


class ModulePass(LevelReader):
    """One module in one round.

    Args:
        module: the module.
        rows: texts.
        transaction: open transaction on its cache.
    """

    def __init__(
        self, module: MtpModule, rows: Sequence[DraftRow], transaction: CacheTransaction, children: int
    ) -> None:
        super().__init__(module, rows, module.rows, transaction, children)
        self.module = module
        # How far the root lies behind the first pair that is not in the cache; -1 if that is behind the root.
        self._ahead = [len(row.tokens) - 1 - module.next_pair(row.index) for row in rows]
        # `[B, M, H]`, what was made at the slots of this round.
        self._made: Tensor | None = None
        # Per row the nodes that were read with a guess of the module itself.
        self._guessed: list[set[int]] = [set() for _ in rows]

    def made(self, row: int, slots: Sequence[int]) -> Tensor:
        """`[slots, H]`, what was made at some slots."""
        assert self._made is not None
        return self._made[row].index_select(0, torch.tensor(list(slots), dtype=torch.long, device=self._made.device))

    def made_of_committed(self, row: int) -> Tensor:
        """The same of the committed pairs that were read in this round."""
        return self.made(row, self._fresh_slots[row])

    def slot(self, row: int, node: int) -> int | None:
        """The slot of a node, if it was read."""
        return self._slot_of[row].get(node)

    def read(
        self,
        builders: Sequence[TreeBuilder],
        nodes: Sequence[Sequence[int]],
        inputs: Sequence[Tensor],
        *,
        guessed: bool = False,
    ) -> None:
        """One forward.

        Args:
            builders: the trees so far.
            nodes: per row nodes below the root, parents first.
            inputs: per row `[pairs, H]`: of its unread committed pairs, if it takes part for the first time, then of
                the nodes.
            guessed: whether they are of the module itself.
        """
        width = max(map(len, inputs))
        tokens = []
        for row, (mine, given) in enumerate(zip(nodes, inputs, strict=True)):
            for _ in range(width - len(given)):
                self._add_slot(row, 0, 0)
            new = self._read_fresh(row) if len(given) > len(mine) else []
            new = new + self._read_nodes(row, builders[row], mine)
            tokens.append([0] * (width - len(new)) + [self._reader.safe(token) for token in new])
            if guessed:
                self._guessed[row].update(mine)
        self.module.inputs = self.module.aligned(inputs, width)
        out = self._forward(tokens, [width - len(given) for given in inputs], keep=0)
        self._made = out if self._made is None else torch.cat([self._made, out], dim=1)

    def _read_nodes(self, row: int, builder: TreeBuilder, nodes: Sequence[int]) -> list[int]:
        for node in nodes:
            above = self._slot_of[row].get(builder.parents[node])
            # Where the text has just begun, nothing lies before.
            sees = 0 if above is None else self._visible[row][above]
            self._slot_of[row][node] = self._add_slot(row, self._ahead[row] + builder.depths[node], sees)
        return [builder.tokens[node] for node in nodes]

    def candidates(
        self, row: int, builder: TreeBuilder, nodes: Sequence[int], logits_RV: Tensor
    ) -> list[list[Candidate]]:
        """Children of some nodes of a row."""
        return self._rank(row, builder, nodes, logits_RV)

    def kept_slots(self, row: int, path: Sequence[int], depths: Sequence[int]) -> list[int]:
        """The slots that stay: of committed pairs, then those of the path as far as it was read.

        Args:
            row: batch row.
            path: accepted nodes as the builder numbers them, root first; empty for a row that did not advance.
            depths: of the builder's nodes.
        """
        if not path:
            return []
        slots = list(self._fresh_slots[row])
        for node in path[1:]:
            if self._ahead[row] + depths[node] < 0:
                continue
            slot = self.slot(row, node)
            if slot is None or node in self._guessed[row]:
                break
            slots.append(slot)
        return slots

    def keep(self, slots: Sequence[Sequence[int]]) -> list[Tensor]:
        """Commit some slots of each row; returns what was made at them."""
        self._transaction.commit(slots)
        return [self.made(row, mine) for row, mine in enumerate(slots)]
