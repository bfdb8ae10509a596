"""Lookahead by hand: the Jacobi window, what it teaches the pool, what it takes of a tree, and what it is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_treespec.draft import DraftRow, LookaheadPredictor, TextDraft, ngram_predictor
from hf_treespec.draft.lookahead import JacobiWindow
from hf_treespec.tree import GROWTH_POLICIES, TokenTree, TreeLimits

VOCAB = 10
LIMITS = TreeLimits(max_nodes=16, max_depth=6, max_children=3)


def new(window: int = 2, ngram: int = 3, candidates: int = 4, readable: int = VOCAB) -> LookaheadPredictor:
    return LookaheadPredictor(window=window, ngram=ngram, candidates=candidates, readable=readable)


def total(text: Sequence[int]) -> int:
    """A target whose next token depends on all tokens before it."""
    return sum(text) % VOCAB


def said(row: DraftRow, tree: TokenTree, nodes: int | None = None) -> Tensor:
    """Logits `[1, N, V]` of that target."""
    out = torch.zeros(1, nodes or len(tree), VOCAB)
    for node in range(len(tree)):
        out[0, node, total([*row.tokens[:-1], *tree.path_tokens(node)])] = 1.0
    return out


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path_tokens(node)[1:]) for node in range(1, len(tree))}


def state(predictor: LookaheadPredictor, row: int = 0) -> Any:
    return predictor._rows[row]


# -- the window --


def test_columns_share_their_oldest_tokens_as_a_chain() -> None:
    window = JacobiWindow(3, 4)
    window.columns = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert window.paths(99, 99) == [(1, 2, 3), (1, 4, 5, 6), (1, 4, 7, 8, 9)]
    # 3 + 3 + 3 nodes; the last one lies 5 deep.
    assert window.paths(9, 5) == window.paths(99, 99)
    assert window.paths(8, 5) == window.paths(9, 4) == [(1, 2, 3), (1, 4, 5, 6)]
    assert window.paths(2, 9) == window.paths(9, 2) == []


def test_what_columns_have_in_common_is_read_once() -> None:
    window = JacobiWindow(2, 3)
    window.columns = [[1, 2], [2, 3]]
    assert window.paths(3, 9) == [(1, 2), (1, 2, 3)]


def test_a_column_grows_and_then_moves_on() -> None:
    window = JacobiWindow(1, 3)
    window.fill(lambda: 5)
    assert window.advance(0, 6) is None and window.columns == [[5, 6]]
    assert window.advance(0, 7) == (5, 6, 7) and window.columns == [[6, 7]]
    window.fill(lambda: pytest.fail("no column is missing"))
    assert JacobiWindow(1, 2).columns == []


def test_the_iterates_are_those_of_a_calculation_by_hand() -> None:
    predictor = new()
    draft, row = TextDraft([predictor], vocab_size=VOCAB), DraftRow(0, [1])

    def step(*more: int) -> None:
        (tree,) = draft.propose([row], [LIMITS])
        logits = said(row, tree)
        row.tokens += more
        draft.observe([tree], logits, [[0]])

    # The only token that is known is the first guess of both columns: 1 + 1 = 2 after the first, 1 + 1 + 1 = 3.
    step(7)
    assert state(predictor).window.columns == [[1, 2], [1, 3]]
    # The text sums to 8. Column 0 reads 1, 2: 11. Column 1 reads 1 of column 0, then 1, 3: 13.
    step(5)
    assert state(predictor).window.columns == [[2, 1], [3, 3]]
    assert state(predictor).pool.of(1) == [(3, 3), (2, 1), (7,)]
    # 13; column 0 reads 2, 1: 16. Column 1 reads 2, 3, 3: 21.
    step(0)
    assert state(predictor).window.columns == [[1, 6], [3, 1]]
    assert state(predictor).pool.of(2) == [(1, 6)] and state(predictor).pool.of(3) == [(3, 1)]
    # So after a text that ends with 3 it proposes what was made up, which no text has held.
    row.tokens += [3]
    (tree,) = draft.propose([row], [LIMITS])
    assert {(3,), (3, 1)} <= paths(tree)


def test_tokens_that_nobody_can_read_are_not_guessed() -> None:
    predictor = new(readable=5)
    row = DraftRow(0, [7, 8, 2, 9])
    predictor.begin(row)
    assert state(predictor).window.columns == [[2], [2]]
    tree = TokenTree.chain([9, 2])
    state(predictor).paths = [(2,)]
    predictor.observe([tree], torch.eye(VOCAB)[[0, 7]][None], [[0]])
    assert state(predictor).window.columns[0] == [2]
    predictor = new(readable=5)
    predictor.begin(DraftRow(0, [7, 8, 9]))
    assert predictor.asked(DraftRow(0, [7, 8, 9]), LIMITS) == []


def test_a_row_that_took_no_part_and_paths_that_were_cut_teach_nothing() -> None:
    predictor = new(window=3)
    draft, rows = TextDraft([predictor]), [DraftRow(0, [1, 2]), DraftRow(1, [3, 4])]
    trees = draft.propose(rows, [LIMITS, LIMITS])
    before = [list(map(list, state(predictor, row).window.columns)) for row in (0, 1)]
    first = state(predictor).paths[0]
    # Of the first row only the first column was scored.
    cut = TokenTree.chain([2, *first])
    logits = torch.cat([torch.nn.functional.pad(said(rows[0], cut), (0, 0, 0, len(trees[1]) - len(cut)))] * 2)
    draft.observe([cut, trees[1]], logits, [[0], []])
    after = [state(predictor, row).window.columns for row in (0, 1)]
    assert after[0] == [[*before[0][0], total([1, 2, *first])], *before[0][1:]] and after[1] == before[1]


def test_rows_learn_apart() -> None:
    predictor = new()
    draft = TextDraft([predictor], vocab_size=VOCAB)
    rows = [DraftRow(0, [1, 2, 3]), DraftRow(1, [1, 5, 6, 1])]
    trees = draft.propose(rows, [LIMITS, LIMITS])
    assert state(predictor, 0).pool.of(1) == [(2, 3), (2,)] and state(predictor, 1).pool.of(1) == [(5, 6), (5,)]
    alone = TextDraft([new()], vocab_size=VOCAB).propose([DraftRow(0, [1, 5, 6, 1])], [LIMITS])
    assert trees[1] == alone[0]


# -- its share of a tree --


def test_a_window_takes_half_a_tree_at_most() -> None:
    def drafted(nodes: int, **limits: int) -> int:
        draft = TextDraft([new(window=3)])
        state_of = draft.predictors[0]
        row = DraftRow(0, [1, 2, 3])
        limit = TreeLimits(max_nodes=nodes, **{"max_depth": 6, "max_children": 3, **limits})
        draft.propose([row], [limit])
        assert isinstance(state_of, LookaheadPredictor)
        state(state_of).window.columns = [[4, 5], [6, 7], [8, 9]]
        row.tokens.append(0)
        (tree,) = draft.propose([row], [limit])
        return tree.drafted

    # Nothing in the text begins with 0: all nodes are the window's, two to a column.
    assert [drafted(nodes) for nodes in (1, 3, 4, 7, 8, 12, 40)] == [0, 0, 2, 2, 4, 6, 6]
    assert drafted(40, max_depth=3) == 4 and drafted(40, max_depth=1) == 0
    assert drafted(40, max_children=1) == 0


def test_all_nodes_are_used_and_the_source_is_credited() -> None:
    text = [1, 2, 3, 4, 1, 3, 5, 1, 4, 6, 7, 1]
    draft = TextDraft([ngram_predictor(), new(window=2)])
    for nodes in (6, 9, 14):
        row = DraftRow(nodes, list(text))
        (tree,) = draft.propose([row], [TreeLimits(max_nodes=nodes, max_depth=6, max_children=4)])
        assert tree.drafted == nodes
        asked = state(draft.predictors[1], nodes).paths  # type: ignore[arg-type]
        assert len(asked) == 2 and set(asked) <= paths(tree)
        for node in range(1, len(tree)):
            names = draft.origins[0][node]
            assert names and set(names) <= {"ngram", "lookahead"} and len(set(names)) == len(names)
            if tuple(tree.path_tokens(node)[1:]) in asked:
                assert "lookahead" in names


def test_a_cut_spares_the_window_by_what_it_has_brought() -> None:
    """Worth little its nodes go first; worth much they stay, the first columns longest."""
    for gained, kept in ((0.01, 0), (4.0, 2), (19.9, 4)):
        draft = TextDraft([new(window=2)])
        predictor: Any = draft.predictors[0]
        row = DraftRow(0, [1, 2, 3, 4, 1, 2, 3, 4, 1])
        predictor.begin(row)
        state(predictor).window.columns = [[7, 8], [9, 6]]
        state(predictor).gained = gained
        (tree,) = draft.propose([row], [LIMITS])
        assert state(predictor).paths == [(7, 8), (7, 9, 6)]
        best = tree.best(4)
        window = {(7,), (7, 8), (7, 9), (7, 9, 6)}
        assert len(paths(best) & window) == kept
        assert kept != 2 or (7, 8) in paths(best)


def test_worth_rises_by_guesses_that_came_true_and_falls_by_reading() -> None:
    draft = TextDraft([new()], vocab_size=VOCAB)
    predictor: Any = draft.predictors[0]
    row = DraftRow(0, [1, 2])
    (tree,) = draft.propose([row], [LIMITS])
    nodes = len({path[: end + 1] for path in state(predictor).paths for end in range(len(path))})
    draft.observe([tree], said(row, tree), [[0]])
    assert (state(predictor).gained, state(predictor).read) == pytest.approx((0.97 * 2.0, 0.97 * 20.0 + nodes))
    state(predictor).pool.add((2, 8, 9), guessed=True)
    draft.propose([row], [LIMITS])
    row.tokens += [8, 9]
    draft.propose([row], [LIMITS])
    assert state(predictor).gained == pytest.approx(0.97 * 2.0 + 2)
    # Nothing is read, nothing is forgotten.
    draft.observe([TokenTree.root_only(9)], torch.zeros(1, 1, VOCAB), [[0]])
    assert state(predictor).gained == pytest.approx(0.97 * 2.0 + 2)


# -- the candidates --


def test_shares_are_how_often_such_continuations_were_right() -> None:
    predictor = new()
    row = DraftRow(0, [1, 2])
    predictor.begin(row)
    prior = predictor.shares(DraftRow(0, [1]), [], 0.0)
    assert prior == pytest.approx({2: 0.13})
    rates = []
    for token in [3, 2] * 40:
        state(predictor).told[()] = [one for one in state(predictor).pool.after([1]) if one.token == 2]
        state(predictor).judge([token])
        rates.append(predictor.shares(DraftRow(0, [1]), [], 0.0)[2])
    assert 0.4 < rates[-1] < 0.6 and rates[0] < 0.13
    assert sum(predictor.shares(DraftRow(0, [1, 2]), [], 0.0).values()) <= 1.0


def test_a_longer_match_is_worth_more_and_a_guess_less() -> None:
    predictor = new(ngram=4)
    predictor.begin(DraftRow(0, [0]))
    for gram, guessed in (((1, 2, 3, 4), False), ((3, 5), False), ((3, 6, 6), True)):
        state(predictor).pool.add(gram, guessed=guessed)
    shares = predictor.shares(DraftRow(0, [1, 2, 3]), [], 0.0)
    assert shares == pytest.approx({4: 0.75, 6: 0.13 * 0.75, 5: 0.13 * 0.45})
    # The same after a path.
    assert predictor.shares(DraftRow(0, [1, 2]), [3], 0.0) == shares


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(GROWTH_POLICIES),
    st.builds(TreeLimits, max_nodes=st.integers(0, 20), max_depth=st.integers(0, 7), max_children=st.integers(1, 4)),
    st.integers(1, 5),
    st.integers(2, 5),
    st.lists(st.integers(0, 9), min_size=4, max_size=12),
)
def test_trees_keep_their_limits(growth: str, limits: TreeLimits, window: int, ngram: int, text: list[int]) -> None:
    draft = TextDraft([new(window, ngram), ngram_predictor()], growth=growth, vocab_size=VOCAB)
    row = DraftRow(0, text[:2])
    for token in text[2:]:
        (tree,) = draft.propose([row], [limits])
        assert tree.drafted <= limits.max_nodes and tree.max_depth <= limits.max_depth
        assert all(len(tree.children(node)) <= limits.max_children for node in range(len(tree)))
        assert len(draft.origins[0]) == len(tree) and all(draft.origins[0][1:])
        assert tree.scores is None or all(math.isfinite(score) for score in tree.scores)
        logits = said(row, tree)
        row.tokens.append(token)
        draft.observe([tree], logits, [[0]])
