"""Trees from multi-token prediction modules: a cache for each, one forward of one module a level.

A pair is a token and what the module before made of the token in front of it. What module j makes of a pair depends on
the text alone, so that what was read of an accepted path stays. It reads the committed pairs that are new to it, then
the nodes of the tree down to its own level: module 2 sees a token of level 1 by what module 1 made of the root.
Behind the last module it goes on with what it made itself; of that nothing stays.

Shapes: R nodes, H hidden size, V ids of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.draft.base import DraftRow, Features
from hf_treespec.draft.heads.mtp import MtpHead
from hf_treespec.draft.heads.mtp_levels import ModulePass, MtpModule
from hf_treespec.draft.heads.pieces import Pieces
from hf_treespec.draft.heads.rows import HeadDraft
from hf_treespec.draft.ranking import Ranker
from hf_treespec.tree import Candidate, TokenTree, TreeBuilder, TreeLimits

__all__ = ["MtpDraft"]


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
        # Per row hidden states of the target, until the modules are there.
        self._early: list[Pieces] = []
        self._modules: list[MtpModule] = []
        self._open: ExitStack | None = None
        self._passes: list[ModulePass] = []
        self._rows: Sequence[DraftRow] = ()
        self._builders: Sequence[TreeBuilder] = ()
        self._children = 0
        self._kept: list[list[int]] = []

    def read(self, states: Sequence[Tensor | None]) -> None:
        """Add the inputs of new pairs of the first module; see `FeatureDraft.read`."""
        if not self._early and not self._modules:
            self._early = [Pieces(self._nothing()) for _ in states]
        known = self._modules[0].fresh if self._modules else self._early
        for row, state in enumerate(states):
            if state is not None:
                known[row].add(self._head.placed(state))

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[TokenTree]:
        """One tree per row; see `Draft.propose`."""
        self.abandon()
        if self._early and not self._modules:
            self._make_modules(rows)
        return super().propose(rows, limits)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep what was read of the accepted paths; see `Draft.commit`."""
        if self._passes:
            # In step an ended row has a path through padding, of which no tree was proposed.
            built = [
                [kept[node] for node in path if node < len(kept)] for kept, path in zip(self._kept, paths, strict=True)
            ]
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
        for states, count in zip(fresh, counts, strict=True):
            states.drop(len(states) - count)
        cache = _compat.make_mtp_cache(self._head.all.config)
        self._modules = [
            MtpModule(
                self._head,
                number,
                cache,
                self._ranker,
                self._readable,
                first=[start + number for start in first],
                offsets=[row.offset for row in rows],
                fresh=[states if number == 0 else Pieces(self._nothing()) for states in fresh],
            )
            for number in range(self._head.count)
        ]
        self._early = []

    def _nothing(self) -> Tensor:
        return torch.zeros((0, self._head.hidden_size), device=self._head.device, dtype=self._head.dtype)

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

    def _read_level(
        self, level: int, builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]
    ) -> ModulePass:
        """Run the module of a level over what is new to it."""
        assert self._open is not None
        module = self._modules[level]
        transaction = self._open.enter_context(module.rows.transaction())
        one = ModulePass(module, self._rows, transaction, self._children)
        before = self._passes[-1] if self._passes else None
        nodes: list[list[int]] = []
        inputs: list[Tensor] = []
        for row, (builder, wanted) in enumerate(zip(builders, frontier, strict=True)):
            states = module.fresh[row].whole
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
