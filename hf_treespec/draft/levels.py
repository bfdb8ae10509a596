"""Reading a tree level by level: the forwards of one round of a draft model, and the cache slots they filled.

Shapes: B rows, Q tokens of a forward, M tree slots so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_treespec.attention import TreeContext, tree_forward_context
from hf_treespec.cache import CacheTransaction, RowCache
from hf_treespec.draft.base import DraftRow
from hf_treespec.draft.ranking import Ranker
from hf_treespec.tree import Candidate, TreeBuilder, pack_bits, unpack_words

__all__ = ["LevelReader", "Reader", "left_padded"]


def left_padded(texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Texts of a prefill as one batch; one at least has a token.

    Returns:
        ids and positions, int64 `[B, W]`, and the 2D mask, or None where there is no padding.
    """
    width = max(len(text) for text in texts)
    ids = torch.zeros((len(texts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        if text:
            ids[row, -len(text) :] = torch.tensor(text)
            mask[row, -len(text) :] = 1
    return ids, (mask.cumsum(-1) - 1).clamp(min=0), None if bool(mask.all()) else mask


class Reader:
    """The model side: runs a forward, ranks children. What is said here is that of one with a cache of its own."""

    _ranker: Ranker

    def forward(
        self, ids: Tensor, positions: Tensor, rows: RowCache, mask: Tensor | None, *, logits_to_keep: int = 0
    ) -> Tensor:
        """Logits `[B, Q or logits_to_keep, V]`."""
        raise NotImplementedError

    def safe(self, token: int) -> int:
        """The token, or a stand-in that the model can read."""
        raise NotImplementedError

    def rank(self, logits_RV: Tensor, noise: Sequence[Tensor | None], count: int) -> list[list[Candidate]]:
        """The `count` best children of each of R nodes; see `Ranker.rank`."""
        return self._ranker.rank(logits_RV, noise, count)

    def sample(
        self, row: int, position: int, nodes: Sequence[int], counts: Sequence[int], logits_RV: Tensor
    ) -> list[list[Candidate]] | None:
        """Random children of nodes of a row whose root has this position; None if children are ranked."""
        return self._ranker.sample(row, position, nodes, counts, logits_RV)

    def unread(self, row: DraftRow, rows: RowCache) -> list[int]:
        """Committed tokens that are not in the cache yet, the root last."""
        return row.tokens[rows.lengths[row.index] :]

    def positions(self, rows: RowCache, depths_BQ: Tensor, first: int) -> Tensor:
        """Position ids `[..., B, Q]`.

        Args:
            rows: the cache.
            depths_BQ: how far each token lies behind the first that was not in the cache.
            first: tree slot of the first of the Q tokens.
        """
        return torch.tensor(rows.lengths)[:, None] + depths_BQ

    def mask(self, rows: RowCache, slots: int) -> Tensor | None:
        """2D mask of the cache and so many tree slots, on the host; None if nothing is masked."""
        return rows.mask(slots, None, "cpu")


class LevelReader:
    """The `Expander` of a draft model for one round.

    Args:
        reader: the model side.
        rows: texts; tokens behind the row's cache length are read together with the root.
        cache: the draft's cache.
        transaction: open transaction on it.
        children: candidates wanted per node.
        by_slots: whether the model counts positions or distances by its cache. Then the slots of all rows have common
            depths; where rows have read unequally much, that is a jump in the positions of some.
        room: slots that the model can read behind its cache, or None; beyond them there are no candidates.
    """

    def __init__(
        self,
        reader: Reader,
        rows: Sequence[DraftRow],
        cache: RowCache,
        transaction: CacheTransaction,
        children: int,
        *,
        by_slots: bool = False,
        room: int | None = None,
    ) -> None:
        self._reader = reader
        self._rows = rows
        self._cache = cache
        self._transaction = transaction
        self._children = children
        self._by_slots = by_slots
        self._room = room
        # Slots of the first forward, and what is kept between the forwards.
        self._first = 0
        self._seen: dict[int, Any] = {}
        # Committed tokens that the draft has not read, the root last.
        self._fresh = [reader.unread(row, cache) for row in rows]
        self._fresh_slots: list[list[int]] = [[] for _ in rows]
        # Per row: slot of each builder node that was read; depth and visible slots (as bits) of each slot.
        self._slot_of: list[dict[int, int]] = [{} for _ in rows]
        self._depths: list[list[int]] = [[] for _ in rows]
        self._visible: list[list[int]] = [[] for _ in rows]
        # Builder index of each node of the frozen trees, set when growth has ended.
        self.kept: list[list[int]] = []
        # The trees under growth, with a score per node.
        self.builders: Sequence[TreeBuilder] = ()

    def expand(
        self, builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]
    ) -> list[list[list[Candidate]]]:
        """Candidates below the frontier of every row, from one forward; see `Expander`."""
        self.builders = builders
        at_root = not any(self._slot_of)
        wanted = [self._fresh[row] if nodes and at_root else nodes for row, nodes in enumerate(frontier)]
        width = max(len(row) for row in wanted)
        read_before = len(self._depths[0])
        if self._room is not None and read_before + width > self._room:
            return [[[] for _ in nodes] for nodes in frontier]
        tokens: list[list[int]] = []
        for row, nodes in enumerate(frontier):
            # Right-aligned, so that the last logits of every row belong to its frontier.
            for _ in range(width - len(wanted[row])):
                self._add_slot(row, 0, 0)
            read = self._read_fresh(row) if at_root and nodes else self._read_nodes(row, builders[row], nodes)
            tokens.append([0] * (width - len(read)) + [self._reader.safe(token) for token in read])
        if self._by_slots:
            self._align(builders, frontier, read_before, width)
        logits = self._forward(tokens, [width - len(row) for row in wanted], keep=1 if at_root else 0)
        return [
            self._rank(row, builders[row], nodes, logits[row, logits.shape[1] - len(nodes) :])
            for row, nodes in enumerate(frontier)
        ]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit what was read of the accepted paths; the rest is caught up with in the next round."""
        slots = []
        for row, path in enumerate(paths):
            mine: list[int] = []
            settled = self._rows[row].settled
            if settled is not None and path:
                # What the row's next text looks like behind them is not known, whatever was accepted.
                mine.extend(self._fresh_slots[row][: max(0, settled - self._cache.lengths[row])])
            elif path and 0 in self._slot_of[row]:
                mine.extend(self._fresh_slots[row])
                for node in path[1:]:
                    slot = self._slot_of[row].get(self.kept[row][node])
                    if slot is None:
                        break
                    mine.append(slot)
            slots.append(mine)
        self._transaction.commit(slots)

    def _add_slot(self, row: int, depth: int, sees: int) -> int:
        slot = len(self._depths[row])
        self._depths[row].append(depth)
        self._visible[row].append(sees | 1 << slot)
        return slot

    def _align(
        self, builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]], first: int, width: int
    ) -> None:
        """Give the new slots the depths that they have in the longest row: one level of the tree is one depth."""
        if not first:
            self._first = width
        level = max(builder.depths[nodes[0]] for builder, nodes in zip(builders, frontier, strict=True) if nodes)
        depths = [self._first - 1 + level] * width if first else list(range(width))
        for row in self._depths:
            row[first:] = depths

    def _read_fresh(self, row: int) -> list[int]:
        sees = 0
        for depth in range(len(self._fresh[row])):
            slot = self._add_slot(row, depth, sees)
            sees = self._visible[row][slot]
            self._fresh_slots[row].append(slot)
        self._slot_of[row][0] = slot
        return self._fresh[row]

    def _read_nodes(self, row: int, builder: TreeBuilder, nodes: Sequence[int]) -> list[int]:
        above = len(self._fresh[row]) - 1
        for node in nodes:
            parent = self._slot_of[row][builder.parents[node]]
            self._slot_of[row][node] = self._add_slot(row, above + builder.depths[node], self._visible[row][parent])
        return [builder.tokens[node] for node in nodes]

    def _rank(self, row: int, builder: TreeBuilder, nodes: Sequence[int], logits: Tensor) -> list[list[Candidate]]:
        if not nodes:
            return []
        source = self._rows[row]
        # The child of a node of depth d takes position offset + len(tokens) + d.
        first = source.offset + len(source.tokens)
        counts = [builder.wanted.get(node, self._children) for node in nodes]
        drawn = self._reader.sample(row, first - 1, nodes, counts, logits)
        if drawn is not None:
            return drawn
        noise = [source.noise(first + builder.depths[n]) if source.noise else None for n in nodes]
        return self._reader.rank(logits, noise, self._children)

    def _forward(self, tokens: list[list[int]], filler: Sequence[int], *, keep: int) -> Tensor:
        width, slots = len(tokens[0]), len(self._depths[0])
        words = -(-slots // 64)
        packed = [[pack_bits(bits, words) for bits in row[-width:]] for row in self._visible]
        slot_depths = torch.tensor(self._depths)
        depths = slot_depths[:, -width:]
        context = TreeContext(
            base=self._cache.physical,
            depths_BQ=depths,
            slot_depths_BM=slot_depths,
            visible_BQM=unpack_words(torch.tensor(packed, dtype=torch.int64), slots),
            keys=self._cache.capacity or self._cache.physical + slots,
            shorter_B=self._cache.shorter("cpu"),
            seen=self._seen,
        )
        positions = self._reader.positions(self._cache, depths, slots - width)
        for row, count in enumerate(filler):
            # The next position of a row without a budget may not exist.
            positions[..., row, :count] = 0
        mask = self._reader.mask(self._cache, slots)
        with tree_forward_context(context):
            return self._reader.forward(torch.tensor(tokens), positions, self._cache, mask, logits_to_keep=keep)
