"""`TreeStats`: what one call of `generate` did.

Times are the host's. On a GPU a forward only queues its kernels, so that the time of the target appears where the
host next waits for a value, in `verify_seconds`; only sums over a whole round are meaningful there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

__all__ = ["TreeStats"]


@dataclass(slots=True)
class TreeStats:
    """Counters and times of one call. All seconds are host wall clock.

    A *row round* is one batch row taking part in one round; at batch 1 it is a round. The prefill is no round, its
    token counts in `new_tokens` only.

    Attributes:
        draft: name of the draft source.
        verification: rule by which sampled tokens were verified.
        lossless: whether that rule keeps the target's law.
        batch_size: rows.
        prompt_tokens: real prompt tokens of all rows, padding not counted.
        new_tokens: tokens emitted to the rows, padding after a stop not counted.
        rounds: target forwards after the prefill.
        row_rounds: row rounds.
        round_tokens: tokens emitted by rounds.
        drafted_nodes: drafted nodes that the target scored.
        expected_accepted: what `accepted_tokens` is in the mean over the coins of verification by independent draws,
            with less noise than itself; 0 under coupled and greedy verification, which throw none. Ends by eos are
            foreseen, those by other criteria are not.
        accepted_by_depth: `[d]` is how many row rounds accepted a node of depth d + 1.
        drafted_by_depth: `[d]` is how many row rounds offered a node of depth d + 1.
        drafted_by_source: nodes that the target scored, by the name of each source that proposed them. Several may
            have proposed one, so that the sum can exceed `drafted_nodes`.
        accepted_by_source: likewise the accepted ones.
        plain_rounds: rounds without any drafted node.
        fallback_rounds: rounds that the fallback made plain: to time them, or because no tree paid.
        prefill_seconds: the prefill and its token.
        target_seconds: target forwards of the rounds.
        draft_seconds: proposing, the forwards of a draft model included.
        draft_forward_seconds: forwards of a draft model alone.
        verify_seconds: processors, choice of tokens, stopping criteria, streamer.
        commit_seconds: moving accepted keys and values, in target and draft.
        total_seconds: the call from prefill to output.
    """

    draft: str = "none"
    verification: str = "coupled"
    lossless: bool = True
    batch_size: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    row_rounds: int = 0
    round_tokens: int = 0
    drafted_nodes: int = 0
    expected_accepted: float = 0.0
    accepted_by_depth: list[int] = field(default_factory=list)
    drafted_by_depth: list[int] = field(default_factory=list)
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    plain_rounds: int = 0
    fallback_rounds: int = 0
    prefill_seconds: float = 0.0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    draft_forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens a row gains in a round; 1.0 is plain decoding. 0.0 if there was no round."""
        return self.round_tokens / self.row_rounds if self.row_rounds else 0.0

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens that were accepted."""
        return sum(self.accepted_by_depth)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted nodes. Siblings compete, so 1.0 is out of reach for anything but a chain."""
        return self.accepted_tokens / self.drafted_nodes if self.drafted_nodes else 0.0

    @property
    def round_seconds(self) -> float:
        """All of the rounds: the total without the prefill."""
        return self.total_seconds - self.prefill_seconds

    @property
    def overhead_fraction(self) -> float:
        """Share of `round_seconds` outside the forwards of target and draft model."""
        if self.round_seconds <= 0:
            return 0.0
        return 1.0 - (self.target_seconds + self.draft_forward_seconds) / self.round_seconds

    @property
    def tokens_per_second(self) -> float:
        """`new_tokens` over `total_seconds`."""
        return self.new_tokens / self.total_seconds if self.total_seconds > 0 else 0.0

    def record_row(
        self,
        *,
        path: int,
        drafted_depths: set[int],
        drafted: int,
        emitted: int,
        sources: tuple[Iterable[Iterable[str]], Iterable[Iterable[str]]] = ((), ()),
    ) -> None:
        """Count one row round.

        Args:
            path: depth of the deepest accepted node.
            drafted_depths: depths at which the row's tree had nodes.
            drafted: drafted nodes of the row.
            emitted: tokens the row gained.
            sources: names of the sources of each scored node, and of each accepted one.
        """
        self.row_rounds += 1
        self.round_tokens += emitted
        self.new_tokens += emitted
        self.drafted_nodes += drafted
        deepest = max(drafted_depths, default=0)
        for counts in (self.accepted_by_depth, self.drafted_by_depth):
            counts.extend([0] * (deepest - len(counts)))
        for depth in range(path):
            self.accepted_by_depth[depth] += 1
        for counts_of, nodes in zip((self.drafted_by_source, self.accepted_by_source), sources, strict=True):
            for name in chain.from_iterable(nodes):
                counts_of[name] = counts_of.get(name, 0) + 1
        for depth in drafted_depths:
            self.drafted_by_depth[depth - 1] += 1

    def to_dict(self) -> dict[str, Any]:
        """Fields and derived figures, ready for JSON."""
        derived = ("tokens_per_round", "acceptance_rate", "overhead_fraction", "tokens_per_second")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}
