"""Token trees and their builder against walks over the parent array."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_treespec import TreeConfigError
from hf_treespec.tree import TokenTree, TreeBuilder, TreeLimits

SEEDS = st.integers(0, 2**32)
# Ties, a clamped positive confidence and zeros are where an order shows.
CONFIDENCES = (-2.0, -1.0, -1.0, -0.5, 0.0, 0.25)


def random_arrays(seed: int, nodes: int) -> tuple[list[int], list[int]]:
    """Tokens and parents; siblings differ, nodes of different parents share tokens."""
    rng = random.Random(seed)
    parents = [-1] + [rng.randrange(max(0, node - rng.choice((1, 3, 200))), node) for node in range(1, nodes)]
    tokens = [7] + [parents[node] % 3 + parents[:node].count(parents[node]) for node in range(1, nodes)]
    return tokens, parents


def path_of(parents: list[int], node: int) -> list[int]:
    return path_of(parents, parents[node]) + [node] if node >= 0 else []


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 150))
def test_every_question_is_answered_as_by_walking_the_parents(seed: int, nodes: int) -> None:
    tokens, parents = random_arrays(seed, nodes)
    tree = TokenTree(tuple(tokens), tuple(parents))
    assert (len(tree), tree.drafted) == (nodes, nodes - 1)
    assert tree.max_depth == max(len(path_of(parents, node)) for node in range(nodes)) - 1
    for node in range(nodes):
        path = path_of(parents, node)
        below = [child for child in range(nodes) if parents[child] == node]
        assert tree.depths[node] == len(path) - 1
        assert tree.path_tokens(node) == [tokens[step] for step in path]
        assert list(tree.children(node)) == below
        for token in {*tokens, 12345}:
            assert tree.child(node, token) == next((child for child in below if tokens[child] == token), None)


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ((), (), "length >= 1"),
        ((1, 2), (-1,), "two arrays of one length"),
        ((1, 2), (0, 0), r"parents\[0\] == -1"),
        ((1, 2), (-1, 1), r"parents\[1\]=1 must lie in \[0, 1\)"),
        ((1, 2, 3), (-1, 2, 0), r"parents\[1\]=2 must lie in \[0, 1\)"),
        ((1, 2), (-1, -1), r"parents\[1\]=-1 must lie"),
        ((1, 5, 6, 5), (-1, 0, 0, 0), "node 3: token 5 is already a child of node 0"),
    ],
)
def test_arrays_that_are_no_tree_are_refused(tokens: tuple[int, ...], parents: tuple[int, ...], message: str) -> None:
    with pytest.raises(TreeConfigError, match=message):
        TokenTree(tokens, parents)


def test_chain_and_root_only() -> None:
    chain = TokenTree.chain([4, 4, 9])
    assert (chain.tokens, chain.parents, chain.depths) == ((4, 4, 9), (-1, 0, 1), (0, 1, 2))
    assert TokenTree.root_only(4) == TokenTree.chain([4]) == TokenTree((4,), (-1,))


def test_trees_are_values() -> None:
    one, same, other = (TokenTree((1, 2, 3, 4), (-1, 0, 0, last)) for last in (1, 1, 2))
    assert one == same and hash(one) == hash(same) and one != other
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.tokens = (5,)  # type: ignore[misc]


def random_builder(seed: int, nodes: int) -> tuple[TreeBuilder, list[float]]:
    """A builder and the confidence that each node was added with."""
    rng = random.Random(seed)
    builder, given_with = TreeBuilder(3), [0.0]
    for node in range(1, nodes):
        given_with.append(rng.choice(CONFIDENCES))
        assert builder.add(rng.randrange(node), 1000 + node, given_with[-1]) == node
    return builder, given_with


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 60))
def test_a_score_is_the_sum_along_the_path_and_never_grows(seed: int, nodes: int) -> None:
    builder, given_with = random_builder(seed, nodes)
    for node in range(1, nodes):
        path = path_of(builder.parents, node)
        assert builder.scores[node] == pytest.approx(sum(min(given_with[step], 0.0) for step in path), abs=1e-12)
        assert builder.scores[node] <= builder.scores[builder.parents[node]]
        assert builder.depths[node] == len(path) - 1
        assert builder.children[builder.parents[node]].count(node) == 1
    assert sum(map(len, builder.children)) == len(builder) - 1 == nodes - 1


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 40), st.integers(0, 45))
def test_best_takes_the_best_one_by_one_and_freezes_to_a_tree(seed: int, nodes: int, count: int) -> None:
    builder, _ = random_builder(seed, nodes)
    left, taken = list(range(1, nodes)), []
    while left and len(taken) < count:
        best = left[0]
        for node in left[1:]:
            better = builder.scores[node] > builder.scores[best]
            tie = builder.scores[node] == builder.scores[best] and builder.depths[node] < builder.depths[best]
            if better or tie:
                best = node
        left.remove(best)
        taken.append(best)
    found = builder.best(count)
    assert found == sorted(taken)

    tree, kept = builder.freeze(found)
    assert kept == [0, *found]
    for place, node in enumerate(kept):
        assert tree.path_tokens(place) == [builder.tokens[step] for step in path_of(builder.parents, node)]
    whole, everything = builder.freeze()
    assert everything == list(range(nodes))
    assert (list(whole.tokens), list(whole.parents)) == (builder.tokens, builder.parents)


def test_freeze_takes_nodes_in_any_order() -> None:
    builder = TreeBuilder(1)
    for parent, token in ((0, 5), (0, 6), (2, 7)):
        builder.add(parent, token, -1.0)
    assert builder.freeze([3, 2]) == (TokenTree((1, 6, 7), (-1, 0, 1)), [0, 2, 3])


@pytest.mark.parametrize(("name", "low"), [("max_nodes", 0), ("max_depth", 0), ("max_children", 1)])
def test_limits_have_a_floor(name: str, low: int) -> None:
    fields = {"max_nodes": 4, "max_depth": 4, "max_children": 4}
    assert getattr(TreeLimits(**{**fields, name: low}), name) == low
    with pytest.raises(TreeConfigError, match=f"{name}={low - 1} must be at least {low}"):
        TreeLimits(**{**fields, name: low - 1})


CAPS = st.none() | st.integers(-3, 12)


@given(st.integers(0, 9), st.integers(0, 9), CAPS, CAPS)
def test_capping_only_lowers(nodes: int, depth: int, node_cap: int | None, depth_cap: int | None) -> None:
    capped = TreeLimits(max_nodes=nodes, max_depth=depth, max_children=3).capped(
        max_nodes=node_cap, max_depth=depth_cap
    )
    # Of all sizes that respect both limits, the largest; without depth there can be no node.
    depths = [d for d in range(10) if d <= depth and (depth_cap is None or d <= max(depth_cap, 0))]
    sizes = [n for n in range(10) if n <= nodes and (node_cap is None or n <= max(node_cap, 0))]
    wanted = max(sizes) if max(depths) else 0
    assert capped == TreeLimits(max_nodes=wanted, max_depth=max(depths), max_children=3)


def test_the_best_nodes_of_a_tree_form_a_tree() -> None:
    scores = (0.0, -2.0, -0.5, -0.7, -2.0, -0.5)
    tree = TokenTree((9, 1, 2, 3, 4, 5), (-1, 0, 0, 2, 1, 2), scores)
    # Equal scores: the shallower node first, then the earlier.
    assert tree.by_rank() == [2, 5, 3, 1, 4]
    assert tree.best(0) == TokenTree.root_only(9) and tree.best(5) is tree and tree.best(9) is tree
    cut = tree.best(3)
    assert cut == TokenTree((9, 2, 3, 5), (-1, 0, 1, 1)) and cut.scores == (0.0, -0.5, -0.7, -0.5)
    assert cut.best(1) == TokenTree((9, 2), (-1, 0))


def test_without_scores_nodes_rank_as_they_come() -> None:
    tree = TokenTree((9, 1, 2, 3), (-1, 0, 1, 0))
    assert tree.by_rank() == [1, 2, 3] and tree.best(2) == TokenTree((9, 1, 2), (-1, 0, 1))
    assert tree.best(2).scores is None


def test_a_frozen_tree_has_the_scores_of_its_builder() -> None:
    builder = TreeBuilder(9)
    builder.add(0, 1, -0.3)
    builder.add(0, 2, -0.2)
    builder.add(1, 3, -0.4)
    tree, _ = builder.freeze([1, 3])
    assert tree.tokens == (9, 1, 3) and tree.scores == pytest.approx((0.0, -0.3, -0.7))
    assert builder.freeze(builder.best(2))[0] == builder.freeze()[0].best(2)


def test_other_scores_make_another_order_of_the_same_tree() -> None:
    tree = TokenTree((9, 1, 2, 3), (-1, 0, 0, 1), (0.0, -0.1, -0.5, -0.2))
    told = tree.with_scores([0.0, -0.7, -0.3, -0.7])
    assert told == tree and told.scores == (0.0, -0.7, -0.3, -0.7) and tree.scores == (0.0, -0.1, -0.5, -0.2)
    # Of equals the shallower comes first.
    assert tree.by_rank() == [1, 3, 2] and told.by_rank() == [2, 1, 3]
    assert told.best(2) == TokenTree((9, 1, 2), (-1, 0, 0)) and told.child(1, 3) == 3
