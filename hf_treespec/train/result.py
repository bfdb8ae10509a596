"""What a training run comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hf_treespec.train.measure import Measured

__all__ = ["TrainResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """A trained draft.

    Attributes:
        draft: folder of it.
        kind: see `TrainSettings`.
        target: name of the model.
        parameters: weights of the draft.
        dtype: of them.
        bytes: of their file.
        prompts: that were used.
        left_out: prompts that were not: empty ones, ones twice, and ones that the target has no room for.
        held_out: prompts kept for judging.
        texts: that were learnt from.
        tokens: of them, which the target wrote itself.
        tokens_trained: those of each epoch counted.
        steps: of training.
        seconds: of training.
        accepted_length: tokens a round of a greedy chain on held-out texts: "untrained" and "best".
        measured: calls of `generate` on held-out prompts.
        settings: of the run.
        made_with: versions and machine.
    """

    draft: str
    kind: str
    target: str
    parameters: int
    dtype: str
    bytes: int
    prompts: int
    left_out: int
    held_out: int
    texts: int
    tokens: int
    tokens_trained: int
    steps: int
    seconds: float
    accepted_length: dict[str, float]
    measured: tuple[Measured, ...]
    settings: dict[str, Any]
    made_with: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> TrainResult:
        """What `to_dict` gave."""
        return cls(**{**facts, "measured": tuple(Measured(**one) for one in facts["measured"])})
