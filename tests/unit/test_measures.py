"""The statistics of the evals against tables and against themselves."""

from __future__ import annotations

import math

import pytest
import torch

from measures import (
    BENTKUS,
    binomial_tail,
    both_tails_of_two,
    chi_square,
    chi_square_quantile,
    chi_square_tail,
    holm,
    kolmogorov_smirnov,
    martingale_tail,
    normal_tail,
    pearson,
    poisson_tail,
    smallest_variation,
    two_samples,
    uniform_bins,
    variation_bound,
)


def test_tails_are_those_of_the_tables() -> None:
    assert normal_tail(1.959964) == pytest.approx(0.05, abs=1e-7)
    assert normal_tail(-3.290527) == pytest.approx(0.001, abs=1e-8)
    for statistic, freedom, p in ((3.841459, 1, 0.05), (18.307038, 10, 0.05), (36.190869, 19, 0.01), (0.0, 3, 1.0)):
        assert chi_square_tail(statistic, freedom) == pytest.approx(p, abs=1e-7)
        if statistic:
            assert chi_square_quantile(p, freedom) == pytest.approx(statistic, abs=1e-5)
    assert chi_square_tail(math.inf, 3) == 0.0 and chi_square_tail(5.0, 0) == 1.0


# The share of the level that the awaited variance has: 1 / (2 zeta(3/2) - 1).
SHARE = 1 / (2 * math.fsum(k**-1.5 for k in range(1, 4_000_000)) + 4 / math.sqrt(4e6) - 1)


def test_martingales_are_bounded_by_a_poisson_number() -> None:
    factor = BENTKUS / SHARE
    # Much variance for its steps: nearly normal, up to the factors.
    assert martingale_tail(3e4, 1e8, 1.0, 1e8) == pytest.approx(factor * normal_tail(3.0), rel=0.01)
    # One event of chance 1e-6 is a rarity, not one of thousands of deviations.
    assert martingale_tail(1.0, 1e-6, 1.0, 1e-6) == pytest.approx(2 * factor * 1e-6, rel=1e-3)
    # N - 0.5 with N Poisson of mean 0.5, in steps of 10: N >= 5.
    tail = 1 - math.exp(-0.5) * (1 + 0.5 + 0.125 + 0.5**3 / 6 + 0.5**4 / 24)
    assert martingale_tail(45.0, 50.0, 10.0, 50.0) == martingale_tail(-45.0, 50.0, 10.0, 50.0)
    assert martingale_tail(45.0, 50.0, 10.0, 50.0) == pytest.approx(2 * factor * tail)
    assert martingale_tail(0.0, 3.0, 1.0, 3.0) == martingale_tail(1.0, 0.0, 1.0, 3.0) == 1.0
    assert martingale_tail(0.1, 3.0, 1.0, 3.0) == 1.0


def test_another_variance_than_awaited_costs_by_how_far_it_is() -> None:
    """Of 1.1^j times the awaited one: the share falls by (1 + |j|)^(3/2)."""
    at = martingale_tail(5e4, 1e8, 1.0, 1e8)
    for j in (1, 5, 20):
        assert martingale_tail(5e4, 1e8, 1.0, 1e8 / 1.1**j) == pytest.approx(at * (1 + j) ** 1.5, rel=1e-6)
    # Where more is awaited the larger V may have the better share.
    near = martingale_tail(5e4, 1e8, 1.0, 1.1**20 * 1e8)
    assert at < near <= at * 21**1.5
    assert near <= 2 * BENTKUS / SHARE * normal_tail(5 / 1.1**10)


@pytest.mark.parametrize("end", [0.05, 1e-2, 1e-3])
def test_texts_that_end_when_they_look_bad_are_not_rejected_too_often(end: float) -> None:
    """Fair coins, thrown until a test of the realised variance alone would reject, or two thousand times."""
    runs, longest = 2000, 2000
    dice = torch.Generator().manual_seed(5)
    coins = torch.randint(0, 2, (runs, longest), generator=dice).double().sub_(0.5)
    sums = coins.cumsum(1)
    throws = torch.arange(1, longest + 1, dtype=torch.float64)
    mean = throws / 4
    alone = 2 * BENTKUS * torch.special.gammainc(mean + sums.abs(), mean)
    stops = torch.where(alone <= end, throws.long(), longest).amin(1)
    values = sums.gather(1, stops[:, None] - 1)[:, 0]
    told = {pair: martingale_tail(pair[0], pair[1] / 4, 1.0, longest / 4) for pair in
            set(zip(values.abs().tolist(), stops.tolist(), strict=True))}  # fmt: skip
    found = torch.tensor([told[pair] for pair in zip(values.abs().tolist(), stops.tolist(), strict=True)])
    # What the variance alone says is wrong by far.
    assert int((alone.gather(1, stops[:, None] - 1) <= end).sum()) > 2 * end * runs
    for level in (0.05, 1e-2, 1e-3):
        expected = level * runs
        assert int((found <= level).sum()) <= expected + 4 * math.sqrt(expected), level


