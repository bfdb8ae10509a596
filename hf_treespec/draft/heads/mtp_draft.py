"""Trees from multi-token prediction modules: a cache for each, one forward of one module a level.

A pair is a token and what the module before made of the token in front of it. What module j makes of a pair depends on
the text alone, so that what was read of an accepted path stays. It reads the committed pairs that are new to it, then
the nodes of the tree down to its own level: module 2 sees a token of level 1 by what module 1 made of the root.
Behind the last module it goes on with what it made itself; of that nothing stays.

Shapes: B rows, Q pairs of a forward, M slots of a round, H hidden size, R nodes, V ids of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.cache import CacheTransaction, RowCache
from hf_treespec.draft.base import DraftRow, Features
from hf_treespec.draft.heads.mtp import MtpHead
from hf_treespec.draft.heads.rows import HeadDraft
from hf_treespec.draft.levels import LevelReader, Reader, left_padded
from hf_treespec.draft.ranking import Ranker
from hf_treespec.tree import Candidate, TokenTree, TreeBuilder, TreeLimits

__all__ = ["MtpDraft"]


class _Module(Reader):
    """One module: its cache over committed pairs, and inputs of pairs that are not in it.

    Args:
        head: all modules.
        number: of this one.
        cache: of all modules.
        ranker: chooses children.
        readable: token ids that the target can read.
        first: per row the token of its first pair.
        offsets: per row the position of the first token.
        fresh: per row `[pairs, H]`, inputs of the pairs behind those in the cache.
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
        fresh: list[Tensor],
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
        known = self.fresh[row] if made is None else torch.cat([self.fresh[row], made])
        self.fresh[row] = known[count:]

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
        self.inputs = self.aligned([fresh[: len(text)] for fresh, text in zip(self.fresh, texts, strict=True)], width)
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


