"""What judged trees tell of depths, ranks and confidences, and the estimates that come of it."""

from __future__ import annotations

import random
from math import exp, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_treespec.control.acceptance import Acceptance, falling, gains_by_depth, tables
from hf_treespec.control.confidence import ConfidenceMap, confidences_of
from hf_treespec.control.samples import Sample, by_chance, by_text
from hf_treespec.tree import TokenTree, TreeLimits, best_first_shape
from hf_treespec.verify.draw import expected_accepted, taken

BUSH = TokenTree((9, 1, 2, 3, 4), (-1, 0, 0, 1, 1), tuple(map(log, (1.0, 0.5, 0.25, 0.4, 0.1))))


def test_the_text_tells_of_every_child_that_it_went_by() -> None:
    assert list(by_text(BUSH, [1, 4, 7])) == [
        Sample(1, 0, 0, 1.0, 1.0), Sample(2, 0, 1, 1.0, 0.0), Sample(3, 1, 0, 1.0, 0.0), Sample(4, 1, 1, 1.0, 1.0),
    ]  # fmt: skip
    assert [sample.node for sample in by_text(BUSH, [5, 1])] == [1, 2]
    assert not list(by_text(TokenTree.root_only(9), [1]))


def random_tree(rng: random.Random, nodes: int) -> TokenTree:
    return TokenTree(tuple(range(nodes)), (-1, *(rng.randrange(node) for node in range(1, nodes))))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.booleans())
def test_coins_tell_of_every_node_what_they_make_likely(seed: int, nodes: int, joint: bool) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, nodes)
    accept = [1.0, *(rng.choice((0.0, 1.0, rng.random())) for _ in range(nodes - 1))]
    chances = taken(accept, tree, joint=joint)
    samples = list(by_chance(tree, chances))
    assert {sample.node for sample in samples} == set(range(1, nodes))
    assert all(0.0 <= sample.hit <= 1.0 + 1e-12 and sample.rank < nodes for sample in samples)
    # All nodes together are the expected accepted tokens.
    total = sum(sample.weight * sample.hit for sample in samples)
    assert total == pytest.approx(expected_accepted([accept], [tree], joint=joint), abs=1e-12)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 5)), min_size=1, max_size=7))
def test_the_nearest_falling_sequence_is_that_of_pooled_violators(pairs: list[tuple[float, float]]) -> None:
    # Pool adjacent violators (Ayer et al. 1955).
    blocks: list[tuple[float, float, int]] = []
    for value, weight in pairs:
        mean, mass, count = value, weight, 1
        while blocks and blocks[-1][0] < mean:
            above, more, length = blocks.pop()
            mean = (mean * mass + above * more) / (mass + more)
            mass, count = mass + more, count + length
        blocks.append((mean, mass, count))
    values, weights = np.array(pairs).T
    other = np.full(len(pairs), 0.5)
    # Row by row of several.
    out, still = falling(np.stack([values, other]), np.stack([weights, weights]))
    assert out == pytest.approx([mean for mean, _, count in blocks for _ in range(count)], abs=1e-9)
    assert still == pytest.approx(other)


def simulated(table: Acceptance, law: list[list[float]], rounds: int, seed: int = 0) -> None:
    """Judge full trees of two children a node along the accepted path, whose law of being right is given."""
    rng = random.Random(seed)
    for _ in range(rounds):
        samples = []
        for depth, ranks in enumerate(law):
            hit = rng.choices(range(len(ranks) + 1), [*ranks, 1 - sum(ranks)])[0]
            samples += [Sample(0, depth, rank, 1.0, float(rank == hit)) for rank in range(len(ranks))]
            if hit == len(ranks):
                break
        table.add(samples)


def test_estimates_come_near_the_law_and_follow_it() -> None:
    table = Acceptance(3, 2)
    start = table.table()
    assert start.shape == (3, 2) and (start[:, 0] > 0.5).all()
    law = [[0.7, 0.2], [0.5, 0.3], [0.4, 0.1]]
    mean = np.zeros((3, 2))
    for seed in range(30):
        simulated(table, law, 30, seed)
        mean += table.table() / 30
    assert np.abs(mean - np.array(law)).max() < 0.06
    # A draft that is swapped for one that is never right is known to be useless after a few rounds.
    simulated(table, [[0.0, 0.0]] * 3, 30)
    assert table.table()[0].sum() < 0.25
    assert (np.diff(table.table(), axis=1) <= 1e-12).all() and (table.table().sum(1) <= 1 + 1e-12).all()


