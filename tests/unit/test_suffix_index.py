"""The suffix automaton against a scan of the text, and what it costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_treespec import TreeSpecError
from hf_treespec.draft import DraftRow, SuffixDraft
from hf_treespec.draft.ngram_index import NgramIndex
from hf_treespec.draft.suffix_index import SuffixIndex
from hf_treespec.tree import TokenTree, TreeLimits

ENDLESS = 10_000


def make_text(seed: int) -> list[int]:
    """Few tokens, or many, and copies of earlier spans, so that long matches, ties and periods are common."""
    rng = random.Random(seed)
    size, length = rng.choice((1, 2, 3, 4, 6, 20)), rng.randint(1, 60)
    text = [rng.randrange(size)]
    while len(text) < length:
        start = rng.randrange(len(text))
        text += text[start : start + rng.randint(2, 20)] if rng.random() < 0.4 else [rng.randrange(size)]
    return text


def scan(text: list[int], path: list[int]) -> list[tuple[int, list[tuple[int, int]]]]:
    """By match length, the longest first, the followers of all occurrences and their counts, the most recent last."""
    context = [*text, *path]
    found: dict[int, tuple[int, list[tuple[int, int]]]] = {}
    for length in range(1, len(context) + 1):
        wanted = context[len(context) - length :]
        places = [p for p in range(length, len(text)) if text[p - length : p] == wanted]
        if not places:
            break
        counts: dict[int, int] = {}
        for place in places:
            counts[text[place]] = counts.pop(text[place], 0) + 1
        # Of contexts with the same occurrences only the longest is told.
        found[len(places)] = length, list(counts.items())
    return list(reversed(found.values()))


def told(index: SuffixIndex, path: list[int]) -> list[tuple[int, list[tuple[int, int]]]]:
    matches = [(m.length, list(m.counts.items()), sum(m.counts.values())) for m in index.after(path)]
    # A state that differs from the one before by the end of the text alone has no votes of its own left.
    return [
        (length, counts)
        for place, (length, counts, total) in enumerate(matches)
        if not place or total != matches[place - 1][2]
    ]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32).map(make_text),
    st.lists(st.integers(1, 9), max_size=8),
    st.lists(st.integers(0, 5), max_size=6),
)
def test_the_automaton_equals_a_scan_of_the_text(text: list[int], steps: list[int], path: list[int]) -> None:
    index, short = SuffixIndex(ENDLESS, ENDLESS), NgramIndex(1)
    seen = 0
    for step in [*steps, len(text)]:
        seen = min(seen + step, len(text))
        index.update(text[:seen])
        short.update(text[:seen])
        assert len(index) == seen and index.states <= 2 * seen + 1
        assert list(index.spread.items()) == list(short.spread.items())
        for ahead in ([], path, text[seen : seen + 4], [*path, 99], [99, *path]):
            assert told(index, ahead) == scan(text[:seen], ahead)


def test_recent_followers_are_last_and_what_never_followed_counts_nothing() -> None:
    index = SuffixIndex()
    index.update([1, 5, 1, 6, 1, 5, 1])
    *_, match = index.after([])
    assert list(reversed(match.counts)) == [5, 6] and len(match.counts) == 2
    assert match.counts[5] == 2 and match.counts.get(6) == 1 and match.counts.get(7) == 0
    assert list(index.after([8])) == []


@pytest.mark.parametrize("period", [1, 3])
def test_a_text_of_one_period_costs_no_more_per_token(period: int) -> None:
    index, steps = SuffixIndex(), 0
    links = index._links

    class Counted(list[int]):
        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            nonlocal steps
            steps += 1
            return super().__getitem__(key)

    index._links = Counted(links)
    text = [place % period for place in range(3000)]
    index.update(text)
    assert steps < 3000 * (index.max_updates + 4)
    steps = 0
    assert len(list(index.after([]))) == index.max_matches and steps < 40


def test_a_row_that_did_not_merely_grow_is_an_internal_error() -> None:
    index = SuffixIndex()
    index.update([1, 2, 3])
    for text in ([1, 2], [1, 2, 4, 5], []):
        with pytest.raises(TreeSpecError, match=r"suffix index has read 3 tokens ending in \[1, 2, 3\]"):
            index.update(text)


def test_longer_contexts_than_an_n_gram_has_decide() -> None:
    # The last 12 tokens came before in two surroundings, which only the tokens in front of them tell apart.
    middle = list(range(20, 32))
    text = [1, *middle, 7, *([2, *middle, 8] * 3), 1, *middle]
    limits = TreeLimits(max_nodes=1, max_depth=1, max_children=1)
    assert SuffixDraft().propose([DraftRow(0, text)], [limits]) == [TokenTree.chain([31, 7])]
    assert SuffixDraft().name == "suffix"


@pytest.mark.parametrize("period", [1, 2, 5, 11])
def test_periodic_text_repeats_beyond_its_end(period: int) -> None:
    text = [10 + place % period for place in range(2 * period + 1)]
    limits = TreeLimits(max_nodes=16, max_depth=16, max_children=4)
    tree = SuffixDraft(background=0.0).propose([DraftRow(0, text)], [limits])[0]
    assert tree == TokenTree.chain([10 + place % period for place in range(2 * period, 2 * period + 17)])
