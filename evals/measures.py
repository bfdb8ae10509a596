"""The statistics of the evals: p-values, Holm, power and bounds, in float64 and with torch alone.

All tests are of a null law that is known exactly; n is the number of observations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = [
    "chi_square",
    "chi_square_quantile",
    "chi_square_tail",
    "holm",
    "kolmogorov_smirnov",
    "martingale_tail",
    "normal_tail",
    "smallest_variation",
    "two_samples",
    "uniform_bins",
    "variation_bound",
]


def normal_tail(z: float) -> float:
    """Two-sided p-value of a standard normal value."""
    return math.erfc(abs(z) / math.sqrt(2))


def martingale_tail(value: float, variance: float, n: int, *, within_one: bool = False) -> float:
    """Two-sided p-value of the sum of n martingale differences with that predictable variance.

    Normal once there are enough of them; below, a bound that always holds: Freedman's for differences of at most one,
    Chebyshev's for others.
    """
    if variance <= 0 or value == 0:
        return 1.0
    size = abs(value)
    if within_one and variance < 25:
        return min(1.0, 2 * math.exp(-size * size / (2 * (variance + size / 3))))
    if n < 1000:
        return min(1.0, variance / size**2)
    return normal_tail(value / math.sqrt(variance))


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(chi-square with `freedom` degrees of freedom > `statistic`)."""
    if statistic <= 0 or freedom <= 0:
        return 1.0
    if math.isinf(statistic):
        return 0.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def chi_square_quantile(tail: float, freedom: int) -> float:
    """The value that chi-square exceeds with probability `tail`.

    Raises:
        ValueError: without a degree of freedom.
    """
    if freedom <= 0:
        raise ValueError(f"freedom={freedom}: expected at least 1")
    low, high = 0.0, 10.0
    while chi_square_tail(high, freedom) > tail:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_tail(middle, freedom) > tail else (low, middle)
    return high


def chi_square(counts: Sequence[float], chances: Sequence[float], least: float = 10.0) -> tuple[float, int]:
    """Pearson's test of counts against probabilities; cells that expect fewer than `least` are one.

    Returns:
        p-value and degrees of freedom. A count in a cell of probability 0 gives p = 0.
    """
    total = math.fsum(counts)
    cells: list[tuple[float, float]] = []
    rare = [0.0, 0.0]
    for count, chance in zip(counts, chances, strict=True):
        if chance <= 0:
            if count:
                return 0.0, max(1, len(counts) - 1)
        elif chance * total >= least:
            cells.append((count, chance * total))
        else:
            rare[0] += count
            rare[1] += chance * total
    if rare[1] > 0:
        cells.append((rare[0], rare[1]))
    freedom = len(cells) - 1
    return chi_square_tail(math.fsum((x - e) ** 2 / e for x, e in cells), freedom), freedom


def two_samples(one: Mapping[str, float], other: Mapping[str, float], least: float = 10.0) -> tuple[float, int]:
    """Pearson's test that two tables of counts have one law; rare cells are one."""
    totals = math.fsum(one.values()), math.fsum(other.values())
    share = totals[0] / (totals[0] + totals[1])
    cells: list[list[float]] = []
    rare = [0.0, 0.0]
    for key in sorted({*one, *other}):
        pair = [one.get(key, 0.0), other.get(key, 0.0)]
        if min(share, 1 - share) * sum(pair) >= least:
            cells.append(pair)
        else:
            rare = [rare[0] + pair[0], rare[1] + pair[1]]
    if sum(rare):
        cells.append(rare)
    statistic = 0.0
    for pair in cells:
        for count, part in zip(pair, (share, 1 - share), strict=True):
            expected = sum(pair) * part
            statistic += (count - expected) ** 2 / expected
    return chi_square_tail(statistic, len(cells) - 1), len(cells) - 1


def kolmogorov_smirnov(values: Tensor) -> float:
    """p-value of the test that values in [0, 1] are uniform, by Kolmogorov's law with Stephens' correction for n."""
    n = values.numel()
    if n == 0:
        return 1.0
    ordered = values.double().sort().values
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = max(float((steps[1:] - ordered).max()), float((ordered - steps[:-1]).max()))
    x = distance * (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))
    if x < 0.2:
        return 1.0
    return min(1.0, max(0.0, 2 * math.fsum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 101))))


def uniform_bins(values: Tensor, bins: int) -> list[float]:
    """Counts of values in [0, 1] in equal bins."""
    return torch.bincount((values.double() * bins).long().clamp(0, bins - 1), minlength=bins).tolist()


def holm(p_values: Sequence[float], family: float) -> list[bool]:
    """Which hypotheses fall, with a chance of at most `family` that any true one does (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    fallen = [False] * len(p_values)
    for rank, i in enumerate(order):
        if p_values[i] > family / (len(p_values) - rank):
            break
        fallen[i] = True
    return fallen


def _power(excess: float, freedom: int, critical: float) -> float:
    """P(noncentral chi-square > critical): a Poisson mixture of central ones."""
    mean = excess / 2
    spread = 12 * math.sqrt(mean) + 30
    low, high = max(0, int(mean - spread)), int(mean + spread)
    k = torch.arange(low, high + 1, dtype=torch.float64)
    if mean == 0:
        return chi_square_tail(critical, freedom)
    weights = (k * math.log(mean) - mean - torch.lgamma(k + 1)).exp()
    tails = torch.special.gammaincc(freedom / 2 + k, torch.full_like(k, critical / 2))
    return float((weights * tails).sum())


def smallest_variation(n: int, freedom: int, level: float, power: float = 0.99) -> float:
    """The smallest total variation between the laws of a cell that a chi-square test would find with that power.

    The noncentrality of n observations at a variation of e is at least 4 n e^2 (Cauchy-Schwarz), which the law that
    is hardest to tell attains.

    Args:
        n: observations.
        freedom: degrees of freedom; 1 for a score test.
        level: of the test.
        power: chance to find it.
    """
    if n <= 0 or freedom <= 0:
        return 1.0
    critical = chi_square_quantile(level, freedom)
    low, high = 0.0, 10.0
    while _power(high, freedom, critical) < power:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _power(middle, freedom, critical) < power else (low, middle)
    return min(1.0, math.sqrt(high / (4 * n)))


def variation_bound(counts: Sequence[float], chances: Sequence[float], doubt: float = 1e-3) -> float:
    """An upper bound on the total variation between the law of the counts and `chances`, right with 1 - `doubt`.

    The empirical one, what it exceeds the true one by in the mean at most, and McDiarmid's deviation.
    """
    n, cells = math.fsum(counts), len(counts)
    if not n:
        return 1.0
    seen = math.fsum(abs(count / n - chance) for count, chance in zip(counts, chances, strict=True)) / 2
    return min(1.0, seen + 0.5 * math.sqrt(cells / n) + math.sqrt(math.log(1 / doubt) / (2 * n)))