def test_depths_that_were_not_seen_go_by_those_that_were() -> None:
    good, bad = Acceptance(4, 2), Acceptance(4, 2)
    simulated(good, [[0.9, 0.05]], 40)
    simulated(bad, [[0.1, 0.05]], 40)
    assert good.table()[3, 0] > 0.6 > bad.table()[3, 0] + 0.2
    # Fading keeps what is known, and makes it easy to change.
    before = bad.table()[0, 0]
    bad.fade(3.0)
    assert bad.table()[0, 0] == pytest.approx(before, abs=0.25)
    simulated(bad, [[1.0, 0.0]], 3)
    assert bad.table()[0, 0] > 0.5


def test_rows_share_a_curve_and_keep_their_own() -> None:
    shared = Acceptance(2, 2)
    one, other, fresh = (Acceptance(2, 2, shared) for _ in range(3))
    simulated(one, [[1.0, 0.0], [1.0, 0.0]], 30)
    simulated(other, [[0.0, 0.0], [0.0, 0.0]], 30)
    assert one.table()[0, 0] > 0.9 and other.table()[0, 0] < 0.1 and 0.3 < fresh.table()[0, 0] < 0.8
    for told, own in zip(tables([one, other, fresh, shared]), (one, other, fresh, shared), strict=True):
        assert told == pytest.approx(own.table())
    # The next call begins half way between hope and what this one found.
    later = Acceptance(2, 2, earlier=other)
    assert other.pooled()[0] < later.pooled()[0] < Acceptance(2, 2).pooled()[0]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3))
def test_gains_are_those_of_the_best_static_tree(seed: int, depth: int, ranks: int) -> None:
    rng = random.Random(seed)
    table = np.array([sorted((rng.random() / ranks for _ in range(ranks)), reverse=True) for _ in range(depth)])
    sizes = list(range(12))
    gains = gains_by_depth(table, sizes)
    assert gains_by_depth(np.stack([0.5 * table, table]), sizes)[1] == pytest.approx(gains)
    assert gains.shape == (depth + 1, 12) and not gains[0].any() and not gains[:, 0].any()
    for deep in range(1, depth + 1):
        for size in sizes:
            limits = TreeLimits(max_nodes=size, max_depth=deep, max_children=ranks, ranks=tuple(map(tuple, table)))
            shape = best_first_shape(limits)
            reach = [1.0]
            for node in range(1, len(shape)):
                reach.append(reach[shape.parents[node]] * table[shape.depths[node] - 1, shape.tokens[node]])
            assert gains[deep, size] == pytest.approx(sum(reach[1:]))


def chains(confidence: ConfidenceMap, share: float, right: float, count: int) -> None:
    rng = random.Random(0)
    for _ in range(count):
        confidence.add([Sample(1, 0, 0, 1.0, float(rng.random() < right))], [0.0, log(share)])
        confidence.learn()


def test_a_map_begins_with_trust_and_learns_what_confidence_is_worth() -> None:
    confidence = ConfidenceMap()
    for share in (0.01, 0.3, 0.5, 0.9, 0.99):
        assert confidence(log(share), 0) == pytest.approx(share, abs=0.03)
    chains(confidence, 0.9, 0.4, 200)
    chains(confidence, 0.2, 0.35, 200)
    assert confidence(log(0.9), 0) == pytest.approx(0.4, abs=0.12) and confidence(log(0.2), 0) == pytest.approx(
        0.35, abs=0.1
    )
    grid = [confidence(log(share / 100), 0) for share in range(1, 100)]
    assert grid == sorted(grid) and confidence(0.0, 0) <= 1.0 and confidence(float("-inf"), 9) >= 0.0


def test_what_is_added_counts_from_the_next_round_on() -> None:
    confidence = ConfidenceMap()
    before = confidence(log(0.9), 0)
    for _ in range(100):
        confidence.add([Sample(1, 0, 0, 1.0, 0.0)], [0.0, log(0.9)])
    assert confidence(log(0.9), 0) == before
    confidence.learn()
    assert confidence(log(0.9), 0) < 0.3


def test_trees_are_scored_anew_by_the_map() -> None:
    assert [round(exp(one), 6) for one in confidences_of(BUSH)] == [1.0, 0.5, 0.25, 0.8, 0.2]
    confidence = ConfidenceMap()
    chains(confidence, 0.5, 0.0, 300)
    told = confidence.rescored(BUSH)
    assert told == BUSH and told.scores is not None
    for node in range(1, len(BUSH)):
        own = confidence(confidences_of(BUSH)[node], BUSH.depths[node] - 1)
        assert told.scores[node] == pytest.approx(told.scores[told.parents[node]] + log(max(own, 1e-4)))
    plain = TokenTree.chain([1, 2])
    assert confidence.rescored(plain) is plain and confidences_of(plain) == []
