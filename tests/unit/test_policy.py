"""The size policy on made-up round times, and the running estimates under it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_treespec.control import RoundEstimates, RunningMean, SizePolicy
from hf_treespec.tree import TreeLimits

LIMITS = TreeLimits(max_nodes=12, max_depth=5, max_children=3)


def play(
    policy: SizePolicy, rounds: int, *, tree_seconds: float, tokens: float, plain_seconds: float = 1.0
) -> list[bool]:
    """Let the policy decide `rounds` rounds; whether each had a tree."""
    drafted = []
    for _ in range(rounds):
        limits = policy.limits()
        assert limits in (LIMITS, TreeLimits(max_nodes=0, max_depth=5, max_children=3))
        assert (limits.max_nodes == 0) == policy.paused
        drafted.append(limits.max_nodes > 0)
        seconds, gained = (tree_seconds, tokens) if drafted[-1] else (plain_seconds, 1.0)
        policy.observe(drafted=drafted[-1], seconds=seconds, tokens=gained)
    return drafted


def runs(drafted: list[bool], kind: bool) -> list[int]:
    """Lengths of the stretches of one kind."""
    out = [0]
    for flag in drafted:
        if flag == kind:
            out[-1] += 1
        elif out[-1]:
            out.append(0)
    return [n for n in out if n]


def test_losing_trees_are_paused_probed_and_paused_for_twice_as_long() -> None:
    drafted = play(SizePolicy(LIMITS, fallback="auto"), 3000, tree_seconds=3.0, tokens=1.2)
    pauses, probes = runs(drafted, False), runs(drafted, True)
    assert drafted[0]
    # A short first stretch of plain rounds may only be there to time them.
    pauses = pauses[1:] if pauses[0] < pauses[1] / 2 else pauses
    grown = pauses[: pauses.index(max(pauses)) + 1]
    assert len(grown) >= 3 and all(b == 2 * a for a, b in zip(grown[:-1], grown[1:], strict=True))
    assert set(pauses[len(grown) : -1]) == {max(pauses)}  # it doubles up to a limit and keeps probing
    assert len(set(probes[2:-1])) == 1 and probes[2] < grown[0]
    # The price of finding out: hardly any trees in the long run.
    assert sum(drafted[1500:]) < 0.1 * 1500


@pytest.mark.parametrize(("tree_seconds", "tokens"), [(1.5, 2.0), (1.0, 1.01), (3.0, 5.0)])
def test_winning_trees_are_never_paused_but_to_time_plain_rounds(tree_seconds: float, tokens: float) -> None:
    drafted = play(SizePolicy(LIMITS, fallback="auto"), 500, tree_seconds=tree_seconds, tokens=tokens)
    assert sum(not flag for flag in drafted) <= 4
    assert all(drafted[50:])


def test_clearly_good_trees_do_not_even_cost_the_timing() -> None:
    assert all(play(SizePolicy(LIMITS, fallback="auto"), 200, tree_seconds=1.4, tokens=4.0))


def test_without_fallback_losing_trees_go_on() -> None:
    assert all(play(SizePolicy(LIMITS, fallback="off"), 400, tree_seconds=50.0, tokens=1.0))


def test_trees_that_begin_to_pay_are_taken_up_again() -> None:
    policy = SizePolicy(LIMITS, fallback="auto")
    play(policy, 100, tree_seconds=3.0, tokens=1.2)
    assert policy.paused
    drafted = play(policy, 600, tree_seconds=1.2, tokens=3.5)
    assert all(drafted[-300:])
    # Having paid once, the next pause is short again.
    later = runs(play(policy, 400, tree_seconds=4.0, tokens=1.0), False)
    assert later[0] == min(later[:2]) and later[1] == 2 * later[0]
    assert later[0] == runs(play(SizePolicy(LIMITS, fallback="auto"), 300, tree_seconds=4.0, tokens=1.0), False)[1]


@pytest.mark.parametrize("plain_before", [0, 1, 100])
def test_a_judgement_rests_on_several_trees(plain_before: int) -> None:
    """An n-gram draft may have nothing to say for a while; those rounds only time plain decoding."""
    policy = SizePolicy(LIMITS, fallback="auto")
    for _ in range(plain_before):
        policy.observe(drafted=False, seconds=1.0, tokens=1.0)
        assert not policy.paused
    assert policy.estimates.tree_seconds.count == 0
    trees = play(policy, 40, tree_seconds=9.0, tokens=1.0).index(False)
    assert trees == play(SizePolicy(LIMITS, fallback="auto"), 40, tree_seconds=9.0, tokens=1.0).index(False) >= 4


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 120))
def test_a_decision_rests_on_earlier_rounds_only(seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    one, other = (SizePolicy(LIMITS, fallback="auto") for _ in range(2))
    for _ in range(rounds):
        decision = one.limits()
        # Asking costs nothing and changes nothing.
        assert all(other.limits() == decision and other.paused == (decision != LIMITS) for _ in range(3))
        drafted = decision.max_nodes > 0 and rng.random() < 0.9
        seen = {"drafted": drafted, "seconds": rng.uniform(0.5, 3.0), "tokens": rng.uniform(1.0, 3.0)}
        one.observe(**seen)
        other.observe(**seen)


def test_running_mean_is_plain_first_and_forgets_later() -> None:
    mean, samples = RunningMean(decay=0.9), [float(n * n % 17) for n in range(30)]
    wanted = 0.0
    for count, sample in enumerate(samples, 1):
        mean.add(sample)
        wanted = sum(samples[:count]) / count if count <= 10 else 0.9 * wanted + 0.1 * sample
        assert mean.value == pytest.approx(wanted) and mean.count == count


def test_gain_compares_tokens_per_second() -> None:
    estimates = RoundEstimates()
    assert estimates.gain is None
    estimates.observe(drafted=True, seconds=2.0, tokens=3.0)
    assert estimates.gain is None
    estimates.observe(drafted=False, seconds=0.5, tokens=1.0)
    assert estimates.gain == pytest.approx((3.0 / 2.0) / (1.0 / 0.5))
    estimates.observe(drafted=False, seconds=1.5, tokens=1.0)
    assert estimates.gain == pytest.approx((3.0 / 2.0) / 1.0)
    only_plain = RoundEstimates()
    only_plain.observe(drafted=False, seconds=1.0, tokens=1.0)
    assert only_plain.gain is None