class _Pass(LevelReader):
    """One module in one round.

    Args:
        module: the module.
        rows: texts.
        transaction: open transaction on its cache.
    """

    def __init__(
        self, module: _Module, rows: Sequence[DraftRow], transaction: CacheTransaction, children: int
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


class MtpDraft(HeadDraft):
    """Draft source over multi-token prediction modules.

    Args:
        head: the modules.
        ranker: chooses children.
        growth: policy of `hf_treespec.tree.grow`.
        features: which hidden states they read of the target.
        readable: token ids that the target can read.
    """

    _head: MtpHead

    def __init__(self, head: MtpHead, ranker: Ranker, *, growth: str, features: Features, readable: int) -> None:
        super().__init__(head, ranker, growth=growth, features=features)
        self._readable = readable
        # Per row `[pairs, H]`, hidden states of the target, until the modules are there.
        self._early: list[Tensor] = []
        self._modules: list[_Module] = []
        self._open: ExitStack | None = None
        self._passes: list[_Pass] = []
        self._rows: Sequence[DraftRow] = ()
        self._builders: Sequence[TreeBuilder] = ()
        self._kept: list[list[int]] = []

    def read(self, states: Sequence[Tensor | None]) -> None:
        """Add the inputs of new pairs of the first module; see `FeatureDraft.read`."""
        if not self._early and not self._modules:
            self._early = [
                torch.zeros((0, self._head.hidden_size), device=self._head.device, dtype=self._head.dtype)
                for _ in states
            ]
        known = self._modules[0].fresh if self._modules else self._early
        for row, state in enumerate(states):
            if state is not None:
                known[row] = torch.cat([known[row], self._head.placed(state)])

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[TokenTree]:
        """One tree per row; see `Draft.propose`."""
        self.abandon()
        if self._early and not self._modules:
            self._make_modules(rows)
        return super().propose(rows, limits)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep what was read of the accepted paths; see `Draft.commit`."""
        if self._passes:
            built = [[kept[node] for node in path] for kept, path in zip(self._kept, paths, strict=True)]
            depths = [builder.depths for builder in self._builders]
            made: list[Tensor] | None = None
            for number, module in enumerate(self._modules):
                if number == len(self._passes):
                    # It was not run, but its inputs are known now.
                    for row, states in enumerate(made or ()):
                        module.take(row, 0, states)
                    break
                one = self._passes[number]
                slots = [one.kept_slots(row, path, depths[row]) for row, path in enumerate(built)]
                new = one.keep(slots)
                for row, mine in enumerate(slots):
                    module.take(row, len(mine), None if made is None else made[row])
                made = new
        self.abandon()

    def abandon(self) -> None:
        """Undo an unfinished round, for example after an exception elsewhere in it."""
        if self._open is not None:
            self._open.close()
        self._open, self._passes, self._kept = None, [], []

    def _make_modules(self, rows: Sequence[DraftRow]) -> None:
        # Of a text whose beginning lies in a cache that was passed in there are no hidden states, and there may be
        # some of a prompt whose ids nobody knows.
        fresh = self._early
        first = [max(0, len(row.tokens) - len(fresh[row.index])) for row in rows]
        counts = [len(row.tokens) - start for row, start in zip(rows, first, strict=True)]
        fresh = [states[len(states) - count :] for states, count in zip(fresh, counts, strict=True)]
        cache = _compat.make_mtp_cache(self._head.all.config)
        self._modules = [
            _Module(
                self._head,
                number,
                cache,
                self._ranker,
                self._readable,
                first=[start + number for start in first],
                offsets=[row.offset for row in rows],
                fresh=[states if number == 0 else states[:0] for states in fresh],
            )
            for number in range(self._head.count)
        ]
        self._early = []

    def _reads(self, row: int) -> bool:
        return bool(self._modules) and len(self._modules[0].fresh[row]) > 0

    def _grown(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[tuple[TokenTree, list[int]]]:
        self._rows = rows
        self._children = max(limit.max_children for limit in limits)
        if not any(self._modules[0].rows.lengths):
            self._prefill(rows, limits)
        self._open = ExitStack()
        try:
            grown = self._grow(rows, self._expand, limits)
        except BaseException:
            self.abandon()
            raise
        self._kept = [kept for _, kept in grown]
        return grown

    def _prefill(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> None:
        """Read all pairs but those of the root, module by module; rows without a budget wait."""
        made: list[Tensor] | None = None
        for module in self._modules:
            for row, states in enumerate(made or ()):
                module.take(row, 0, states)
            texts = [
                row.tokens[module.next_pair(row.index) : -1] if limit.max_nodes else []
                for row, limit in zip(rows, limits, strict=True)
            ]
            if not any(texts):
                return
            with self._timed():
                made = module.prefill(texts)
            for row, text in enumerate(texts):
                module.take(row, len(text), None)

    def _expand(
        self, builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]
    ) -> list[list[list[Candidate]]]:
        self._builders = builders
        level = next(builder.depths[nodes[0]] for builder, nodes in zip(builders, frontier, strict=True) if nodes)
        with self._timed():
            if level < len(self._modules):
                one = self._read_level(level, builders, frontier)
            else:
                one = self._passes[-1]
                above = [
                    one.made(row, [_known(one.slot(row, builder.parents[node])) for node in nodes])
                    for row, (builder, nodes) in enumerate(zip(builders, frontier, strict=True))
                ]
                one.read(builders, frontier, above, guessed=True)
            made = [
                one.made(row, [_known(one.slot(row, node)) for node in nodes]) for row, nodes in enumerate(frontier)
            ]
            logits_RV = self._head.logits(torch.cat(made))
        found, done = [], 0
        for row, (builder, nodes) in enumerate(zip(builders, frontier, strict=True)):
            found.append(one.candidates(row, builder, nodes, logits_RV[done : done + len(nodes)]))
            done += len(nodes)
        return found

    def _read_level(self, level: int, builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]) -> _Pass:
        """Run the module of a level over what is new to it."""
        assert self._open is not None
        module = self._modules[level]
        transaction = self._open.enter_context(module.rows.transaction())
        one = _Pass(module, self._rows, transaction, self._children)
        before = self._passes[-1] if self._passes else None
        nodes: list[list[int]] = []
        inputs: list[Tensor] = []
        for row, (builder, wanted) in enumerate(zip(builders, frontier, strict=True)):
            states = module.fresh[row]
            if not wanted:
                nodes.append([])
                inputs.append(states[:0])
                continue
            below = _down_to(builder, wanted)
            if before is not None:
                slots = [before.slot(row, builder.parents[node]) for node in below]
                # Where the text has just begun, nothing was made of some.
                below = [node for node, slot in zip(below, slots, strict=True) if slot is not None]
                unread = len(module.unread(self._rows[row], module.rows))
                states = torch.cat([states, before.made_of_committed(row)])[:unread]
                states = torch.cat([states, before.made(row, [slot for slot in slots if slot is not None])])
            nodes.append(below)
            inputs.append(states)
        one.read(builders, nodes, inputs)
        self._passes.append(one)
        return one


def _known(slot: int | None) -> int:
    assert slot is not None
    return slot


def _down_to(builder: TreeBuilder, nodes: Sequence[int]) -> list[int]:
    """Nodes and all above them but the root, parents first."""
    found: set[int] = set()
    for node in nodes:
        while node > 0 and node not in found:
            found.add(node)
            node = builder.parents[node]
    return sorted(found)
