"""Ratios of totals and their intervals, against cases that can be worked out by hand."""

from __future__ import annotations

import pytest

from hf_treespec.cli import bootstrap
from hf_treespec.cli.bootstrap import Interval, paired_bootstrap, rate_ratio, ratio_of_totals


def test_constant_ratio_has_an_interval_of_no_width() -> None:
    # Seconds that differ a thousandfold, always at the same ratio: only an unpaired bootstrap would see a spread.
    method = [0.5, 1.0, 64.0, 512.0, 2.0]
    assert ratio_of_totals([2 * seconds for seconds in method], method) == Interval(2.0, 2.0, 2.0)


def test_two_prompts_give_their_two_ratios() -> None:
    # The draws are (0, 2), (1, 1), (2, 0) with odds 1:2:1, so both outer quantiles are the single prompts.
    assert ratio_of_totals([1.0, 4.0], [1.0, 1.0]) == Interval(2.5, 1.0, 4.0)


def test_value_is_the_ratio_of_totals_not_the_mean_of_ratios() -> None:
    assert ratio_of_totals([10.0, 1.0], [5.0, 10.0]).value == pytest.approx(11 / 15)


def test_interval_of_many_prompts_holds_the_value_and_narrows() -> None:
    few = ratio_of_totals([1.0, 3.0] * 5, [1.0] * 10)
    many = ratio_of_totals([1.0, 3.0] * 500, [1.0] * 1000)
    for interval in (few, many):
        assert interval.value == 2.0
        assert interval.low is not None and interval.high is not None
        assert interval.low < 2.0 < interval.high
    # The standard error of a mean of n values that are 1 or 3 is 1 / sqrt(n).
    assert many.low == pytest.approx(2.0 - 1.96 / 1000**0.5, abs=0.005)
    assert many.high == pytest.approx(2.0 + 1.96 / 1000**0.5, abs=0.005)


def test_one_prompt_has_no_interval() -> None:
    assert ratio_of_totals([3.0], [2.0]) == Interval(1.5, None, None)


@pytest.mark.parametrize("columns", [([], []), ([1.0], [1.0, 2.0])])
def test_nothing_or_unpaired_figures_are_refused(columns: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError):
        ratio_of_totals(*columns)


def test_rate_ratio_counts_tokens() -> None:
    # Half the seconds for half the tokens is no gain.
    assert rate_ratio([2.0, 4.0], [10, 20], [1.0, 2.0], [5, 10]) == Interval(1.0, 1.0, 1.0)
    assert rate_ratio([2.0], [10], [1.0], [10]).value == 2.0
    assert rate_ratio([2.0], [10], [2.0], [30]).value == 3.0


def test_same_seed_same_interval_and_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    # Figures whose sums are all different, so that a quantile moves with every draw.
    baseline, method = [1.31**n for n in range(12)], [1.17**n for n in range(12)]
    first = ratio_of_totals(baseline, method, seed=3)
    assert ratio_of_totals(baseline, method, seed=3) == first
    assert ratio_of_totals(baseline, method, seed=4) != first
    monkeypatch.setattr(bootstrap, "_CHUNK", 7)
    assert ratio_of_totals(baseline, method, seed=3) == first


def test_number_of_resamples() -> None:
    drawn: list[int] = []

    def statistic(totals: bootstrap.Floats) -> bootstrap.Floats:
        drawn.append(totals[..., 0].size)
        return totals[..., 0]

    paired_bootstrap(([1.0, 2.0],), statistic)
    # The first call is the value itself.
    assert drawn[0] == 1 and sum(drawn[1:]) == 10_000
