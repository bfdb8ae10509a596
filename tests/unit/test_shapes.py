"""Static shapes against Sequoia's dynamic programme (Chen et al. 2024)."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_treespec.tree import TokenTree, TreeLimits, best_first_shape, rank_acceptance

Table = tuple[tuple[float, ...], ...]


def best_expected_length(table: Table, nodes: int, depth: int) -> float:
    """Expected accepted nodes of the best tree of at most `nodes` nodes below the root and depth `depth`."""

    @cache
    def with_root(n: int, d: int) -> float:  # c(n, d): n nodes, the root of the subtree included, d levels below it
        return 1.0 + (below(n - 1, 0, d) if d else 0.0)

    @cache
    def below(n: int, rank: int, d: int) -> float:  # g(n, j, d): n nodes in the subtrees of ranks j and up
        acceptance = table[min(depth - d, len(table) - 1)]
        if n == 0 or rank == len(acceptance):
            return 0.0
        share = [
            (acceptance[rank] * with_root(m, d - 1) if m else 0.0) + below(n - m, rank + 1, d) for m in range(n + 1)
        ]
        return max(share)

    return with_root(nodes + 1, depth) - 1.0


def expected_length(shape: TokenTree, table: Table) -> float:
    reach = [1.0]
    for node in range(1, len(shape)):
        row = table[min(shape.depths[node] - 1, len(table) - 1)]
        reach.append(reach[shape.parents[node]] * row[shape.tokens[node]])
    return math.fsum(reach[1:])


def check(acceptance: tuple[float, ...], nodes: int, depth: int) -> None:
    limits = TreeLimits(max_nodes=nodes, max_depth=depth, max_children=len(acceptance))
    shape = best_first_shape(limits, acceptance)
    assert expected_length(shape, (acceptance,)) == pytest.approx(
        best_expected_length((acceptance,), nodes, depth), rel=0, abs=1e-12
    )
    assert shape.drafted <= nodes and shape.max_depth <= depth


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 5, 24])
@pytest.mark.parametrize("children", [1, 2, 4])
def test_default_acceptance_reaches_the_optimum_at_every_budget(children: int, depth: int) -> None:
    for nodes in range(25):
        check(rank_acceptance(children), nodes, depth)


FALLING = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5).map(lambda p: tuple(sorted(p, reverse=True)))


@settings(max_examples=60, deadline=None)
@given(FALLING, st.integers(0, 20), st.integers(0, 6))
def test_any_falling_acceptance_reaches_the_optimum(acceptance: tuple[float, ...], nodes: int, depth: int) -> None:
    check(acceptance, nodes, depth)


@settings(max_examples=100, deadline=None)
@given(st.lists(FALLING, min_size=1, max_size=4), st.integers(0, 16), st.integers(0, 5))
def test_acceptance_that_was_measured_depth_by_depth_reaches_the_optimum_too(
    rows: list[tuple[float, ...]], nodes: int, depth: int
) -> None:
    """Whether it falls or rises with the depth, and with another number of ranks at each."""
    limits = TreeLimits(max_nodes=nodes, max_depth=depth, max_children=5, ranks=tuple(rows))
    shape = best_first_shape(limits)
    best = best_expected_length(tuple(rows), nodes, depth)
    assert expected_length(shape, tuple(rows)) == pytest.approx(best, rel=0, abs=1e-12)
    assert shape.drafted <= nodes and shape.max_depth <= depth


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(0, 4), st.integers(1, 3))
def test_the_budget_is_used_up_and_ranks_have_no_holes(nodes: int, depth: int, children: int) -> None:
    shape = best_first_shape(TreeLimits(max_nodes=nodes, max_depth=depth, max_children=children))
    assert shape.drafted == min(nodes, sum(children**d for d in range(1, depth + 1)))
    for node in range(len(shape)):
        assert [shape.tokens[child] for child in shape.children(node)] == list(range(len(shape.children(node))))


def test_acceptance_beyond_max_children_is_not_used() -> None:
    limits = TreeLimits(max_nodes=6, max_depth=3, max_children=2)
    assert best_first_shape(limits, (0.5, 0.4, 0.39, 0.38)) == best_first_shape(limits, (0.5, 0.4))


def test_the_prior_is_geometric_in_the_rank() -> None:
    prior = rank_acceptance(5, first=0.5, ratio=0.25)
    assert prior[0] == 0.5 and all(b / a == pytest.approx(0.25) for a, b in pairwise(prior)) and len(prior) == 5
    assert sum(rank_acceptance(512)) < 1.0
