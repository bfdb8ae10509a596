"""The statistics of the evals: p-values, Holm, power and bounds, in float64 and with torch alone.

All tests are of a null law that is known exactly; n is the number of observations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = [
    "BENTKUS",
    "binomial_tail",
    "both_tails",
    "both_tails_of_two",
    "chi_square",
    "chi_square_quantile",
    "chi_square_tail",
    "holm",
    "kolmogorov_smirnov",
    "martingale_tail",
    "normal_tail",
    "pearson",
    "poisson_tail",
    "smallest_variation",
    "two_samples",
    "uniform_bins",
    "variation_bound",
]


# What a martingale's tail is above that of its Poisson number at most.
BENTKUS = math.e**2 / 2
# Ratio of the variances that a martingale is tested with, and the share of the awaited one: 1 / (2 zeta(3/2) - 1).
_GRID = 1.1
_SHARE = 1 / (2 * 2.6123753486854883 - 1)


def normal_tail(z: float) -> float:
    """Two-sided p-value of a standard normal value."""
    return math.erfc(abs(z) / math.sqrt(2))


def martingale_tail(value: float, variance: float, step: float, awaited: float) -> float:
    """Two-sided p-value of the sum of martingale differences of at most `step`, wherever the sum was ended.

    Valid though the summed conditional variances are random, and though the differences themselves may have chosen
    where to end: a text ends by its own tokens. No limit theorem: laws that are nearly certain give rare large steps.

    For a V that is fixed beforehand, the sum reaches x while that variance is at most V with a chance of at most
    e^2 / 2 times that of s (N - V / s^2) >= x, N being a Poisson number of mean V / s^2 (Bentkus, Annals of
    Probability 32, 2004, 1650-1673, of the sum that is stopped at x, or before its variance exceeds V). Here V is any
    of `awaited` * 1.1^j, j = ..., -1, 0, 1, ..., and the level is shared among them by (1 + |j|)^(-3/2): the p-value
    is the least over the V that are no less than `variance`, each over its share. That costs a factor of 4 in p where
    the variance is as awaited, of some 100 where it is half or twice of that.

    Args:
        value: the sum.
        variance: of it, predictable, as realised.
        step: largest difference.
        awaited: the variance that is likely; whatever it is, it may not depend on the differences.
    """
    if variance <= 0 or value == 0:
        return 1.0
    first = math.ceil(math.log(variance / awaited) / math.log(_GRID) - 1e-9)
    # The bound grows with V: from `awaited` on only the first counts.
    j = torch.arange(first, max(first, 0) + 1, dtype=torch.float64)
    # To start from the variance itself guards against rounding at a point of the grid.
    mean = (awaited * _GRID**j).clamp(min=variance) / step**2
    tails = 2 * BENTKUS * torch.special.gammainc(mean + abs(value) / step, mean)
    return min(1.0, float((tails / (_SHARE * (1 + j.abs()) ** -1.5)).min()))


def poisson_tail(count: float, mean: float) -> float:
    """Two-sided p-value of a number of rare events."""
    if mean <= 0:
        return 0.0 if count else 1.0
    place, rate = torch.tensor(float(count), dtype=torch.float64), torch.tensor(mean, dtype=torch.float64)
    above = float(torch.special.gammainc(place, rate)) if count else 1.0
    below = float(torch.special.gammaincc(place + 1, rate))
    return min(1.0, 2 * min(above, below))


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


def pearson(
    counts: Sequence[float], chances: Sequence[float], least: float = 10.0
) -> tuple[float, int, tuple[float, float]]:
    """Pearson's statistic of counts against probabilities; cells that expect fewer than `least` are one.

    Returns:
        The statistic, its degrees of freedom, and (count, expected) of that one cell where even it expects fewer: it
        is no part of the statistic then, whose law it would spoil. A count in a cell of probability 0 gives infinity.
    """
    total = math.fsum(counts)
    cells: list[tuple[float, float]] = []
    rare = [0.0, 0.0]
    for count, chance in zip(counts, chances, strict=True):
        if chance <= 0:
            if count:
                return math.inf, max(1, len(counts) - 1), (0.0, 0.0)
        elif chance * total >= least:
            cells.append((count, chance * total))
        else:
            rare[0] += count
            rare[1] += chance * total
    if rare[1] >= least:
        cells.append((rare[0], rare[1]))
        rare = [0.0, 0.0]
    # Those that are left are judged by their shares among themselves.
    seen, awaited = math.fsum(x for x, _ in cells), math.fsum(e for _, e in cells)
    share = seen / awaited if awaited else 0.0
    statistic = math.fsum((x - e * share) ** 2 / (e * share) for x, e in cells) if share else 0.0
    return statistic, max(0, len(cells) - 1), (rare[0], rare[1])


def chi_square(counts: Sequence[float], chances: Sequence[float], least: float = 10.0) -> tuple[float, int]:
    """The test of `pearson`, and of what is too rare for it by itself.

    Returns:
        p-value and degrees of freedom; 0 of them if there is nothing that could tell.
    """
    statistic, freedom, rare = pearson(counts, chances, least)
    return both_tails(statistic, freedom, rare)


def both_tails(statistic: float, freedom: int, rare: tuple[float, float]) -> tuple[float, int]:
    """p-value and degrees of freedom of what `pearson` gives, or of sums of it."""
    found = [chi_square_tail(statistic, freedom)] if freedom else []
    if rare[1] > 0:
        found.append(poisson_tail(*rare))
        freedom += 1
    return min(1.0, max(1, len(found)) * min(found, default=1.0)), freedom


def two_samples(
    one: Mapping[str, float], other: Mapping[str, float], least: float = 10.0
) -> tuple[float, int, tuple[float, float, float]]:
    """Pearson's statistic of two tables of counts that have one law; cells that expect fewer than `least` are one.

    Returns:
        The statistic, its degrees of freedom, and (count in `one`, count in both, share of `one` in all counts) of
        that one cell where even it expects fewer: it is no part of the statistic then.
    """
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
    if min(share, 1 - share) * sum(rare) >= least:
        cells.append(rare)
        rare = [0.0, 0.0]
    # Those that are left are judged by their shares among themselves.
    seen = [math.fsum(pair[side] for pair in cells) for side in (0, 1)]
    statistic = 0.0
    for pair in cells:
        for count, part in zip(pair, seen, strict=True):
            expected = sum(pair) * part / sum(seen)
            statistic += (count - expected) ** 2 / expected if expected else 0.0
    return statistic, max(0, len(cells) - 1), (rare[0], sum(rare), share)


def both_tails_of_two(statistic: float, freedom: int, rare: Sequence[tuple[float, float, float]]) -> tuple[float, int]:
    """p-value and degrees of freedom of sums of what `two_samples` gives: rare counts of all tables as one binomial.

    Given how many there are in both tables, those in the first are binomial by its share; where shares differ from
    table to table, a binomial of their mean is no less spread.
    """
    found = [chi_square_tail(statistic, freedom)] if freedom else []
    if count := round(math.fsum(both for _, both, _ in rare)):
        share = math.fsum(both * part for _, both, part in rare) / count
        found.append(binomial_tail(round(math.fsum(mine for mine, _, _ in rare)), count, share))
        freedom += 1
    return min(1.0, max(1, len(found)) * min(found, default=1.0)), freedom


def binomial_tail(count: int, trials: int, chance: float) -> float:
    """Two-sided p-value of a number of hits."""
    k = torch.arange(trials + 1, dtype=torch.float64)
    n = torch.tensor(float(trials), dtype=torch.float64)
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    odds = torch.tensor([chance, 1 - chance], dtype=torch.float64)
    law = (ways + torch.xlogy(k, odds[0]) + torch.xlogy(n - k, odds[1])).exp()
    return min(1.0, 2 * min(float(law[: count + 1].sum()), float(law[count:].sum())))


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

    The empirical one, what it exceeds the true one by in the mean at most, and McDiarmid's deviation: of observations
    that are independent and of one law.
    """
    n, cells = math.fsum(counts), len(counts)
    if not n:
        return 1.0
    seen = math.fsum(abs(count / n - chance) for count, chance in zip(counts, chances, strict=True)) / 2
    return min(1.0, seen + 0.5 * math.sqrt(cells / n) + math.sqrt(math.log(1 / doubt) / (2 * n)))
