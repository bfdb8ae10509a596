"""What the size policy knows of gains, and how trees that were never scored are judged."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import pytest

from hf_treespec.control.estimates import GainCurve
from hf_treespec.control.proposals import BestParts, Proposal, ProposalLog
from hf_treespec.tree import TokenTree

SIZES = (0, 1, 2, 4, 8)


def test_gains_correct_the_draft_and_forget() -> None:
    gains = GainCurve(SIZES)
    assert gains.expected(2, 1.5) == 1.5
    for _ in range(80):
        gains.add(2, 3, 1.0)
    # Three times too modest, but for the start from trust.
    assert 2.5 < gains.expected(2, 1.0) < 3.0 and gains.expected(2, 2.0) == 2 * gains.expected(2, 1.0)
    for _ in range(80):
        gains.add(2, 0, 1.0)
    assert gains.expected(2, 1.0) < 0.15 and gains.expected(3, 1.0) == 1.0
    for _ in range(10_000):
        gains.add(3, 0, 0.0)
    assert gains.expected(3, 1.0) == 1.0


def tree() -> TokenTree:
    """Root 9; two children 1 and 2; below 1 a chain 3, 4."""
    return TokenTree((9, 1, 2, 3, 4), (-1, 0, 0, 1, 3), tuple(map(log, (1.0, 0.5, 0.4, 0.3, 0.2))))


def test_predictions_sum_the_probabilities_of_the_best_nodes() -> None:
    parts = BestParts(tree(), SIZES)
    assert parts.predicted == pytest.approx([0.0, 0.5, 0.9, 1.4, 1.4])
    assert parts.of(2) == [1, 2] and parts.of(4) == [1, 2, 3, 4]
    assert BestParts(TokenTree.chain([1, 2]), SIZES).predicted == [0.0] * 5


def proposal(length: int, tree: TokenTree, sizes: Sequence[int] = SIZES) -> Proposal:
    return Proposal(length, BestParts(tree, sizes))


class Seen(GainCurve):
    """Keeps the samples."""

    def __init__(self) -> None:
        super().__init__(SIZES)
        self.samples: list[tuple[int, int]] = []

    def add(self, place: int, accepted: int, predicted: float) -> None:
        self.samples.append((SIZES[place], accepted))
        super().add(place, accepted, predicted)


def test_a_tree_is_judged_once_the_text_tells() -> None:
    seen = Seen()
    log_ = ProposalLog(SIZES, seen)
    log_.add(0, 8, {0: proposal(1, tree())})
    log_.judge({0: [9]})
    log_.judge({0: [9, 1]})
    log_.judge({0: [9, 1, 3]})
    assert not seen.samples  # 4 may still follow
    log_.judge({0: [9, 1, 3, 5]})
    # One node: only 1. Two: 1 and its sibling. Four: down to 3.
    assert seen.samples == [(0, 0), (1, 1), (2, 1), (4, 2), (8, 2)]
    log_.judge({0: [9, 1, 3, 5]})
    assert len(seen.samples) == 5


def test_a_leaf_ends_the_wait_and_sizes_beyond_the_limit_learn_nothing() -> None:
    seen = Seen()
    log_ = ProposalLog(SIZES, seen)
    log_.add(0, 4, {0: proposal(1, tree())})
    log_.judge({0: [9, 2]})
    assert seen.samples == [(0, 0), (1, 0), (2, 1), (4, 1)]


def test_an_imagined_round_begins_where_the_last_one_ended() -> None:
    seen = Seen()
    log_ = ProposalLog((0, 8), seen)
    text = [0, 1, 2, 3, 4, 5, 6, 7]
    # Plain rounds, each with a chain of two right tokens: a decoder with such trees takes every third.
    for emitted in range(5):
        log_.add(emitted, 8, {0: proposal(emitted + 1, TokenTree.chain(text[emitted : emitted + 3]), (0, 8))})
    log_.judge({0: text})
    assert seen.samples.count((8, 2)) == 0 and [s for s in seen.samples if s[1]] == [(1, 2), (1, 2)]


def test_of_rows_in_step_the_shortest_counts_and_ended_rows_do_not() -> None:
    seen = Seen()
    log_ = ProposalLog(SIZES, seen)
    log_.add(0, 1, {0: proposal(1, TokenTree.chain([5, 6])), 1: proposal(2, TokenTree.chain([5, 6]))})
    log_.judge({0: [5, 6], 1: [0, 5]})
    assert not seen.samples
    log_.judge({0: [5, 6], 1: [0, 5, 7]})
    assert seen.samples == [(0, 0), (1, 0)]
    log_.add(1, 1, {0: proposal(2, TokenTree.chain([6, 7])), 1: proposal(3, TokenTree.chain([7, 8]))})
    log_.judge({0: [5, 6, 7]})
    assert seen.samples[2:] == [(0, 0), (1, 1)]
    log_.add(3, 1, {0: proposal(3, TokenTree.chain([7, 8]))})
    log_.judge({})
    assert len(seen.samples) == 4


def test_trees_that_were_scored_all_count() -> None:
    seen = Seen()
    log_ = ProposalLog((0, 8), seen)
    text = [0, 1, 2, 3, 4]
    for emitted in range(3):
        log_.add(
            emitted, 8, {0: proposal(emitted + 1, TokenTree.chain(text[emitted : emitted + 3]), (0, 8))}, scored=True
        )
    log_.judge({0: text})
    assert [sample for sample in seen.samples if sample[0]] == [(1, 2)] * 3
