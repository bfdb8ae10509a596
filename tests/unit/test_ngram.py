"""The n-gram source against an oracle that scans the whole text again for every question."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_treespec import TreeConfigError, TreeSpecError
from hf_treespec.draft import ContextPredictor, Draft, DraftRow, NgramDraft, TextDraft
from hf_treespec.draft.ngram_index import NgramIndex
from hf_treespec.tree import GROWTH_POLICIES, Candidate, TokenTree, TreeBuilder, TreeLimits, grow


def make_text(seed: int) -> list[int]:
    """Few tokens, or many, and copies of earlier spans, so that long matches, ties and periods are common."""
    rng = random.Random(seed)
    size, length = rng.choice((1, 2, 3, 4, 5, 6, 20)), rng.randint(1, 45)
    text = [rng.randrange(size)]
    while len(text) < length:
        start = rng.randrange(len(text))
        text += text[start : start + rng.randint(2, 9)] if rng.random() < 0.3 else [rng.randrange(size)]
    return text


TEXTS = st.integers(0, 2**32).map(make_text)
LIMITS = st.builds(
    TreeLimits, max_nodes=st.integers(1, 12), max_depth=st.integers(1, 6), max_children=st.integers(1, 4)
)
SETTINGS = st.fixed_dictionaries(
    {
        "growth": st.sampled_from(GROWTH_POLICIES),
        "max_match": st.integers(1, 5),
        "max_occurrences": st.sampled_from((1, 2, 3, 40)),
        "novelty": st.sampled_from((0.5, 2.0, 1e3)),
        "novelty_decay": st.sampled_from((0.7, 1.0)),
        "background": st.sampled_from((0.0, 0.4, 1.0)),
    }
)
WIDE = TreeLimits(max_nodes=64, max_depth=16, max_children=16)


def limits(max_nodes: int, max_depth: int = 16, max_children: int = 16) -> TreeLimits:
    return TreeLimits(max_nodes=max_nodes, max_depth=max_depth, max_children=max_children)


def propose(tokens: Sequence[int], limit: TreeLimits, **kwargs: object) -> TokenTree:
    """The tree of a source that sees the text for the first time."""
    return NgramDraft(**kwargs).propose([DraftRow(0, list(tokens))], [limit])[0]  # type: ignore[arg-type]


def children(tree: TokenTree, node: int = 0) -> list[int]:
    return [tree.tokens[child] for child in tree.children(node)]


def matched(text: Sequence[int], context: Sequence[int], place: int, max_match: int) -> int:
    """How many tokens before `place` in the text equal the last ones of the context."""
    length = 0
    while length < min(max_match, place, len(context)) and text[place - 1 - length] == context[-1 - length]:
        length += 1
    return length


def by_recency(followers: Sequence[int]) -> dict[int, int]:
    """Counts, the token that came last in front."""
    counts: dict[int, int] = {}
    for token in reversed(followers):
        counts[token] = counts.get(token, 0) + 1
    return counts


def rescan(text: Sequence[int], context: Sequence[int], max_match: int) -> dict[int, dict[int, int]]:
    """By match length, the followers of all occurrences of the last so many tokens of the context."""
    lengths = [matched(text, context, place, max_match) for place in range(len(text))]
    return {
        length: by_recency([text[place] for place in range(len(text)) if lengths[place] >= length])
        for length in range(1, max(lengths) + 1)
    }


def oracle_shares(
    text: Sequence[int], context: Sequence[int], draft: ContextPredictor, max_match: int
) -> dict[int, float]:
    """Every occurrence of the context votes at its longest match."""
    shares: dict[int, float] = {}
    rest = 1.0
    found = rescan(text, context, max_match)
    for length in sorted(found, reverse=True):
        seen = list(found[length])[: draft.max_occurrences]
        own = {token: found[length][token] - found.get(length + 1, {}).get(token, 0) for token in seen}
        own = {token: votes for token, votes in own.items() if votes}
        if own:
            unseen = draft.escape_weights[length] * len(own)
            scale = rest / (sum(own.values()) + unseen)
            rest = scale * unseen
            for token, votes in own.items():
                shares[token] = shares.get(token, 0.0) + scale * votes
    recent = list(by_recency(text))[: draft.max_occurrences]
    spread = {token: len({text[p - 1] if p else None for p, t in enumerate(text) if t == token}) for token in recent}
    if draft.background:
        scale = draft.background / sum(spread.values())
        for token in sorted(recent, key=lambda token: -spread[token]):
            shares.setdefault(token, rest * (scale * spread[token]))
    return shares


def oracle_tree(text: Sequence[int], limit: TreeLimits, draft: TextDraft, max_match: int = 8) -> TokenTree:
    """The tree without pruning, from candidates that come out of a scan of the text at every node."""

    predictor = draft.predictors[0]
    assert isinstance(predictor, ContextPredictor)

    def expand(builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]) -> list[list[list[Candidate]]]:
        found = []
        for node in frontier[0]:
            path: list[int] = []
            while node:
                path.insert(0, builders[0].tokens[node])
                node = builders[0].parents[node]
            shares = oracle_shares(text, [*text, *path], predictor, max_match)
            assert 0.0 < sum(shares.values()) <= 1.0 + 1e-12 or not shares
            ranked = sorted(shares.items(), key=lambda item: -item[1])
            found.append([Candidate(token, math.log(share)) for token, share in ranked])
        return [found]

    return grow([text[-1]], expand, [limit], draft.growth)[0][0]


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.lists(st.integers(1, 6), max_size=10), st.integers(1, 6), st.lists(st.integers(0, 4), max_size=6))
def test_the_incremental_index_equals_a_scan_of_the_text(
    text: list[int], steps: list[int], max_match: int, path: list[int]
) -> None:
    index = NgramIndex(max_match)
    seen = 0
    for step in [*steps, len(text)]:
        seen = min(seen + step, len(text))
        index.update(text[:seen])
        assert len(index) == seen
        for context in (text[:seen], [*text[:seen], *path]):
            expected = rescan(text[:seen], context, max_match)
            # Of contexts with the same occurrences only the longest is told.
            last = {sum(counts.values()): length for length, counts in sorted(expected.items())}
            found = index.match(reversed(context))
            assert [match.length for match in found] == sorted(last.values())
            for match in found:
                assert list(reversed(match.counts.items())) == list(expected[match.length].items())
        spread = {token: len({p for p, t in pairwise([-1, *text[:seen]]) if t == token}) for token in text[:seen]}
        assert list(reversed(index.spread.items())) == [(token, spread[token]) for token in by_recency(text[:seen])]


@settings(max_examples=150, deadline=None)
@given(TEXTS, LIMITS, SETTINGS)
def test_the_tree_equals_that_of_the_oracle(text: list[int], limit: TreeLimits, kwargs: dict[str, object]) -> None:
    tree = propose(text, limit, **kwargs)
    assert tree == oracle_tree(text, limit, NgramDraft(**kwargs), kwargs["max_match"])  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(TEXTS, LIMITS, SETTINGS)
def test_trees_keep_their_limits_and_root(text: list[int], limit: TreeLimits, kwargs: dict[str, object]) -> None:
    tree = propose(text, limit, **kwargs)
    assert tree.tokens[0] == text[-1]
    assert tree.drafted <= limit.max_nodes and tree.max_depth <= limit.max_depth
    assert all(len(tree.children(node)) <= limit.max_children for node in range(len(tree)))
    assert set(tree.tokens) <= set(text)


@settings(max_examples=100, deadline=None)
@given(TEXTS, LIMITS, SETTINGS)
def test_every_path_continues_a_match(text: list[int], limit: TreeLimits, kwargs: dict[str, object]) -> None:
    tree = propose(text, limit, **{**kwargs, "background": 0.0})
    pairs = set(pairwise(text))
    # Every edge occurs in the text, be it by reading on or by matching the path's own last token again.
    assert all((tree.tokens[tree.parents[node]], tree.tokens[node]) in pairs for node in range(1, len(tree)))
    # And a tree there is, unless nothing has ever followed the last token.
    assert bool(tree.drafted) == (text[-1] in text[:-1])


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.integers(1, 5))
def test_with_little_novelty_the_longest_match_decides(text: list[int], max_match: int) -> None:
    tree = propose(text, limits(1), max_match=max_match, novelty=1e-4, background=0.0)
    found = rescan(text, text, max_match)
    assert bool(tree.drafted) == bool(found)
    if found:
        votes = found[max(found)]
        assert votes[tree.tokens[1]] == max(votes.values())


def test_the_longest_match_wins_over_the_more_frequent_one() -> None:
    text = [1, 2, 3, 9, 5, 2, 3, 8, 6, 2, 3, 8, 7, 1, 2, 3]
    assert children(propose(text, limits(1))) == [9]
    assert children(propose(text, limits(1), max_match=2)) == [8]
    # An occurrence does not vote again at the shorter lengths: two of (2, 3) are left for 8, one for 7.
    ranked = children(propose([1, 2, 3, 9, 5, 2, 3, 8, 6, 2, 3, 8, 4, 2, 3, 7, 0, 1, 2, 3], limits(3, 1)))
    assert ranked == [9, 8, 7]


def test_count_ranks_equal_matches_and_recency_breaks_ties() -> None:
    assert children(propose([5, 1, 5, 2, 5], limits(2, 1))) == [2, 1]
    assert children(propose([5, 2, 5, 1, 5], limits(2, 1))) == [1, 2]
    assert children(propose([5, 1, 5, 1, 5, 2, 5], limits(2, 1))) == [1, 2]
    # Of tokens that nothing predicts the one in more different surroundings comes first, then the more recent one.
    assert children(propose([3, 1, 4, 1, 2, 0, 2, 0, 9], limits(4, 1))) == [2, 1, 9, 0]
    # Where matches count for nothing, the commonest token is proposed at every depth.
    text = [token for other in range(1, 7) for token in (0, other)]
    assert propose(text, limits(4, 16, 1), novelty=1e6, background=1.0) == TokenTree.chain([6, 0, 0, 0, 0])


def test_a_longer_match_is_trusted_more() -> None:
    rare = [1, 2, 3, 9, 8, 7, 6, 5]
    # After a match of three tokens the whole budget follows it; after one of a single token a part goes elsewhere.
    assert propose([*rare, 1, 2, 3], limits(6)) == TokenTree.chain([3, 9, 8, 7, 6, 5, 1])
    assert children(propose([*rare, 3], limits(6))) == [9, 3, 5]


@pytest.mark.parametrize("period", [1, 2, 3, 5, 11])
def test_periodic_text_repeats_beyond_its_end(period: int) -> None:
    text = [10 + place % period for place in range(2 * period + 1)]
    tree = propose(text, limits(16), background=0.0)
    assert tree == TokenTree.chain([10 + place % period for place in range(2 * period, 2 * period + 17)])


def test_a_continuation_that_ends_matches_its_own_last_tokens_again() -> None:
    # The only match of (1, 2) reads on to the end of the text, where the path (..., 1, 2) matches once more.
    text = [7, 1, 2, 3, 4, 1, 2]
    assert propose(text, limits(8), background=0.0) == TokenTree.chain([2, 3, 4, 1, 2, 3, 4, 1, 2])


def test_only_the_most_recent_followers_are_looked_at() -> None:
    text = [token for follower in range(100, 150) for token in (1, follower)] + [1]
    assert children(propose(text, WIDE, max_occurrences=3, background=0.0)) == [149, 148, 147]
    assert len(children(propose(text, limits(64, 1, 64), background=0.0))) == 40


def test_without_background_a_new_token_has_no_children() -> None:
    assert propose([1, 2, 3], WIDE, background=0.0) == TokenTree.root_only(3)
    assert propose([1, 2, 3], limits(2, 1)).drafted == 2


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(TEXTS, st.lists(st.integers(0, 6), min_size=1, max_size=8)), min_size=1, max_size=3),
    st.lists(LIMITS, min_size=3, max_size=3),
    SETTINGS,
)
def test_rows_are_independent_and_history_does_not_matter(
    script: list[tuple[list[int], list[int]]], budgets: list[TreeLimits], kwargs: dict[str, object]
) -> None:
    """Rows that grow by different amounts, some not at all, equal a source that meets each row alone and whole."""
    draft = NgramDraft(**kwargs)  # type: ignore[arg-type]
    rows = [DraftRow(index, text[:1]) for index, (text, _) in enumerate(script)]
    budgets = budgets[: len(rows)]
    for time in range(8):
        trees = draft.propose(rows, budgets)
        draft.commit([list(range(min(2, len(tree)))) for tree in trees])
        for row, tree, limit in zip(rows, trees, budgets, strict=True):
            before = list(row.tokens)
            assert tree == propose(row.tokens, limit, **kwargs)
            assert row.tokens == before
        for row, (text, growth) in zip(rows, script, strict=True):
            done = len(row.tokens)
            row.tokens.extend(text[done : done + growth[time % len(growth)]])


def test_a_row_without_budget_is_read_when_it_has_one() -> None:
    draft = NgramDraft()
    rows = [DraftRow(0, [1, 2, 1]), DraftRow(1, [3, 4, 3])]
    none = limits(0)
    assert draft.propose(rows, [none, limits(1)]) == [TokenTree.root_only(1), TokenTree.chain([3, 4])]
    flat = TreeLimits(max_nodes=4, max_depth=0, max_children=1)
    assert draft.propose(rows, [flat, none]) == [TokenTree.root_only(1), TokenTree.root_only(3)]
    rows[0].tokens += [2, 5, 1, 2]
    assert draft.propose(rows, [limits(1), none]) == [TokenTree.chain([2, 5]), TokenTree.root_only(3)]
    text = CountedText([4] * 50)
    for limit in (none, flat):
        text.reads = 0
        draft.propose([DraftRow(2, text)], [limit])
        assert text.reads == 1, "only the root"


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1, 2, 3, 5], [9, 8, 7, 6, 5], [1]])
def test_a_row_that_did_not_merely_grow_is_an_internal_error(tokens: list[int]) -> None:
    draft = NgramDraft()
    row = DraftRow(0, [1, 2, 3, 4])
    draft.propose([row], [limits(4)])
    row.tokens = tokens
    with pytest.raises(TreeSpecError, match=r"internal error: .* has read 4 tokens ending in \[1, 2, 3, 4\]"):
        draft.propose([row], [limits(4)])


class CountedText(list[int]):
    """A text that counts how many of its tokens are read."""

    reads = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        found = super().__getitem__(key)
        self.reads += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self):  # type: ignore[no-untyped-def]
        raise AssertionError("the whole text must not be walked through")

    def __reversed__(self):  # type: ignore[no-untyped-def]
        for place in range(len(self) - 1, -1, -1):
            yield self[place]


def reads_of_one_proposal(length: int) -> int:
    text = CountedText((place * place) % 11 for place in range(length))
    draft, row = NgramDraft(max_match=4), DraftRow(0, text)
    draft.propose([row], [limits(16)])
    text.append(3)
    text.reads = 0
    draft.propose([row], [limits(16)])
    return text.reads


def test_a_proposal_reads_no_more_of_a_longer_text() -> None:
    assert reads_of_one_proposal(2000) == reads_of_one_proposal(200) < 400


def test_candidates_that_cannot_enter_the_tree_do_not_enter_the_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = 0
    add = TreeBuilder.add

    def counted(builder: TreeBuilder, parent: int, token: int, log_confidence: float) -> int:
        nonlocal entered
        entered += 1
        return add(builder, parent, token, log_confidence)

    monkeypatch.setattr(TreeBuilder, "add", counted)
    rng = random.Random(0)
    text = [rng.randrange(30) for _ in range(400)]
    assert propose(text, limits(16)).drafted == 16
    assert entered <= 64
    entered = 0
    propose([1, 2, 3, 4, 5, 6, 7, 8, 9] * 20, limits(16))
    assert entered <= 64


def test_a_text_of_new_tokens_is_kept_in_one_context_per_token() -> None:
    index = NgramIndex(8)
    index.update(range(100))
    index.update([*range(100), *range(50)])

    def count(level: dict[int, object]) -> int:
        return len(level) + sum(count(getattr(context, "longer", None) or {}) for context in level.values())

    # 100 contexts of one token, and the lengths 2 to 8 of the 49 that came again.
    assert 100 <= count(index._roots) <= 100 + 49 * 9  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("growth", "greedy"),
        ("max_match", 0),
        ("max_occurrences", 0),
        ("novelty", 0.0),
        ("novelty", float("inf")),
        ("novelty", float("nan")),
        ("novelty_decay", 0.0),
        ("novelty_decay", 1.1),
        ("background", -0.1),
        ("background", 1.1),
    ],
)
def test_arguments_are_checked(name: str, value: object) -> None:
    with pytest.raises(TreeConfigError, match=f"^{name}="):
        NgramDraft(**{name: value})  # type: ignore[arg-type]


def test_it_is_a_draft_with_keyword_arguments_only() -> None:
    draft: Draft = NgramDraft()
    assert draft.name == "ngram"
    with pytest.raises(TypeError):
        NgramDraft("best_first")  # type: ignore[misc]
