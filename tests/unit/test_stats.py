"""`TreeStats`: counting row rounds, and the figures derived from the counts."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_treespec import TreeStats


@given(st.integers(0, 2**32), st.integers(0, 20))
def test_counts_are_those_of_the_recorded_rows(seed: int, rows: int) -> None:
    rng = random.Random(seed)
    stats = TreeStats(new_tokens=2)
    paths, depths, drafted, emitted = [], [], [], []
    for _ in range(rows):
        deepest = rng.randrange(6)
        depths.append(set(range(1, deepest + 1)))
        paths.append(rng.randrange(deepest + 1))
        drafted.append(deepest + rng.randrange(5))
        emitted.append(paths[-1] + 1)
        stats.record_row(path=paths[-1], drafted_depths=depths[-1], drafted=drafted[-1], emitted=emitted[-1])
    deepest = max((max(levels, default=0) for levels in depths), default=0)
    levels = range(1, deepest + 1)
    assert stats.row_rounds == rows
    assert stats.round_tokens == sum(emitted) and stats.new_tokens == 2 + sum(emitted)
    assert stats.drafted_nodes == sum(drafted)
    assert stats.accepted_by_depth == [sum(path >= level for path in paths) for level in levels]
    assert stats.drafted_by_depth == [sum(level in found for found in depths) for level in levels]
    assert stats.accepted_tokens == sum(paths)
    if rows:
        assert stats.tokens_per_round == pytest.approx(sum(emitted) / rows)
    if sum(drafted):
        assert stats.acceptance_rate == pytest.approx(sum(paths) / sum(drafted))


def test_seconds_are_split_into_forwards_and_the_rest() -> None:
    stats = TreeStats(
        new_tokens=30, prefill_seconds=2.0, total_seconds=12.0, target_seconds=4.0, draft_forward_seconds=3.0,
        draft_seconds=3.5, verify_seconds=1.0, commit_seconds=0.5,
    )  # fmt: skip
    assert stats.round_seconds == 10.0
    assert stats.overhead_fraction == pytest.approx(0.3)
    assert stats.tokens_per_second == pytest.approx(2.5)


def test_a_call_that_did_nothing_has_no_rates() -> None:
    stats = TreeStats()
    rates = stats.tokens_per_round, stats.acceptance_rate, stats.overhead_fraction, stats.tokens_per_second
    assert rates == (0.0, 0.0, 0.0, 0.0)
    assert TreeStats(prefill_seconds=1.0, total_seconds=1.0).overhead_fraction == 0.0


def test_two_calls_do_not_share_their_lists() -> None:
    one, other = TreeStats(), TreeStats()
    one.record_row(path=1, drafted_depths={1}, drafted=1, emitted=2)
    assert other.accepted_by_depth == [] and other.drafted_by_depth == []


def test_to_dict_is_json_with_the_derived_figures() -> None:
    stats = TreeStats(draft="ngram", batch_size=2, prefill_seconds=1.0, total_seconds=3.0)
    stats.record_row(path=1, drafted_depths={1, 2}, drafted=3, emitted=2)
    data = stats.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["drafted_by_depth"] == [1, 1] and data["draft"] == "ngram"
    for name in ("tokens_per_round", "acceptance_rate", "overhead_fraction", "tokens_per_second"):
        assert data[name] == getattr(stats, name) > 0
    # A snapshot, not a view.
    data["accepted_by_depth"].append(9)
    assert stats.accepted_by_depth == [1, 0]
