"""Asked paths and candidates in one tree: what is kept, what it is worth, and that it is a tree within its limits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_treespec.tree import TokenTree, TreeBuilder, TreeLimits, with_asked

Asked = list[tuple[tuple[int, ...], float]]


def grown(*paths: tuple[tuple[int, ...], float]) -> TokenTree:
    """Root 0 and a node per path, each of which must come after its parent."""
    builder = TreeBuilder(0)
    place: dict[tuple[int, ...], int] = {(): 0}
    for path, share in paths:
        place[path] = builder.add(place[path[:-1]], path[-1], math.log(share))
    return builder.freeze()[0]


def worth(tree: TokenTree) -> dict[tuple[int, ...], float]:
    assert tree.scores is not None
    return {tuple(tree.path_tokens(n)[1:]): round(math.exp(tree.scores[n]), 6) for n in range(1, len(tree))}


def test_asked_paths_come_first_and_candidates_take_the_rest() -> None:
    tree = grown(((1,), 0.5), ((2,), 0.3), ((1, 3), 0.5), ((3,), 0.1))
    whole = with_asked(tree, [((4, 5), 0.05), ((4, 6), 0.04)], TreeLimits(max_nodes=6, max_depth=4, max_children=4))
    assert worth(whole.tree) == {(4,): 0.05, (4, 5): 0.05, (4, 6): 0.04, (1,): 0.5, (2,): 0.3, (1, 3): 0.25}
    assert whole.asked == {1, 2, 3}
    assert whole.candidates == (0, None, None, None, 1, 2, 3)
    # Cut by worth the candidates stay.
    assert set(worth(whole.tree.best(3))) == {(1,), (2,), (1, 3)}


def test_what_both_hold_is_one_node_worth_both() -> None:
    tree = grown(((1,), 0.5), ((1, 2), 0.4), ((1, 2, 3), 0.5))
    whole = with_asked(tree, [((1, 2), 0.1)], TreeLimits(max_nodes=3, max_depth=3, max_children=1))
    assert worth(whole.tree) == {(1,): 0.6, (1, 2): 0.3, (1, 2, 3): 0.1}
    assert whole.asked == {1, 2} and whole.candidates == (0, 1, 2, 3)


def test_a_path_without_room_is_left_out_whole() -> None:
    tree = grown(((1,), 0.5))
    for path, nodes, depth, children in (
        ((2, 3, 4), 2, 9, 9),
        ((2, 3, 4), 9, 2, 9),
        ((3, 5), 9, 9, 1),
    ):
        limits = TreeLimits(max_nodes=nodes, max_depth=depth, max_children=children)
        assert list(worth(with_asked(tree, [((2,), 0.1), (path, 0.1)], limits).tree))[0] == (2,)
        assert path not in worth(with_asked(tree, [((2,), 0.1), (path, 0.1)], limits).tree)
    assert with_asked(tree, [], TreeLimits(max_nodes=3, max_depth=3, max_children=2)).tree == tree


def test_candidates_give_way_to_asked_siblings_with_all_that_is_below_them() -> None:
    tree = grown(((1,), 0.9), ((1, 2), 0.5), ((1, 3), 0.4), ((1, 3, 7), 0.9))
    whole = with_asked(tree, [((1, 9), 0.01)], TreeLimits(max_nodes=9, max_depth=3, max_children=2))
    assert worth(whole.tree) == {(1,): 0.91, (1, 9): 0.01, (1, 2): 0.45}


PATH = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(PATH, st.sampled_from((0.1, 0.5, 1.0))), max_size=8),
    st.lists(PATH, max_size=5),
    st.builds(TreeLimits, max_nodes=st.integers(0, 9), max_depth=st.integers(0, 4), max_children=st.integers(1, 3)),
)
def test_it_is_a_tree_within_its_limits(
    paths: list[tuple[tuple[int, ...], float]], asked: list[tuple[int, ...]], limits: TreeLimits
) -> None:
    shares: dict[tuple[int, ...], float] = {}
    for path, share in paths:
        for end in range(1, len(path) + 1):
            shares.setdefault(path[:end], share)
    tree = grown(*sorted(shares.items(), key=lambda item: len(item[0])))
    falling = [(path, 0.3 - 0.05 * place) for place, path in enumerate(asked)]
    whole = with_asked(tree, falling, limits)
    out = whole.tree
    assert out.drafted <= limits.max_nodes and out.max_depth <= limits.max_depth
    assert all(len(out.children(node)) <= limits.max_children for node in range(len(out)))
    assert out.scores is not None and out.scores[0] == 0.0
    given_paths = {path[:end] for path in asked for end in range(1, len(path) + 1)}
    for node in range(1, len(out)):
        assert out.scores[node] <= out.scores[out.parents[node]]
        path, candidate = out.path_tokens(node), whole.candidates[node]
        assert candidate is not None or node in whole.asked
        assert candidate is None or tree.path_tokens(candidate) == path
        assert node not in whole.asked or tuple(path[1:]) in given_paths


def test_a_tree_without_scores_ranks_by_its_order() -> None:
    whole = with_asked(TokenTree.chain([0, 1, 2]), [((5,), 0.2)], TreeLimits(max_nodes=2, max_depth=2, max_children=2))
    assert whole.tree == TokenTree((0, 5, 1), (-1, 0, 0))
    assert whole.tree.scores is not None and whole.tree.scores[1] == pytest.approx(math.log(0.2))
