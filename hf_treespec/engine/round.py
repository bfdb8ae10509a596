"""One round: draft, target forward, walk, commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Protocol

from torch import Tensor

from hf_treespec import clock
from hf_treespec.cache import CacheTransaction, OrderBoundRows, OrderBoundTransaction, RowCache
from hf_treespec.control import SizePolicy
from hf_treespec.draft import CreditedDraft, Draft, FeatureDraft
from hf_treespec.engine.features import FeatureTaps, Places
from hf_treespec.engine.guidance import Guidance
from hf_treespec.engine.outputs import KeptStates
from hf_treespec.engine.shares import ConfidenceNotice, TargetShares
from hf_treespec.engine.state import GrowingText
from hf_treespec.stats import TreeStats
from hf_treespec.tree import TokenTree, TreeLimits
from hf_treespec.verify import Decider, GumbelNoise, IndependentDecider, follow_paths, walk_trees

__all__ = ["RoundRunner"]


class Forward(Protocol):
    """The target forward of a round."""

    def __call__(self, trees: Sequence[TokenTree], ahead: Sequence[int]) -> Tensor:
        """Logits `[B, N, V]` of trees and of how far their roots lie behind the prompt."""
        ...

    def slots(self, paths: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """What the cache commits for the nodes of the paths."""
        ...

    def places(self, paths: Sequence[Sequence[int]]) -> Places:
        """Where the forward has the nodes of the paths."""
        ...


class RoundRunner:
    """Everything that a round needs; `run` does one.

    Args:
        text: the growing text.
        forward: of the target.
        cache: the target's cache.
        draft: source of trees.
        observe: see `LearningDraft.observe`; None if the source does not learn from logits.
        policy: size policy.
        decider: chooses tokens.
        noise: the noise of the call, or None.
        stats: counters, updated in place.
        in_step: whether all rows emit the same number of tokens.
        last_positions: per row the position id of the last prompt token.
        position_limit: first position that the target cannot read, or None.
        by_slots: whether all nodes take up positions, and the trees of a batch slots of common depths.
        readable: token ids that the target can read.
        batched_choice: choose at all nodes on the device in one go.
        states: hidden states and attentions that the call asks for; rows must be in step.
        guidance: the unconditional stream of the call, or None.
        independent: decides rounds with trees by independent draws; None for the walk.
        taps: hidden states of the target, for a `FeatureDraft` that reads them.
        shares: what the target makes of children, if the policy asks for it.
    """

    def __init__(
        self,
        *,
        text: GrowingText,
        forward: Forward,
        cache: RowCache | OrderBoundRows,
        draft: Draft,
        observe: Callable[[Sequence[TokenTree], Tensor, Sequence[Sequence[int]]], None] | None = None,
        policy: SizePolicy,
        decider: Decider,
        noise: GumbelNoise | None,
        stats: TreeStats,
        in_step: bool,
        last_positions: Sequence[int],
        position_limit: int | None,
        by_slots: bool = False,
        readable: int,
        batched_choice: bool,
        states: KeptStates | None = None,
        guidance: Guidance | None = None,
        independent: IndependentDecider | None = None,
        taps: FeatureTaps | None = None,
        shares: TargetShares | None = None,
        notice: ConfidenceNotice | None = None,
    ) -> None:
        self._text = text
        self._forward = forward
        self._cache = cache
        self._draft = draft
        self._observe = observe
        self._policy = policy
        self._decider = decider
        self._noise = noise
        self._stats = stats
        self._in_step = in_step
        self._last_positions = last_positions
        self._position_limit = position_limit
        self._by_slots = by_slots
        self._readable = readable
        self._batched_choice = batched_choice
        self._states = states
        self._guidance = guidance
        self._independent = independent
        self._taps = taps
        # Of the latest round: row -> how likely each node was to be accepted where its parent is, if coins decided.
        self._shares_of = shares
        self._notice = notice
        self._shares: dict[int, dict[int, float]] = {}
        self._taken: dict[int, list[float]] | None = None

    def run(self) -> None:
        """One round of all rows that have not ended; in step the ended ones follow with padding."""
        limits = self._policy.limits()
        active = [row for row, done in enumerate(self._text.finished) if not done]
        rows = list(range(len(self._text.finished))) if self._in_step else active
        start = clock.now()
        every = range(len(self._text.finished))
        if self._in_step:
            # An ended row follows with padding, as deep as the others: its positions bound them too.
            ended = [self._padding_depth(row, limits) for row in every if not self._drafts(row)]
            limits = limits.capped(max_depth=min(ended, default=limits.max_depth))
        wanted = [
            self._row_limits(row, limits, drafts=self._drafts(row) and not self._policy.leaves_out(row))
            for row in every
        ]
        trees = self._draft.propose(self._text.draft_rows, wanted)
        if self._notice is not None:
            self._notice.see(trees, self._draft.name)
        lengths = {row: len(self._text.draft_rows[row].tokens) for row in active}
        proposed_by = clock.now()
        levels = getattr(self._draft, "levels_read", None)
        trees = self._policy.cut(trees, lengths, self._text.new_lengths, drafting=proposed_by - start, levels=levels)
        self._stats.draft_seconds += clock.now() - start
        if self._in_step:
            depth = max(tree.max_depth for tree in trees)
            trees = [self._padding(row, depth) if not self._drafts(row) else tree for row, tree in enumerate(trees)]
        kept = [
            nodes if self._drafts(row) else range(len(tree))
            for row, (tree, nodes) in enumerate(zip(trees, self._policy.kept, strict=True))
        ]
        before = self._text.new_lengths
        paths = self._score_and_walk(trees, rows, self._stats, kept)
        drafted = any(trees[row].drafted for row in active)
        emitted = [now - then for now, then in zip(self._text.new_lengths, before, strict=True)]
        for row in active:
            tree = trees[row]
            self._stats.record_row(
                path=tree.depths[paths[row][-1]],
                drafted_depths=set(tree.depths) - {0},
                drafted=tree.drafted,
                emitted=emitted[row],
                sources=self._sources(row, kept[row], paths[row]),
            )
        self._stats.rounds += 1
        self._stats.plain_rounds += not drafted
        self._stats.fallback_rounds += self._policy.plain
        self._policy.observe(
            trees={row: trees[row] for row in active},
            # What drafting takes does not hang on the size that is scored: `cut` adds it to the cost of each.
            seconds=clock.now() - proposed_by,
            texts={row: self._text.draft_rows[row].tokens for row in active if not self._text.finished[row]},
            taken=self._taken,
            shares=self._shares,
        )

    def fill(self, length: int) -> None:
        """Bring ended rows to `length` new tokens with padding, so that their cache and scores are plain's.

        Args:
            length: tokens that the longest row has emitted.
        """
        while rows := [row for row, new in enumerate(self._text.new_lengths) if new < length]:
            trees = [
                self._padding(row, length - self._text.new_lengths[row] - 1 if row in rows else 0)
                for row in range(len(self._text.finished))
            ]
            # Not a round of decoding: its time counts in the total only.
            self._score_and_walk(trees, rows, TreeStats())

    def _sources(
        self, row: int, kept: Sequence[int], path: Sequence[int]
    ) -> tuple[Iterable[Iterable[str]], Iterable[Iterable[str]]]:
        """The sources behind each scored node of a row, and behind each accepted one."""
        scored = range(1, len(kept))
        if isinstance(self._draft, CreditedDraft):
            origins = self._draft.origins[row]
            return [origins[kept[node]] for node in scored], [origins[kept[node]] for node in path[1:]]
        names = (self._draft.name,)
        return [names for _ in scored], [names for _ in path[1:]]

    def _drafts(self, row: int) -> bool:
        return self._text.forced_token(row) is None

    def _row_limits(self, row: int, limits: TreeLimits, *, drafts: bool) -> TreeLimits:
        """What the row has room for: a round emits one token more than its path is deep."""
        depth = self._cache.path_limit
        # A static cache has room for what plain decoding writes: near its end trees shrink to nothing.
        spare = [] if self._cache.room is None else [self._cache.room - 1]
        room = self._text.room(row)
        if room is not None:
            depth = room - 1 if depth is None else min(depth, room - 1)
        if self._position_limit is not None:
            root = self._last_positions[row] + self._text.new_lengths[row]
            ahead = self._position_limit - 1 - root
            depth = ahead if depth is None else min(depth, ahead)
            if self._by_slots:
                spare.append(ahead)
        nodes = None if drafts and (self._states is None or self._states.cuttable) else 0
        if nodes is None and spare:
            # Slots of common depths are no more than the nodes of all rows.
            nodes = min(spare) // (len(self._last_positions) if self._by_slots else 1)
        return limits.capped(max_nodes=nodes, max_depth=depth)

    def _padding_depth(self, row: int, limits: TreeLimits) -> int:
        """How much padding may follow an ended row: none of an id that the target cannot read, until it must."""
        pad = self._text.forced_token(row)
        readable = pad is not None and 0 <= pad < self._readable
        return self._row_limits(row, limits, drafts=True).max_depth if readable else 0

    def _padding(self, row: int, depth: int) -> TokenTree:
        pad = self._text.forced_token(row)
        root = self._text.draft_rows[row].tokens[-1]
        return TokenTree.root_only(root) if pad is None else TokenTree.chain([root, *[pad] * depth])

    def _score_and_walk(
        self,
        trees: Sequence[TokenTree],
        rows: Sequence[int],
        stats: TreeStats,
        kept: Sequence[Sequence[int]] | None = None,
    ) -> list[list[int]]:
        """One forward, walk and commit; `kept` names the nodes as the draft numbers them, where it proposed them."""
        # A row that takes no part has only filler in this forward; its next position may not exist.
        ahead = [new if row in rows else max(0, new - 1) for row, new in enumerate(self._text.new_lengths)]
        guidance = self._guidance
        # What is read behind the end of a text is padding.
        live = [self._drafts(row) for row in range(len(trees))]
        first = [self._text.position(row) for row in range(len(trees))]
        with ExitStack() as stack:
            transaction: CacheTransaction | OrderBoundTransaction = self._cache.transaction()
            stack.enter_context(transaction)
            if guidance is not None:
                stack.enter_context(guidance.transaction())
            start = clock.now()
            with nullcontext() if self._taps is None else self._taps.watched():
                logits = self._forward(trees, ahead)
            if guidance is not None:
                guidance.read(trees, ahead)
            walked = clock.now()
            choices = None
            device = self._text.device
            # Rounds without trees too: a row's numbers must not depend on whether its neighbours have one.
            by_draws = self._independent is not None
            if not by_draws and self._batched_choice and all(self._drafts(row) for row in rows):
                choices = self._decider.choose_all(self._text, logits, trees)

            def logits_at(row: int, node: int) -> Tensor:
                if guidance is not None:
                    guidance.stand(row, node)
                return logits[row, node].to(device)

            if by_draws:
                paths = self._follow(trees, rows, logits, logits_at, stats)
            else:
                paths = walk_trees(
                    self._text,
                    trees,
                    logits_at,
                    self._decider,
                    rows,
                    in_step=self._in_step,
                    choices=choices,
                )
            if self._shares_of is not None:
                asked = {row: paths[row] for row in rows if live[row]}
                self._shares = self._shares_of.of_rows(trees, asked, logits, first, device)
            slots = self._forward.slots(paths)
            if self._states is not None and isinstance(self._cache, RowCache):
                self._states.keep(slots, self._cache)
            verified = clock.now()
            transaction.commit(slots)
            if guidance is not None:
                guidance.commit(paths)
        if self._taps is not None and kept and isinstance(self._draft, FeatureDraft):
            self._draft.read(self._taps.of_paths(self._forward.places(paths)))
        if self._observe is not None and kept:
            self._observe(trees, logits, [path if alive else [] for path, alive in zip(paths, live, strict=True)])
        self._draft.commit([[kept[row][node] for node in path] for row, path in enumerate(paths)] if kept else paths)
        if self._noise is not None:
            for row in rows:
                self._noise.forget(row, self._text.position(row))
        stats.target_seconds += walked - start
        stats.verify_seconds += verified - walked
        stats.commit_seconds += clock.now() - verified
        return paths

    def _follow(
        self,
        trees: Sequence[TokenTree],
        rows: Sequence[int],
        logits_BNV: Tensor,
        logits_at: Callable[[int, int], Tensor],
        stats: TreeStats,
    ) -> list[list[int]]:
        """Decide the round by independent draws, and emit what it came to."""
        assert self._independent is not None

        def stand(row: int, node: int) -> None:
            if self._guidance is not None:
                self._guidance.stand(row, node)

        laws = self._draft.laws(len(trees))
        live = [row for row in rows if self._drafts(row)]
        logits_BNV = logits_BNV.to(self._text.device)
        outcome = self._independent.decide(
            self._text, trees, logits_BNV, laws, stand, live, in_step=self._in_step
        )  # fmt: skip
        self._taken = {row: outcome.taken[row] for row in live}
        for row in rows:
            pad = self._text.forced_token(row)
            if pad is not None:
                outcome.paths[row][:] = range(len(trees[row]))
                outcome.last[row] = pad
            elif not self._text.finished[row]:
                stats.expected_accepted += outcome.expected[row]
        return follow_paths(self._text, trees, outcome, logits_at, rows, in_step=self._in_step)
