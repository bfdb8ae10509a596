"""Cost curves: averages, interpolation, what is remembered, and for whom."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import pytest

from hf_treespec.control.acceptance import Acceptance
from hf_treespec.control.costs import CostCurve, CostKey, Costs, RoundCosts, costs_of, forget_texts, rung, size_ladder

KEY = CostKey(1, "float32", "cpu", "sdpa", "mask", 1, "ngram")


def test_the_ladder_has_fine_steps_first_and_ends_with_the_size_itself() -> None:
    assert size_ladder(0) == (0,)
    assert size_ladder(1) == (0, 1)
    assert size_ladder(16) == (*range(9), 11, 12, 15, 16)
    assert size_ladder(21) == (*range(9), 11, 12, 15, 16, 21)
    assert size_ladder(64)[-8:] == (23, 24, 31, 32, 47, 48, 63, 64)


def test_a_size_counts_as_the_next_rung() -> None:
    ladder = size_ladder(4096)
    for size in range(1, 300):
        assert rung(size) == next(one for one in ladder if one >= size)


def test_costs_are_averages_interpolated_between_sizes() -> None:
    sizes = [0, 1, 2, 4, 8]
    costs = CostCurve()
    assert not costs
    prior = costs.seconds(sizes)
    assert prior[0] == 1.0 and prior == sorted(prior) and prior[-1] < 1.5
    for seconds in (9.0, 2.0):  # the warm-up does not count
        costs.add(0, seconds)
    assert costs and costs.is_known(0) and not costs.is_known(8)
    assert costs.seconds(sizes) == pytest.approx([2.0 * base for base in prior])
    for seconds in (6.0, 6.0, 50.0):
        costs.add(8, seconds)
    known = costs.seconds(sizes)
    # A pause of the machine counts as twice the average at most.
    assert known[0] == 2.0 and known[-1] == pytest.approx(6.0 + 0.25 * 6.0)
    ratio = [seconds / base for seconds, base in zip(known, prior, strict=True)]
    assert ratio[2] == pytest.approx(ratio[0] + (ratio[-1] - ratio[0]) * 2 / 8)
    for _ in range(30):
        costs.add(8, 3.0)
    assert costs.seconds([8])[0] == pytest.approx(3.0, rel=1e-3) and costs.timings(8) == 33


def test_no_size_takes_less_than_a_smaller_one() -> None:
    costs = CostCurve()
    for size, seconds in ((0, 1.0), (0, 1.0), (8, 3.0), (8, 3.0), (4, 1.1)):
        costs.add(size, seconds)
    # 4 was timed once only, which may have been a warm-up.
    assert costs.at_least([0, 1, 4, 8, 16]) == pytest.approx([1.0, 1.0, 1.0, 3.0, 3.0])
    costs.add(4, 1.1)
    assert costs.at_least([4, 5, 8]) == pytest.approx([1.1, 1.1, 3.0])


def test_a_renewed_curve_keeps_its_form_and_follows_what_is_timed_next() -> None:
    costs = CostCurve()
    for size, seconds in ((0, 1.0), (4, 1.2), (5, 2.0), (8, 2.2)):
        for _ in range(3):
            costs.add(size, seconds)
    before = costs.seconds(range(9))
    costs.renew()
    assert costs.seconds(range(9)) == pytest.approx(before) and costs.timings(0) == 0 and costs.is_known(4)
    # The machine is half as fast now.
    for _ in range(2):
        costs.add(0, 2.0)
        costs.add(8, 4.4)
    assert costs.seconds(range(9)) == pytest.approx([2 * seconds for seconds in before])


def test_everything_is_timed_anew_after_a_while() -> None:
    costs = RoundCosts()
    assert costs.due == 4
    for _ in range(4):
        costs.target.add(0, 1.0)
        costs.count()
    assert costs.due == 0
    for _ in range(252):
        costs.count()
    assert costs.due == 4 and costs.target.timings(0) == 0 and costs.target.seconds([0]) == [1.0]


def test_levels_cost_in_proportion_until_they_are_timed() -> None:
    costs = RoundCosts().drafting
    costs.add(2, 0.6)
    costs.add(2, 0.6)
    assert costs.seconds([1, 2, 8]) == pytest.approx([0.3, 0.6, 2.4])
    assert costs.at_least([1, 2, 8]) == pytest.approx([0.3, 0.6, 0.6])


def test_what_is_known_of_one_length_is_where_another_begins() -> None:
    costs = Costs()
    assert costs.at(5) is costs.at(127) and costs.at(127) is not costs.at(128)
    for size, seconds in ((0, 1.0), (0, 1.0), (8, 3.0), (8, 3.0)):
        costs.at(5).target.add(size, seconds)
    longer = costs.at(2000)
    assert longer.target.seconds([0, 8]) == pytest.approx([1.0, 3.0]) and longer.due == 0
    longer.target.add(0, 2.0)
    longer.target.add(0, 2.0)
    assert costs.at(5).target.seconds([0]) == [1.0]
    # The nearest counts.
    assert costs.at(5000).target.seconds([0]) == [2.0]
    assert all(above >= below for below, above in pairwise(longer.target.seconds(range(9))))


class Model:
    """Something that has a life."""


def test_costs_live_as_long_as_the_model_and_only_for_its_key() -> None:
    model, other = Model(), Model()
    mine = costs_of(model, KEY)
    assert costs_of(model, KEY) is mine and costs_of(other, KEY) is not mine
    assert all(costs_of(model, KEY._replace(**{name: "x"})) is not mine for name in KEY._fields)
    # What texts had to do with goes with `disable`, what the machine takes does not.
    mine.acceptance = Acceptance(2, 2)
    forget_texts(lambda one: one is other)
    assert mine.acceptance is not None
    forget_texts(lambda one: one is not other)
    assert mine.acceptance is None and costs_of(model, KEY) is mine
    begun = Costs()
    assert costs_of(other, KEY._replace(batch=2), lambda key: begun) is begun
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_rounds_and_drafts_are_borrowed_each_from_the_nearest_length_that_has_them() -> None:
    costs = Costs()
    costs.assume(128, target={0: 1.0, 64: 2.0}, drafting={})
    costs.assume(1024, target={0: 4.0, 64: 8.0}, drafting={})
    costs.assume(300, target={}, drafting={1: 0.1, 4: 0.4})
    for context, plain in ((100, 1.0), (200, 1.0), (600, 4.0), (1500, 4.0), (300, 1.0)):
        found = costs.at(context)
        assert found.target.seconds([0]) == [plain] and found.due == 0, context
        assert found.drafting.known() == {1: 0.1, 4: 0.4}, context


def test_curves_that_were_measured_meanwhile_replace_what_rounds_took() -> None:
    costs = Costs()
    for _ in range(3):
        costs.at(5).target.add(0, 9.0)
        costs.at(5).drafting.add(1, 0.7)
    running = costs.at(2000)
    costs.take([(128, {0: 1.0, 8: 3.0}, {})])
    for context in (5, 200, 2000):
        assert costs.at(context).target.known() == {0: 1.0, 8: 3.0}
        assert costs.at(context).drafting.known() == {1: 0.7}
    assert costs.at(2000) is running
    costs.take([])
    assert costs.at(5).target.known() == {0: 1.0, 8: 3.0}
