"""The n-gram pool: what it finds, in which order, and what it forgets."""

from __future__ import annotations

from hf_treespec.draft.ngram_pool import Continuation, NgramPool


def pool(*grams: tuple[int, ...], ngram: int = 3, candidates: int = 3) -> NgramPool:
    out = NgramPool(ngram, candidates)
    for gram in grams:
        out.add(gram, guessed=True)
    return out


def test_the_oldest_n_gram_of_a_token_makes_room_and_one_that_comes_again_is_new() -> None:
    one = pool((1, 2, 3), (1, 4, 5), (1, 6, 7))
    assert one.of(1) == [(6, 7), (4, 5), (2, 3)]
    one.add((1, 2, 3), guessed=True)
    assert one.of(1) == [(2, 3), (6, 7), (4, 5)]
    one.add((1, 8, 9), guessed=True)
    assert one.of(1) == [(8, 9), (2, 3), (6, 7)]
    # Other first tokens have room of their own.
    one.add((2, 8, 9), guessed=True)
    assert one.of(1) == [(8, 9), (2, 3), (6, 7)] and one.of(2) == [(8, 9)] and one.of(3) == []


def test_the_longest_match_comes_first_then_the_latest() -> None:
    one = pool((1, 2, 3), (2, 4, 9), (1, 2, 5), (2, 6, 9))
    assert one.after([7, 1, 2]) == [
        Continuation(5, 2, 0, True), Continuation(3, 2, 1, True), Continuation(6, 1, 0, True),
        Continuation(4, 1, 1, True),
    ]  # fmt: skip
    assert [found.token for found in one.after([2])] == [6, 4]
    assert [found.token for found in one.after([2, 6])] == [9]
    assert one.after([]) == one.after([9]) == []


def test_a_token_is_named_once_by_its_longest_match() -> None:
    one = pool((1, 2, 3), (2, 3, 9), (2, 3, 8), (2, 5, 5))
    assert one.after([1, 2]) == [Continuation(3, 2, 0, True), Continuation(5, 1, 0, True)]


def test_shorter_n_grams_match_as_far_as_they_go() -> None:
    one = pool((1, 2), (1, 3, 4))
    assert [found.token for found in one.after([1])] == [3, 2]
    assert [found.token for found in one.after([1, 3])] == [4]
    assert one.after([1, 2]) == []


def test_what_stands_in_a_text_is_no_guess() -> None:
    one = pool((1, 2, 3))
    one.add((1, 2, 4), guessed=False)
    assert one.after([1]) == [Continuation(2, 1, 0, False)]
    assert [found.guessed for found in one.after([1, 2])] == [False, True]
    # Once read in a text, for ever.
    one.add((1, 2, 3), guessed=False)
    one.add((1, 2, 3), guessed=True)
    assert one.after([1, 2]) == [Continuation(3, 2, 0, False), Continuation(4, 2, 1, False)]
