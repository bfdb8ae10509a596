"""Several predictors in one tree: what they share, how their weights move, and who is credited."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_treespec import TreeConfigError
from hf_treespec.draft import CreditedDraft, Draft, DraftRow, LearningDraft, Predictor, TextDraft
from hf_treespec.tree import GROWTH_POLICIES, TokenTree, TreeLimits

LIMITS = TreeLimits(max_nodes=6, max_depth=3, max_children=2)
LAW = st.dictionaries(st.integers(0, 6), st.sampled_from((0.05, 0.1, 0.13)), max_size=5)


class Fixed(Predictor):
    """Says the same after every token, whatever came before it."""

    def __init__(self, name: str, laws: Mapping[int, Mapping[int, float]]) -> None:
        self.name = name
        self.laws = laws
        self.begun: list[int] = []

    def begin(self, row: DraftRow) -> None:
        self.begun.append(row.index)

    def shares(self, row: DraftRow, path: Sequence[int], floor: float) -> dict[int, float]:
        return dict(self.laws.get(path[-1] if path else row.tokens[-1], {}))


def scores(tree: TokenTree) -> dict[tuple[int, ...], float]:
    assert tree.scores is not None
    return {tuple(tree.path_tokens(node)[1:]): round(math.exp(tree.scores[node]), 6) for node in range(1, len(tree))}


def test_one_token_under_one_parent_is_one_node_and_the_shares_add_up() -> None:
    one = Fixed("one", {1: {2: 0.8, 3: 0.1}, 2: {4: 0.5}})
    two = Fixed("two", {1: {2: 0.4, 5: 0.3}, 2: {4: 0.1, 6: 0.6}, 5: {1: 0.2}})
    draft = TextDraft([one, two])
    (tree,) = draft.propose([DraftRow(0, [1])], [LIMITS])
    assert draft.name == "one+two"
    assert scores(tree) == {(2,): 0.6, (5,): 0.15, (2, 4): 0.18, (2, 6): 0.18, (5, 1): 0.03, (5, 1, 2): 0.018}
    of = {tuple(tree.path_tokens(node)[1:]): draft.origins[0][node] for node in range(len(tree))}
    assert of == {
        (): (),
        (2,): ("one", "two"),
        (5,): ("two",),
        (2, 4): ("one", "two"),
        (2, 6): ("two",),
        (5, 1): ("two",),
        (5, 1, 2): ("one", "two"),
    }


def test_a_node_far_less_likely_than_the_worst_one_kept_has_no_children() -> None:
    """At nearly no temperature shares come up whose products no float holds."""
    laws = {1: {2: 0.9, 4: 1e-300}, 2: {5: 0.9}, 4: {7: 1e-300}, 5: {8: 0.4, 9: 0.3, 10: 0.2}, 7: {2: 0.9}}
    draft = TextDraft([Fixed("one", laws)])
    (tree,) = draft.propose([DraftRow(0, [1])], [TreeLimits(max_nodes=4, max_depth=5, max_children=3)])
    assert scores(tree).keys() == {(2,), (2, 5), (2, 5, 8), (2, 5, 9)}


@pytest.mark.parametrize("predictors", [1, 2])
def test_ids_that_the_target_cannot_say_are_not_proposed(predictors: int) -> None:
    """A prompt may hold ids beyond the vocabulary, such as those that stand for pictures."""
    laws = {1: {9: 0.6, 2: 0.3}, 2: {9: 0.8, 7: 0.1}, 7: {9: 1.0}}
    sources = [Fixed(name, laws) for name in ("one", "two")[:predictors]]
    (tree,) = TextDraft(sources, vocab_size=9).propose([DraftRow(0, [9, 1])], [LIMITS])
    assert scores(tree) == {(2,): 0.3, (2, 7): 0.03}


def test_a_node_that_nobody_would_propose_alone_is_credited_to_those_who_know_it() -> None:
    draft = TextDraft([Fixed("one", {1: {2: 0.4, 3: 0.35}}), Fixed("two", {1: {4: 0.4, 3: 0.35}})])
    (tree,) = draft.propose([DraftRow(0, [1])], [TreeLimits(max_nodes=1, max_depth=1, max_children=1)])
    assert tree == TokenTree.chain([1, 3]) and draft.origins == [[(), ("one", "two")]]


def test_the_better_predictor_gains_and_the_other_can_come_back() -> None:
    draft = TextDraft([Fixed("one", {1: {1: 0.9}}), Fixed("two", {1: {2: 0.9}, 2: {2: 0.9}})])
    row, other = DraftRow(0, [1]), DraftRow(1, [1])
    assert draft.weights(0) == [0.5, 0.5]
    for _ in range(30):
        draft.propose([row, other], [LIMITS, LIMITS.capped(max_nodes=0)])
        row.tokens.append(1)
    assert draft.weights(0)[0] > 0.97 and sum(draft.weights(0)) == pytest.approx(1.0)
    assert draft.weights(1) == [0.5, 0.5]
    row.tokens.append(2)
    for _ in range(3):
        draft.propose([row], [LIMITS])
        row.tokens += [2, 2]
    assert draft.weights(0)[1] > 0.9


def test_weights_move_by_every_token_of_a_path_that_was_told() -> None:
    draft = TextDraft([Fixed("one", {1: {2: 0.8}, 2: {3: 0.4}}), Fixed("two", {1: {2: 0.2}, 2: {3: 0.4}})])
    row = DraftRow(0, [1])
    draft.propose([row], [LIMITS])
    # After 3 nothing was told: what comes there says nothing.
    row.tokens += [2, 3, 5, 1]
    draft.propose([row], [LIMITS])
    first = [0.95 * 0.8 + 0.025, 0.95 * 0.2 + 0.025]
    assert draft.weights(0) == pytest.approx([0.95 * w + 0.025 for w in first])


def test_who_knows_nothing_of_a_node_neither_counts_nor_is_judged_there() -> None:
    laws = ({1: {2: 0.8}, 2: {3: 0.4}}, {1: {2: 0.4}}, {1: {2: 0.2}, 2: {3: 0.1}})
    draft = TextDraft([Fixed(str(place), law) for place, law in enumerate(laws)])
    row = DraftRow(0, [1])
    (tree,) = draft.propose([row], [LIMITS])
    assert scores(tree) == pytest.approx({(2,): 1.4 / 3, (2, 3): 1.4 / 3 * 0.25}, abs=1e-6)
    row.tokens += [2, 3]
    draft.propose([row], [LIMITS])
    first = [0.95 * share / 1.4 + 0.05 / 3 for share in (0.8, 0.4, 0.2)]
    held = first[0] + first[2]
    shares = [first[0] * 0.4, first[2] * 0.1]
    after = [held * (0.95 * share / sum(shares) + 0.025) for share in shares]
    assert draft.weights(0) == pytest.approx([after[0], first[1], after[1]])
    assert sum(draft.weights(0)) == pytest.approx(1.0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.dictionaries(st.integers(0, 6), LAW), min_size=1, max_size=3),
    st.sampled_from(GROWTH_POLICIES),
    st.builds(TreeLimits, max_nodes=st.integers(0, 9), max_depth=st.integers(0, 4), max_children=st.integers(1, 3)),
    st.lists(st.integers(0, 6), min_size=1, max_size=8),
)
def test_trees_keep_their_limits_and_every_node_has_an_origin(
    laws: list[dict[int, dict[int, float]]], growth: str, limits: TreeLimits, text: list[int]
) -> None:
    draft = TextDraft([Fixed(str(place), law) for place, law in enumerate(laws)], growth=growth)
    row = DraftRow(0, [3])
    for token in text:
        (tree,) = draft.propose([row], [limits])
        assert tree.tokens[0] == row.tokens[-1]
        assert tree.drafted <= limits.max_nodes and tree.max_depth <= limits.max_depth
        assert all(len(tree.children(node)) <= limits.max_children for node in range(len(tree)))
        assert len(draft.origins[0]) == len(tree) and draft.origins[0][0] == ()
        for node in range(1, len(tree)):
            parent = tree.tokens[tree.parents[node]]
            knows = {str(n) for n, law in enumerate(laws) if tree.tokens[node] in law.get(parent, {})}
            assert draft.origins[0][node] and set(draft.origins[0][node]) <= knows
        row.tokens.append(token)


def test_a_row_without_budget_is_not_read() -> None:
    predictor = Fixed("one", {1: {2: 0.5}})
    draft = TextDraft([predictor])
    none = LIMITS.capped(max_nodes=0)
    assert draft.propose([DraftRow(0, [1]), DraftRow(1, [1])], [none, LIMITS])[0] == TokenTree.root_only(1)
    assert predictor.begun == [1] and draft.origins == [[()], [(), ("one",)]]


def test_it_is_a_draft_of_every_kind() -> None:
    draft: Draft = TextDraft([Fixed("one", {})])
    assert isinstance(draft, LearningDraft) and isinstance(draft, CreditedDraft)
    assert not draft.learns and draft.cheap and draft.laws(3) is None
    with pytest.raises(TreeConfigError, match="^growth='greedy' must be one of"):
        TextDraft([Fixed("one", {})], growth="greedy")