@pytest.mark.parametrize("chance", [3e-5, 3e-4, 3e-3, 0.03, 0.3])
@pytest.mark.parametrize("sizes", [(1.0, 1.0), (1.0, 0.1)])
def test_p_values_of_peaked_laws_are_not_too_small(chance: float, sizes: tuple[float, float]) -> None:
    """Two kinds of rare steps, up and down: at no level more rejections than it says."""
    n, runs, step = 2000, 20_000, 16.0
    dice = torch.Generator().manual_seed(5)
    up, down = (torch.poisson(torch.full((runs,), n * chance), generator=dice).double() for _ in range(2))
    values = step * (sizes[0] * (up - n * chance) - sizes[1] * (down - n * chance))
    variance = step**2 * n * chance * (sizes[0] ** 2 + sizes[1] ** 2)
    found = torch.tensor([martingale_tail(float(value), variance, step, variance) for value in values.unique()])
    each = found[values.unique(return_inverse=True)[1]]
    for level in (0.05, 1e-2, 1e-3):
        expected = level * runs
        assert int((each <= level).sum()) <= expected + 4 * math.sqrt(expected)
    assert float(each.min()) > 1e-6


def test_rare_events() -> None:
    assert poisson_tail(5, 0.4) == pytest.approx(1.2e-4, rel=0.03)
    assert poisson_tail(0, 0.4) == poisson_tail(0, 0.0) == 1.0 and poisson_tail(1, 0.0) == 0.0
    assert poisson_tail(0, 50.0) == pytest.approx(2 * math.exp(-50))


def test_pearson_by_hand() -> None:
    # A die of 120 throws: sum (x - 20)^2 / 20 = 5.
    p, freedom = chi_square([25, 15, 20, 20, 25, 15], [1 / 6] * 6)
    assert freedom == 5 and p == pytest.approx(chi_square_tail(5.0, 5))
    # Cells that expect fewer than ten are one: 4 + 4 + 2 of 0.1 together.
    p, freedom = chi_square([90, 4, 4, 2], [0.9, 0.04, 0.04, 0.02])
    assert (p, freedom) == (1.0, 1)
    assert chi_square([99, 1], [1.0, 0.0]) == (0.0, 1)
    assert chi_square([100, 0], [1.0, 0.0]) == (1.0, 0)
    # A rare rest is no part of the statistic, and counts by itself.
    statistic, freedom, rare = pearson([260, 135, 5], [0.4995, 0.4995, 0.001])
    assert (statistic, freedom) == (pytest.approx(2 * 62.5**2 / 197.5), 1) and rare == (5, pytest.approx(0.4))
    assert chi_square([199, 196, 5], [0.4995, 0.4995, 0.001]) == (pytest.approx(2 * poisson_tail(5, 0.4)), 2)


def test_two_samples_by_hand() -> None:
    # 2 x 2: n (ad - bc)^2 / (margins) = 200 * (30*50 - 70*50)^2 / (100 * 100 * 80 * 120) = 8.333.
    assert two_samples({"a": 30, "b": 70}, {"a": 50, "b": 50}) == (pytest.approx(25 / 3), 1, (0, 0, 0.5))
    assert two_samples({"a": 300, "b": 700}, {"a": 30, "b": 70})[:2] == (pytest.approx(0.0), 1)
    assert two_samples({"a": 400}, {"a": 400}) == (0.0, 0, (0, 0, 0.5))
    # What is rare is no part of the statistic, unless it is much together.
    assert two_samples({"a": 50, "x": 1}, {"a": 50, "y": 1}) == (0.0, 0, (1, 2, 0.5))
    assert two_samples({"a": 40, "b": 60, "x": 4}, {"a": 40, "b": 60}) == (pytest.approx(0.0), 1, (4, 4, 104 / 204))
    rare = {f"x{i}": 4 for i in range(5)}
    assert two_samples({"a": 80, **rare}, {"a": 80, **rare}) == (0.0, 1, (0, 0, 0.5))


