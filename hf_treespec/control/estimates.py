"""Running estimates of what a round costs and what it brings."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["RoundEstimates", "RunningMean"]


@dataclass(slots=True)
class RunningMean:
    """Mean that forgets: the plain mean of the first samples, then an exponential one.

    Args:
        decay: weight of the past once there are enough samples, in (0, 1).
    """

    decay: float = 0.9
    value: float = 0.0
    count: int = 0

    def add(self, sample: float) -> None:
        """Take one sample in."""
        self.count += 1
        weight = max(1.0 / self.count, 1.0 - self.decay)
        self.value += weight * (sample - self.value)


@dataclass(slots=True)
class RoundEstimates:
    """Seconds and tokens of rounds with a tree, seconds of rounds without (they bring one token a row)."""

    tree_seconds: RunningMean = field(default_factory=RunningMean)
    tree_tokens: RunningMean = field(default_factory=RunningMean)
    plain_seconds: RunningMean = field(default_factory=RunningMean)

    def observe(self, *, drafted: bool, seconds: float, tokens: float) -> None:
        """Take one round in.

        Args:
            drafted: whether the target scored any drafted node.
            seconds: wall clock of the round, drafting and commit included.
            tokens: mean tokens emitted per row that took part.
        """
        if drafted:
            self.tree_seconds.add(seconds)
            self.tree_tokens.add(tokens)
        else:
            self.plain_seconds.add(seconds)

    @property
    def gain(self) -> float | None:
        """Speed of tree rounds over plain rounds, tokens per second; None until both were seen."""
        if not self.tree_seconds.count or not self.plain_seconds.count:
            return None
        return self.tree_tokens.value * self.plain_seconds.value / max(self.tree_seconds.value, 1e-12)
