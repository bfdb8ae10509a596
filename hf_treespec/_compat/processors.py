"""Logits processors by what they may depend on."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.generation import logits_process as _lp

__all__ = [
    "GuidanceProcessor",
    "length_free_processors",
    "process_logits",
    "pure_processors",
]


GuidanceProcessor = _lp.UnbatchedClassifierFreeGuidanceLogitsProcessor


def process_logits(processors: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """Run a list of logits processors."""
    return processors(input_ids, scores)  # type: ignore[no-any-return]


def _classes(*names: str) -> frozenset[type]:
    # A class that one of the supported versions lacks simply never occurs in it.
    return frozenset(getattr(_lp, name) for name in names if hasattr(_lp, name))


def length_free_processors() -> frozenset[type]:
    """Processors whose row of scores depends on that row of logits alone."""
    return _classes(
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "LogitNormalization",
        "InfNanRemoveLogitsProcessor",
        "SuppressTokensLogitsProcessor",
    )


def pure_processors() -> frozenset[type]:
    """Processors that are functions of their arguments, so that calling them in another order changes nothing."""
    return length_free_processors() | _classes(
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "SuppressTokensAtBeginLogitsProcessor",
    )