def test_rare_cells_of_two_samples_are_one_binomial() -> None:
    assert binomial_tail(0, 4, 0.5) == binomial_tail(4, 4, 0.5) == pytest.approx(1 / 8)
    assert binomial_tail(2, 4, 0.5) == binomial_tail(0, 0, 0.5) == 1.0
    assert binomial_tail(3, 3, 0.1) == pytest.approx(2e-3)
    assert both_tails_of_two(0.0, 0, [(0, 0, 0.5)] * 3) == (1.0, 0)
    assert both_tails_of_two(0.0, 0, [(4, 4, 0.5)] * 2 + [(0, 0, 0.9)]) == (pytest.approx(2 / 2**8), 1)
    # The least of two, times two.
    assert both_tails_of_two(0.0, 3, [(8, 8, 0.5)]) == (pytest.approx(4 / 2**8), 4)
    # Many tables of a count or two each: at no level more rejections than it says, which no statistic of theirs does.
    dice = torch.Generator().manual_seed(3)
    hits = torch.binomial(torch.full((4000,), 15.0), torch.full((4000,), 0.5), generator=dice)
    found = torch.tensor([binomial_tail(int(hit), 15, 0.5) for hit in hits])
    assert int((found <= 0.05).sum()) <= 200 + 4 * math.sqrt(200)


def test_kolmogorov_smirnov() -> None:
    even = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    assert kolmogorov_smirnov(even) == pytest.approx(1.0)
    # Kolmogorov's law: P(sqrt(n) D > 1.3581) = 0.05.
    shift = 1.3581 / (math.sqrt(100_000) + 0.12) - 0.5 / 100_000
    many = ((torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000 * (1 - shift) + shift).clamp(0, 1)
    assert kolmogorov_smirnov(many) == pytest.approx(0.05, abs=1e-3)
    assert kolmogorov_smirnov(even**2) < 1e-9
    assert kolmogorov_smirnov(torch.zeros(0)) == 1.0


def test_its_p_values_are_uniform_themselves() -> None:
    dice = torch.Generator().manual_seed(3)
    values = [kolmogorov_smirnov(torch.rand(200, generator=dice, dtype=torch.float64)) for _ in range(400)]
    assert kolmogorov_smirnov(torch.tensor(values)) > 1e-3
    assert 5 <= sum(p < 0.05 for p in values) <= 38


def test_bins() -> None:
    assert uniform_bins(torch.tensor([0.0, 0.049, 0.05, 0.5, 1.0]), 20)[:2] == [2, 1]
    assert uniform_bins(torch.tensor([1.0]), 4) == [0, 0, 0, 1]


def test_holm_goes_on_only_below_what_has_fallen() -> None:
    assert holm([0.04, 0.001, 0.02], 0.05) == [True, True, True]
    # 0.03 > 0.05 / 2 stops it, though 0.04 alone would pass 0.05 / 1.
    assert holm([0.04, 0.001, 0.03], 0.05) == [False, True, False]
    assert holm([], 0.05) == []


@pytest.mark.parametrize(
    ("freedom", "level", "variation", "n"),
    [(1, 1e-3, 0.05, 3_200), (1, 1e-3, 0.01, 79_000), (7, 1e-3, 0.02, 28_000), (63, 1e-3, 0.01, 217_000),
     (63, 1e-4, 0.05, 10_000), (1023, 1e-3, 0.02, 170_000)],
)  # fmt: skip
def test_power_is_that_of_the_table(freedom: int, level: float, variation: float, n: int) -> None:
    """Sample sizes that find a variation with 99 %, as computed elsewhere, rounded."""
    assert smallest_variation(n, freedom, level) == pytest.approx(variation, rel=0.02)


def test_power_is_what_happens() -> None:
    """The stated variation is found in 99 of 100 runs, half of it is not."""
    n, level, cells = 4000, 1e-3, 20
    dice = torch.Generator().manual_seed(1)
    stated = smallest_variation(n, cells - 1, level)

    def found(variation: float) -> int:
        law = torch.full((cells,), 1 / cells, dtype=torch.float64)
        law[::2] += 2 * variation / cells
        law[1::2] -= 2 * variation / cells
        hits = 0
        for _ in range(200):
            counts = torch.bincount(torch.multinomial(law, n, replacement=True, generator=dice), minlength=cells)
            hits += chi_square(counts.tolist(), [1 / cells] * cells)[0] < level
        return hits

    assert found(stated) >= 192
    assert found(stated / 2) < 100
    assert smallest_variation(0, 3, level) == smallest_variation(50, 0, level) == 1.0
    with pytest.raises(ValueError, match="freedom=0"):
        chi_square_quantile(0.1, 0)


def test_the_bound_bounds() -> None:
    law = [0.1] * 10
    bound = variation_bound([1000] * 10, law)
    assert bound == pytest.approx(0.5 * math.sqrt(10 / 10_000) + math.sqrt(math.log(1000) / 20_000))
    assert variation_bound([2000, 0, *[1000] * 8], law) == pytest.approx(bound + 0.1)
    assert variation_bound([0] * 10, law) == 1.0
    assert variation_bound([10, *[0] * 9], law) == 1.0
