"""A costly draft and predictors of the text in one tree: what is merged, who is told, and when the draft is asked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from hf_treespec.draft import Draft, DraftRow, JoinedDraft, Predictor, WeighingDraft
from hf_treespec.tree import TokenTree, TreeBuilder, TreeLimits

LIMITS = TreeLimits(max_nodes=6, max_depth=3, max_children=3)
NONE = LIMITS.capped(max_nodes=0)


class Fixed(Predictor):
    """Says the same after every token, whatever came before it."""

    name = "fixed"

    def __init__(self, laws: Mapping[int, Mapping[int, float]]) -> None:
        self.laws = laws

    def begin(self, row: DraftRow) -> None:
        self.text = row.tokens

    def shares(self, row: DraftRow, path: Sequence[int], floor: float) -> dict[int, float]:
        return dict(self.laws.get(path[-1] if path else row.tokens[-1], {}))


class Clock:
    now = 0.0


class Costly(Draft):
    """Proposes one tree below any root, and takes its time."""

    name = "model"
    cheap = False

    def __init__(self, clock: Clock, seconds: float = 0.0, *, warm_up: float = 0.0) -> None:
        self.clock, self.seconds, self.warm_up = clock, seconds, warm_up
        self.asked = 0
        self.told: list[Any] = []

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[TokenTree]:
        self.asked += 1
        self.clock.now += self.warm_up if self.warm_up and self.asked < 3 else self.seconds
        return [self.tree(row.tokens[-1]) if limit.max_nodes else TokenTree.root_only(row.tokens[-1])
                for row, limit in zip(rows, limits, strict=True)]  # fmt: skip

    def tree(self, root: int) -> TokenTree:
        builder = TreeBuilder(root)
        first = builder.add(0, 2, math.log(0.6))
        builder.add(0, 3, math.log(0.3))
        builder.add(first, 5, math.log(0.5))
        return builder.freeze()[0]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self.told.append([list(path) for path in paths])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("hf_treespec.clock.now", lambda: clock.now)
    return clock


def joined(costly: Costly, laws: Mapping[int, Mapping[int, float]]) -> JoinedDraft:
    return JoinedDraft(costly, [Fixed(laws)], growth="best_first", vocab_size=100)


def scores(tree: TokenTree) -> dict[tuple[int, ...], float]:
    assert tree.scores is not None
    return {tuple(tree.path_tokens(node)[1:]): round(math.exp(tree.scores[node]), 6) for node in range(1, len(tree))}


def test_the_tree_is_a_mixture_where_both_speak_and_one_alone_elsewhere(clock: Clock) -> None:
    draft = joined(Costly(clock), {1: {2: 0.2, 4: 0.4}, 5: {6: 0.9}, 4: {7: 0.7}})
    (tree,) = draft.propose([DraftRow(0, [1])], [LIMITS])
    assert draft.name == "model+fixed" and isinstance(draft, WeighingDraft)
    assert scores(tree) == pytest.approx(
        {(2,): 0.4, (3,): 0.15, (4,): 0.2, (2, 5): 0.2, (2, 5, 6): 0.18, (4, 7): 0.14}
    )
    of = {tuple(tree.path_tokens(node)[1:]): draft.origins[0][node] for node in range(1, len(tree))}
    assert of == {
        (2,): ("model", "fixed"), (3,): ("model",), (4,): ("fixed",), (2, 5): ("model",), (2, 5, 6): ("fixed",),
        (4, 7): ("fixed",),
    }  # fmt: skip


def test_the_costly_draft_is_told_its_own_nodes(clock: Clock) -> None:
    costly = Costly(clock)
    draft = joined(costly, {1: {2: 0.2, 4: 0.4}, 5: {6: 0.9}, 4: {7: 0.7}})
    rows = [DraftRow(row, [1]) for row in range(4)]
    trees = draft.propose(rows, [LIMITS, LIMITS, LIMITS, NONE])
    paths = []
    for tree, tokens in zip(trees, ([2, 5, 6], [4, 7], [], []), strict=True):
        path = [0]
        for token in tokens:
            child = tree.child(path[-1], token)
            assert child is not None
            path.append(child)
        paths.append(path)
    # The row without budget has ended and follows with padding.
    paths[3] = [0, 1, 2]
    paths[2] = []
    draft.commit(paths)
    own = costly.tree(1)
    first = own.child(0, 2)
    assert first is not None
    assert costly.told == [[[0, first, own.child(first, 5)], [0], [], [0]]]


def test_a_row_without_budget_asks_nobody(clock: Clock) -> None:
    costly = Costly(clock)
    draft = joined(costly, {1: {2: 0.2}})
    assert draft.propose([DraftRow(0, [1])], [NONE]) == [TokenTree.root_only(1)]
    draft.commit([[0]])
    assert costly.asked == 0 and costly.told == []


class Promise:
    """Of the text alone `tokens`, with the costly draft `more`; a round without drafting takes 1 second."""

    def __init__(self, tokens: float, more: float) -> None:
        self.tokens, self.more = tokens, more
        self.rows: Any = None

    def __call__(self, trees: Sequence[TokenTree], rows: Sequence[int]) -> tuple[float, float]:
        self.rows = list(rows)
        with_model = any(3 in tree.tokens for tree in trees)
        return self.more if with_model else self.tokens, 1.0


def asked(draft: JoinedDraft, costly: Costly, rounds: int) -> list[bool]:
    row, out = DraftRow(0, [1]), []
    for _ in range(rounds):
        before = costly.asked
        draft.propose([row], [LIMITS])
        draft.commit([[0]])
        out.append(costly.asked > before)
        row.tokens.append(1)
    return out


@pytest.mark.parametrize(
    ("more", "seconds", "pays"),
    # 1.5 tokens a second without it.
    [(2.4, 0.5, True), (2.1, 0.5, False), (2.9, 1.0, False), (3.2, 1.0, True), (1.5, 0.001, False)],
)
def test_it_is_asked_where_the_gain_is_worth_its_time(clock: Clock, more: float, seconds: float, pays: bool) -> None:
    costly = Costly(clock, seconds)
    draft = joined(costly, {1: {2: 0.2}})
    draft.promise = Promise(1.5, more)
    answers = asked(draft, costly, 80)
    # The first call is no measure: it reads the prompt. Then come the trials.
    assert answers[:5] == [True] * 5
    if pays:
        assert all(answers)
    else:
        # 32 rounds without it, then it is tried again.
        assert answers[5:] == ([False] * 32 + [True]) * 2 + [False] * 9
    # A round without it is none of its own.
    assert len(costly.told) == sum(answers)


def test_what_is_learnt_goes_by_what_the_text_promises(clock: Clock) -> None:
    """Where the text is sure the draft adds nothing, elsewhere it does."""
    costly = Costly(clock, 0.5)
    draft = joined(costly, {1: {2: 0.2}})
    promise = Promise(1.1, 2.6)
    draft.promise = promise
    assert all(asked(draft, costly, 10))
    promise.tokens = promise.more = 4.0
    assert asked(draft, costly, 10) == [True] * 4 + [False] * 6
    promise.tokens, promise.more = 1.1, 2.6
    assert all(asked(draft, costly, 10))
    assert promise.rows == [0]


def test_a_very_dear_draft_is_tried_rarely(clock: Clock) -> None:
    """Its trials take 5 % of the time: one of 4 seconds for 80 rounds of 1 second."""
    costly = Costly(clock, 4.0)
    draft = joined(costly, {1: {2: 0.2}})
    draft.promise = Promise(1.5, 2.5)
    assert asked(draft, costly, 170)[5:] == ([False] * 80 + [True]) * 2 + [False] * 3


def test_a_warm_up_is_no_measure(clock: Clock) -> None:
    """The first call reads the prompt, the second may be the first of its shape."""
    costly = Costly(clock, 0.5, warm_up=50.0)
    draft = joined(costly, {1: {2: 0.2}})
    draft.promise = Promise(1.5, 2.4)
    assert all(asked(draft, costly, 40))


@pytest.mark.parametrize("more", [3.2, 1.6])
def test_while_sizes_are_timed_it_stays_at_what_was_decided(clock: Clock, more: float) -> None:
    costly = Costly(clock, 1.0)
    draft = joined(costly, {1: {2: 0.2}})
    promise = draft.promise = Promise(1.5, more)
    asked(draft, costly, 10)
    draft.promise = lambda trees, rows: None
    assert asked(draft, costly, 4) == [more == 3.2] * 4
    draft.promise = promise
    assert asked(draft, costly, 10) == [more == 3.2] * 10


def test_without_a_promise_it_is_always_asked(clock: Clock) -> None:
    costly = Costly(clock, 9.0)
    draft = joined(costly, {1: {2: 0.2}})
    assert all(asked(draft, costly, 50))
    draft.promise = lambda trees, rows: None
    assert all(asked(draft, costly, 50))
