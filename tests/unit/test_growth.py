"""Growth policies against exhaustive expansion of a synthetic, deterministic source."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_treespec import TreeConfigError
from hf_treespec.tree import (
    GROWTH_POLICIES,
    Candidate,
    CountedLevels,
    TokenTree,
    TreeBuilder,
    TreeLimits,
    best_first_shape,
    grow,
)

Path = tuple[int, ...]


class Source:
    """Candidates as a function of seed, row and path; scores from a coarse grid, so that ties are common."""

    def __init__(self, seed: int, limits: Sequence[TreeLimits]) -> None:
        self.seed = seed
        self.limits = limits
        self.depths_asked: list[int] = []
        self.rows_asked: set[int] = set()
        self.builders: Sequence[TreeBuilder] = ()
        self.only_alive = True

    def candidates(self, row: int, path: Path) -> list[Candidate]:
        rng = random.Random(f"{self.seed} {row} {path}")
        count = rng.choice((0, 1, 3, 4, 6, 6))
        tokens = rng.sample(range(50), count)
        confidences = sorted((rng.choice((0.0, -0.5, -1.0, -2.0, -2.5)) for _ in range(count)), reverse=True)
        return [Candidate(token, confidence) for token, confidence in zip(tokens, confidences, strict=True)]

    def __call__(
        self, builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]
    ) -> list[list[list[Candidate]]]:
        self.builders = builders
        (depth,) = {builder.depths[node] for builder, nodes in zip(builders, frontier, strict=True) for node in nodes}
        self.depths_asked.append(depth)
        out = []
        for row, (builder, nodes) in enumerate(zip(builders, frontier, strict=True)):
            assert len(set(nodes)) == len(nodes)
            if nodes:
                self.rows_asked.add(row)
            # Is each node still among the best `max_nodes`, by a count of the nodes that beat it?
            for node in nodes:
                better = [
                    n
                    for n in range(1, len(builder))
                    if (-builder.scores[n], builder.depths[n], n) < (-builder.scores[node], builder.depths[node], node)
                ]
                self.only_alive &= node == 0 or len(better) < self.limits[row].max_nodes
            out.append([self.candidates(row, path_of(builder, node)) for node in nodes])
        return out


def path_of(builder: TreeBuilder, node: int) -> Path:
    return () if node == 0 else (*path_of(builder, builder.parents[node]), builder.tokens[node])


def paths_of(tree: TokenTree) -> set[Path]:
    return {tuple(tree.path_tokens(node)[1:]) for node in range(1, len(tree))}


def expand_levels(source: Source, row: int, limit: TreeLimits, beam: int | None) -> list[tuple[float, Path]]:
    """All nodes in level order, or only those below the `beam` best of each level, with their scores."""
    level: list[tuple[float, Path]] = [(0.0, ())]
    found: list[tuple[float, Path]] = []
    for _ in range(limit.max_depth):
        if beam is not None:
            best = sorted(level, key=lambda entry: -entry[0])[:beam]
            level = [entry for entry in level if entry in best]
        level = [
            (score + cand.log_confidence, (*path, cand.token))
            for score, path in level
            for cand in source.candidates(row, path)[: limit.max_children]
        ]
        found.extend(level)
    return found


def best_of(nodes: list[tuple[float, Path]], count: int) -> set[Path]:
    """Ties go to the shallower node, then to the earlier in level order."""
    order = sorted(range(len(nodes)), key=lambda i: (-nodes[i][0], len(nodes[i][1]), i))
    return {nodes[i][1] for i in order[:count]}


LIMITS = st.lists(
    st.builds(TreeLimits, max_nodes=st.integers(0, 14), max_depth=st.integers(0, 4), max_children=st.integers(1, 4)),
    min_size=1,
    max_size=3,
)
SEEDS = st.integers(0, 2**32)


@settings(max_examples=60, deadline=None)
@given(SEEDS, LIMITS)
def test_best_first_keeps_the_best_of_all_nodes_there_are(seed: int, limits: list[TreeLimits]) -> None:
    source = Source(seed, limits)
    for row, (tree, _) in enumerate(grow([9] * len(limits), source, limits, "best_first")):
        everything = expand_levels(source, row, limits[row], beam=None)
        assert paths_of(tree) == best_of(everything, limits[row].max_nodes)
    assert source.only_alive


@settings(max_examples=60, deadline=None)
@given(SEEDS, LIMITS)
def test_dynamic_expands_a_beam_and_reranks_as_eagle_2_does(seed: int, limits: list[TreeLimits]) -> None:
    source = Source(seed, limits)
    for row, (tree, _) in enumerate(grow([9] * len(limits), source, limits, "dynamic")):
        beam = expand_levels(source, row, limits[row], beam=limits[row].max_children)
        assert paths_of(tree) == best_of(beam, limits[row].max_nodes)
    assert source.only_alive


@settings(max_examples=60, deadline=None)
@given(SEEDS, LIMITS)
def test_static_fills_the_ranks_that_the_source_has(seed: int, limits: list[TreeLimits]) -> None:
    source = Source(seed, limits)
    for row, (tree, _) in enumerate(grow([9] * len(limits), source, limits, "static")):
        shape = best_first_shape(limits[row])
        paths: dict[int, Path] = {0: ()}
        for node in range(1, len(shape)):
            if shape.parents[node] in paths:
                above = paths[shape.parents[node]]
                candidates = source.candidates(row, above)
                if shape.tokens[node] < len(candidates):
                    paths[node] = (*above, candidates[shape.tokens[node]].token)
        assert paths_of(tree) == {path for path in paths.values() if path}


@settings(max_examples=60, deadline=None)
@given(SEEDS, LIMITS, st.sampled_from(GROWTH_POLICIES))
def test_no_limit_is_passed_and_a_level_is_one_call(seed: int, limits: list[TreeLimits], policy: str) -> None:
    source = Source(seed, limits)
    roots = [30 + row for row in range(len(limits))]
    grown = grow(roots, source, limits, policy)
    # The source itself checks that the nodes of a call are of one depth.
    assert source.depths_asked == list(range(len(source.depths_asked)))
    assert len(source.depths_asked) <= max(limit.max_depth for limit in limits)
    for row, ((tree, kept), limit) in enumerate(zip(grown, limits, strict=True)):
        assert tree.tokens[0] == roots[row]
        assert tree.drafted <= limit.max_nodes and tree.max_depth <= limit.max_depth
        assert all(len(tree.children(node)) <= limit.max_children for node in range(len(tree)))
        # A row without room costs its source nothing.
        assert (row in source.rows_asked) <= (limit.max_nodes > 0 and limit.max_depth > 0)
        assert len(kept) == len(tree)
        for place, node in enumerate(kept if source.builders else []):
            assert path_of(source.builders[row], node) == tuple(tree.path_tokens(place)[1:])


def test_nobody_is_asked_when_no_row_has_room() -> None:
    limits = [
        TreeLimits(max_nodes=0, max_depth=3, max_children=2),
        TreeLimits(max_nodes=3, max_depth=0, max_children=2),
    ]
    for policy in GROWTH_POLICIES:
        source = Source(0, limits)
        trees = [tree for tree, _ in grow([4, 5], source, limits, policy)]
        assert trees == [TokenTree.root_only(4), TokenTree.root_only(5)] and not source.depths_asked


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(TreeConfigError, match="growth='greedy' must be one of"):
        grow([1], Source(0, []), [TreeLimits(max_nodes=1, max_depth=1, max_children=1)], "greedy")


@pytest.mark.parametrize("policy", GROWTH_POLICIES)
def test_another_level_is_drafted_while_it_is_said_to_pay(policy: str) -> None:
    asked: list[list[list[int]]] = []

    def twice(builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]) -> bool:
        assert [builder.depths[node] for builder, nodes in zip(builders, frontier, strict=True) for node in nodes]
        asked.append([list(nodes) for nodes in frontier])
        return len(asked) < 3

    whole = TreeLimits(max_nodes=12, max_depth=6, max_children=3)
    limits = [replace(whole, goes_on=twice), replace(whole, goes_on=twice)]
    assert limits[0].capped(max_depth=5).goes_on is twice and limits[0] == whole
    source = Source(3, limits)
    trees = [tree for tree, _ in grow([4, 5], source, limits, policy)]
    # The first level is not asked for.
    assert source.depths_asked == [0, 1, 2] and len(asked) == 3 and max(tree.max_depth for tree in trees) == 3
    for row, (tree, _) in enumerate(grow([4, 5], Source(3, limits), [whole.capped(max_depth=3)] * 2, policy)):
        # A fixed shape of six levels begins otherwise than one of three.
        assert policy == "static" or tree == trees[row]


def test_levels_that_are_pruned_away_are_counted() -> None:
    forwards = 0

    def expand(builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]) -> list[list[list[Candidate]]]:
        nonlocal forwards
        forwards += 1
        return [
            [[Candidate(10 * forwards + rank, log(c)) for rank, c in enumerate((0.5, 0.3))] for _ in nodes]
            for nodes in frontier
        ]

    for most in (2, 4, 8):
        forwards, counted = 0, CountedLevels(expand)
        limits = TreeLimits(max_nodes=most, max_depth=6, max_children=2)
        ((tree, _),) = grow([0], counted, [limits], "best_first")
        assert counted.levels == forwards >= tree.max_depth
        assert forwards > tree.max_depth or most == 8
    assert CountedLevels(expand).levels == 0
