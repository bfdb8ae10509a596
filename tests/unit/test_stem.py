"""When a stem pays, what it gives, and what its transaction refuses."""

from __future__ import annotations

import pytest
import torch

from hf_treespec import TreeSpecError
from hf_treespec.cache import OrderBoundRows, Read
from hf_treespec.engine.paths import plan_paths
from hf_treespec.engine.stem import StemChoice
from hf_treespec.tree import TokenTree


def timed(fixed: float, slope: float) -> StemChoice:
    """After forwards that took `fixed + slope * tokens` seconds."""
    choice = StemChoice()
    for tokens in (4, 9, 30, 12):
        choice.add(tokens, fixed + slope * tokens)
    return choice


def test_a_stem_pays_when_the_tokens_it_saves_take_longer_than_a_forward() -> None:
    choice = timed(1.0, 0.1)
    # All paths but one of each row are spared the root.
    assert [choice.pays(paths=paths, rows=1) for paths in (10, 12)] == [False, True]
    assert [choice.pays(paths=paths, rows=4) for paths in (13, 15)] == [False, True]
    # And the pending tokens, which would be read by the next round again.
    assert [choice.pays(paths=4, rows=1, pending=pending) for pending in (1, 2)] == [False, True]
    assert [choice.pays(paths=1, rows=1, pending=pending) for pending in (9, 11)] == [False, True]


def test_a_state_is_never_far_behind() -> None:
    choice = timed(1.0, 0.0)
    assert [choice.pays(paths=8, rows=2, pending=pending) for pending in (15, 16)] == [False, True]


def test_without_forwards_of_several_sizes_nothing_is_known() -> None:
    choice = StemChoice()
    assert not choice.pays(paths=1000, rows=1)
    for _ in range(5):
        choice.add(7, 1.0)
    assert not choice.pays(paths=1000, rows=1)


def test_the_latest_forwards_count() -> None:
    choice = StemChoice()
    for fixed, slope in ((1.0, 0.0), (0.0, 0.1)):
        for _ in range(40):
            for tokens in (4, 20):
                choice.add(tokens, fixed + slope * tokens)
    assert choice.pays(paths=3, rows=1)


@pytest.mark.parametrize("forced", [True, False])
def test_an_answer_may_be_forced(forced: bool) -> None:
    choice = timed(1.0, 0.1)
    choice.forced = forced
    assert choice.pays(paths=12, rows=1) is choice.pays(paths=1, rows=1, pending=20) is forced


def test_logits_of_roots_that_were_read_before() -> None:
    #     7 -> 1 -> 2        5
    #       -> 3
    plan = plan_paths([TokenTree((7, 1, 3, 2), (-1, 0, 0, 1)), TokenTree.root_only(5)])
    logits = torch.arange(6.0).reshape(3, 2, 1)
    roots = torch.tensor([[-1.0], [-2.0]])
    assert plan.logits_of_nodes(logits, roots)[..., 0].tolist() == [[-1.0, 2.0, 0.0, 3.0], [-2.0] * 4]


def rows_of(total: torch.Tensor, *, protected: bool) -> OrderBoundRows:
    return OrderBoundRows({"state": {"total": total}}, [], [5] * len(total), protected=protected)


READ = Read([(7, 1, 3)], [[0, 0, 1]], [0, 0], 2)


@pytest.mark.parametrize("protected", [False, True])
def test_a_state_stays_behind_its_root_until_all_of_a_path_is_accepted(protected: bool) -> None:
    total = torch.tensor([1.0])
    rows = rows_of(total, protected=protected)
    state = rows.carried["state"]
    rows.pending = [[4]]
    rows.lengths = [6]
    with rows.transaction() as transaction:
        with transaction.reading_stem():
            state["total"].add_(10.0)
        assert (rows.pending, rows.lengths, rows.ahead) == ([[]], [7], 0)
        transaction.spread(READ)
        state["total"].add_(torch.tensor([100.0, 200.0]))
        transaction.commit([[0]])
    assert (state["total"].tolist(), rows.pending, rows.lengths) == ([11.0], [[]], [7])
    with rows.transaction() as transaction:
        with transaction.reading_stem():
            state["total"].add_(10.0)
        transaction.spread(READ)
        state["total"].add_(torch.tensor([100.0, 200.0]))
        transaction.commit([[0, 2]])
    assert (state["total"].tolist(), rows.pending, rows.lengths) == ([221.0], [[]], [9])
    # A path that is accepted but for its end: all behind the root is pending.
    with rows.transaction() as transaction:
        with transaction.reading_stem():
            state["total"].add_(10.0)
        transaction.spread(Read([(7, 1, 3, 2)], [[0, 0, 1, 0]], [0, 0], 3))
        state["total"].add_(torch.tensor([100.0, 200.0]))
        transaction.commit([[0, 1]])
    assert (state["total"].tolist(), rows.pending, rows.lengths) == ([231.0], [[1]], [11])
    # Of a state that outlives the call nothing was written in place.
    assert total.tolist() == ([1.0] if protected else [21.0])


def test_a_protected_state_comes_back_as_before_the_round() -> None:
    for place in ("stem", "between", "paths"):
        rows = rows_of(torch.tensor([1.0]), protected=True)
        state = rows.carried["state"]
        rows.pending, rows.lengths = [[4, 9]], [7]
        with pytest.raises(KeyboardInterrupt), rows.transaction() as transaction:
            with transaction.reading_stem():
                state["total"].add_(10.0)
                if place == "stem":
                    raise KeyboardInterrupt
            if place == "paths":
                transaction.spread(READ)
                state["total"].add_(1.0)
            raise KeyboardInterrupt
        assert (state["total"].tolist(), rows.pending, rows.lengths) == ([1.0], [[4, 9]], [7])


def test_roots_are_read_once_and_are_not_rejected() -> None:
    rows = rows_of(torch.tensor([1.0]), protected=False)
    with rows.transaction() as transaction:
        with transaction.reading_stem():
            pass
        with pytest.raises(TreeSpecError, match="reads roots once, before its paths"), transaction.reading_stem():
            pass
        transaction.spread(READ)
        with pytest.raises(TreeSpecError, match="must be accepted"):
            transaction.commit([[]])
