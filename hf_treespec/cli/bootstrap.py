"""Ratios of totals with paired bootstrap intervals.

Two methods ran the same prompts, so a prompt is drawn with both of its figures. The ratio of totals, unlike the mean
of ratios, says how much sooner the whole job is done, and cannot be driven by a few short prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["RESAMPLES", "Interval", "paired_bootstrap", "rate_ratio", "ratio_of_totals"]

RESAMPLES = 10_000
_CHUNK = 1_000

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and its 95 % interval.

    Args:
        value: of the prompts as they are.
        low: 2.5 % quantile of the resamples; None for fewer than two prompts, which say nothing about others.
        high: 97.5 % quantile.
    """

    value: float
    low: float | None
    high: float | None


def paired_bootstrap(
    columns: Sequence[Sequence[float]],
    statistic: Callable[[Floats], Floats],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Bootstrap over prompts of a statistic of totals.

    Args:
        columns: figures per prompt, one sequence each, all in the same order of prompts.
        statistic: from totals `[..., columns]` to figures `[...]`.
        resamples: how many.
        seed: of the resampling, so that a CSV gives the same interval every time.

    Raises:
        ValueError: if there are no prompts or the columns differ in length.
    """
    table = np.array(columns, dtype=np.float64).T
    if table.ndim != 2 or not len(table):
        raise ValueError(f"expected columns of one length of at least 1, got shape {table.shape}")
    prompts = len(table)
    value = float(statistic(table.sum(axis=0)))
    if prompts < 2:
        return Interval(value, None, None)
    generator = np.random.default_rng(seed)
    figures: list[Floats] = []
    # How often each prompt is drawn is multinomial; in chunks, as a thousand prompts would make a matrix of 80 MB.
    for start in range(0, resamples, _CHUNK):
        size = min(_CHUNK, resamples - start)
        counts = generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=size)
        figures.append(statistic(counts @ table))
    low, high = np.quantile(np.concatenate(figures), (0.025, 0.975))
    return Interval(value, float(low), float(high))


def ratio_of_totals(baseline: Sequence[float], method: Sequence[float], *, seed: int = 0) -> Interval:
    """Total of the baseline over total of the method: a speed-up if both are seconds."""
    return paired_bootstrap((baseline, method), lambda totals: totals[..., 0] / totals[..., 1], seed=seed)


def rate_ratio(
    baseline_seconds: Sequence[float],
    baseline_tokens: Sequence[float],
    method_seconds: Sequence[float],
    method_tokens: Sequence[float],
    *,
    seed: int = 0,
) -> Interval:
    """Tokens a second of the method over those of the baseline, for texts that need not be equally long."""
    return paired_bootstrap(
        (baseline_seconds, baseline_tokens, method_seconds, method_tokens),
        lambda totals: totals[..., 0] / totals[..., 1] * totals[..., 3] / totals[..., 2],
        seed=seed,
    )
