"""What a tree costs, and its best part at a cost, against trying every part."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from hf_treespec.tree import NODES, PATHS, Measure, TokenTree


def random_tree(rng: random.Random, nodes: int) -> TokenTree:
    parents, scores = [-1], [0.0]
    for node in range(1, nodes + 1):
        parent = rng.randrange(node)
        parents.append(parent)
        scores.append(scores[parent] + math.log(rng.uniform(0.05, 1.0)))
    return TokenTree(tuple(range(nodes + 1)), tuple(parents), tuple(scores))


def parts(tree: TokenTree) -> list[TokenTree]:
    """Every tree that the root forms with some of the drafted nodes."""
    out = []
    for chosen in itertools.product((False, True), repeat=tree.drafted):
        nodes = [node for node, taken in enumerate(chosen, 1) if taken]
        if all(tree.parents[node] in (0, *nodes) for node in nodes):
            out.append(tree.part(nodes))
    return out


def gain(tree: TokenTree) -> float:
    assert tree.scores is not None
    return sum(math.exp(score) for score in tree.scores[1:])


def test_units() -> None:
    #     7 -> 1 -> 2
    #       -> 3
    tree = TokenTree((7, 1, 3, 2), (-1, 0, 0, 1))
    assert NODES.units(tree) == 3
    # Two rows of three tokens, of which plain decoding reads one.
    assert PATHS.units(tree) == 5
    assert PATHS.units(TokenTree.chain([7, 1, 2, 3])) == NODES.units(TokenTree.chain([7, 1, 2, 3])) == 3
    assert NODES.units(TokenTree.root_only(7)) == PATHS.units(TokenTree.root_only(7)) == 0


@pytest.mark.parametrize("measure", [NODES, PATHS], ids=["nodes", "paths"])
@pytest.mark.parametrize("seed", range(12))
def test_no_part_at_the_cost_is_better(measure: Measure, seed: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, rng.randint(1, 8))
    budgets = list(range(0, 20))
    every = [(measure.units(part), gain(part)) for part in parts(tree)]
    for budget, nodes in zip(budgets, measure.kept(tree, budgets), strict=True):
        part = tree.part(nodes)
        assert len(set(nodes)) == len(nodes) == part.drafted
        assert measure.units(part) <= budget
        assert gain(part) == pytest.approx(max(worth for units, worth in every if units <= budget))


def test_few_long_paths_are_kept_before_many_short_ones() -> None:
    # A chain of four that is right nine times in ten at each step, and four other children of the root.
    scores = [0.0, *(depth * math.log(0.9) for depth in range(1, 5)), *[math.log(0.025)] * 4]
    tree = TokenTree((9, 1, 2, 3, 4, 5, 6, 7, 8), (-1, 0, 1, 2, 3, 0, 0, 0, 0), tuple(scores))
    assert PATHS.kept(tree, [4, 8, 9]) == [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4, 5]]
    assert PATHS.kept(tree, [3]) == [[1, 2, 3]]


def test_without_scores_length_decides() -> None:
    tree = TokenTree((9, 1, 2, 3), (-1, 0, 0, 2))
    assert PATHS.kept(tree, [1, 2, 5]) == [[1], [2, 3], [2, 3, 1]]
    assert NODES.kept(tree, [1, 2, 5]) == [[1], [1, 2], [1, 2, 3]]
