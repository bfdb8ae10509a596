"""The recycling table by hand: what it learns, what it forgets, and how it is turned into trees."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_treespec import disable, enable, install, uninstall
from hf_treespec.draft import DraftRow, RecyclePredictor, RecycleTable, TextDraft, forget_tables, table_of
from hf_treespec.draft import recycle as module
from hf_treespec.tree import TokenTree, TreeLimits
from hf_treespec.verify import GumbelNoise
from tiny import build

VOCAB = 12


def laws(*rows: dict[int, float]) -> Tensor:
    """Logits `[1, N, V]` of laws with these probabilities; tokens that are not named share the rest."""
    out = torch.empty(1, len(rows), VOCAB)
    for node, law in enumerate(rows):
        rest = (1.0 - sum(law.values())) / (VOCAB - len(law))
        for token in range(VOCAB):
            out[0, node, token] = math.log(law.get(token, rest) + 1e-30) + 3.0 * node
    return out


def candidates(table: RecycleTable, token: int) -> list[tuple[int, float]]:
    return [(candidate, round(share, 3)) for candidate, share in table.of(token)]


def new(count: int = 2, **changes: Any) -> RecyclePredictor:
    return RecyclePredictor(RecycleTable(VOCAB, count), **{"readable": VOCAB, **changes})


def test_every_scored_node_is_learnt_visited_or_not() -> None:
    predictor = new()
    # 3 -> {4 -> 5, 6}; the target goes 3, 4.
    tree = TokenTree((3, 4, 6, 5), (-1, 0, 0, 1))
    logits = laws({4: 0.6, 6: 0.3}, {7: 0.5, 5: 0.4}, {8: 0.9, 1: 0.05}, {2: 0.7, 9: 0.1})
    predictor.observe([tree], logits, [[0, 1]])
    table = predictor.table
    assert candidates(table, 3) == [(4, 0.6), (6, 0.3)]
    assert candidates(table, 4) == [(7, 0.5), (5, 0.4)]
    assert candidates(table, 6) == [(8, 0.9), (1, 0.05)]
    assert candidates(table, 5) == [(2, 0.7), (9, 0.1)]
    assert not any(table.knows(token) for token in (0, 1, 2, 7, 8, 9, 10, 11))


def test_the_latest_word_stays_and_accepted_nodes_have_the_last() -> None:
    predictor = new()
    # Token 4 at three nodes; only the first of them was accepted.
    tree = TokenTree((3, 4, 4, 4), (-1, 0, 1, 2))
    logits = laws({4: 0.9}, {7: 0.8}, {8: 0.8}, {9: 0.8})
    predictor.observe([tree], logits, [[0, 1]])
    assert predictor.table.of(4)[0][0] == 7
    predictor.observe([tree], logits, [[0]])
    assert predictor.table.of(4)[0][0] == 9
    predictor.observe([tree], logits, [[0, 1, 2]])
    assert predictor.table.of(4)[0][0] == 8


def test_rows_that_took_no_part_and_filler_teach_nothing() -> None:
    predictor = new()
    trees = [TokenTree.root_only(3), TokenTree.chain([4, 5])]
    logits = laws({1: 0.9}, {2: 0.9}).repeat(2, 1, 1)
    logits[0, 1] = laws({6: 0.9})[0, 0]
    predictor.observe(trees, logits, [[0], []])
    assert predictor.table.of(3)[0][0] == 1
    assert not any(predictor.table.knows(token) for token in range(VOCAB) if token != 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_law_propose_nothing(bad: float) -> None:
    predictor = new()
    predictor.observe([TokenTree.root_only(3)], torch.full((1, 1, VOCAB), bad), [[0]])
    assert predictor.shares(DraftRow(0, [3]), [], 0.0) == {}
    predictor.observe([TokenTree.root_only(3)], laws({4: 0.6, 6: 0.3}), [[0]])
    predictor.observe([TokenTree.root_only(3)], torch.full((1, 1, VOCAB), bad), [[0]])
    assert candidates(predictor.table, 3) == [(4, 0.6), (6, 0.3)]
    partly = laws({1: 0.5, 2: 0.5})
    partly[0, 0, 3:] = -math.inf
    predictor.observe([TokenTree.root_only(3)], partly, [[0]])
    assert set(predictor.shares(DraftRow(0, [3]), [], 0.0)) == {1, 2}


def test_low_precision_and_small_vocabularies() -> None:
    predictor = RecyclePredictor(RecycleTable(3, 8), readable=3)
    logits = torch.tensor([[[0.0, 2.0, 1.0]]], dtype=torch.bfloat16)
    predictor.observe([TokenTree.root_only(1)], logits, [[0]])
    assert [token for token, _ in predictor.table.of(1)] == [1, 2, 0]
    assert sum(share for _, share in predictor.table.of(1)) == pytest.approx(1.0, abs=1e-3)


def test_the_prompt_fills_empty_rows_only() -> None:
    predictor = new(3)
    predictor.observe([TokenTree.root_only(1)], laws({7: 0.9, 8: 0.05, 9: 0.01}), [[0]])
    row = DraftRow(0, [1, 2, 5, 2, 6, 2, 5, 2, 7, 2, 3, 1])
    predictor.begin(row)
    # The three most recent followers of 2.
    assert candidates(predictor.table, 2) == [(3, 0.5), (7, 0.25), (5, 0.125)]
    assert predictor.table.of(1)[0][0] == 7
    # What comes later is known from the target.
    row.tokens += [10, 11]
    predictor.begin(row)
    assert not predictor.table.knows(10)


def test_the_tree_follows_the_most_probable_paths() -> None:
    draft = TextDraft([new()])
    predictor: Any = draft.predictors[0]
    tree = TokenTree((1, 2, 3), (-1, 0, 0))
    predictor.observe([tree], laws({2: 0.8, 3: 0.15}, {4: 0.9, 5: 0.05}, {6: 0.5, 7: 0.4}), [[0]])
    limits = TreeLimits(max_nodes=4, max_depth=3, max_children=4)
    (grown,) = draft.propose([DraftRow(0, [1])], [limits])
    # 0.8, 0.72, 0.15, 0.075; then 0.06 and 0.04 find no room.
    assert grown == TokenTree((1, 2, 3, 4, 6), (-1, 0, 0, 1, 2))
    assert grown.scores is not None
    assert [round(math.exp(score), 3) for score in grown.scores] == [1.0, 0.8, 0.15, 0.72, 0.075]


def test_ids_that_the_target_cannot_read_are_not_proposed() -> None:
    predictor = new(readable=7)
    predictor.observe([TokenTree.root_only(1)], laws({9: 0.6, 3: 0.3}), [[0]])
    assert list(predictor.shares(DraftRow(0, [1]), [], 0.0)) == [3]
    # Nor is anything looked up of ids that the table does not hold.
    assert predictor.shares(DraftRow(0, [VOCAB]), [], 0.0) == {}
    predictor.begin(DraftRow(1, [VOCAB, 2, VOCAB]))
    predictor.observe([TokenTree.root_only(VOCAB)], laws({9: 0.6}), [[0]])


def test_trust_follows_what_came() -> None:
    predictor = new()
    predictor.observe([TokenTree.root_only(1)], laws({2: 0.6, 3: 0.2}), [[0]])
    row = DraftRow(0, [1])
    assert predictor.trust == 1.0 and predictor.shares(row, [], 0.0) == pytest.approx({2: 0.6, 3: 0.2})
    for _ in range(200):
        predictor.judge(predictor.shares(row, [], 0.0), 9)
    assert predictor.trust < 0.05
    assert predictor.shares(row, [], 0.0)[2] == pytest.approx(0.6 * predictor.trust)
    for _ in range(200):
        predictor.judge(predictor.shares(row, [], 0.0), 3)
    assert predictor.trust == 1.0
    predictor.judge({}, 9)
    assert predictor.trust == 1.0


def test_the_source_judges_itself_by_the_text() -> None:
    draft = TextDraft([new()])
    predictor: Any = draft.predictors[0]
    predictor.observe([TokenTree.chain([1, 2])], laws({2: 0.9}, {3: 0.9}), [[0]])
    row = DraftRow(0, [1])
    draft.propose([row], [TreeLimits(max_nodes=4, max_depth=4, max_children=2)])
    row.tokens += [2, 9]
    draft.propose([row], [TreeLimits(max_nodes=4, max_depth=4, max_children=2)])
    # Right after 1, wrong after 2.
    assert predictor._right == pytest.approx((4.0 * 0.98 + 1) * 0.98)
    assert predictor._given > predictor._right


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_under_sampling_the_noise_of_the_position_ranks(temperature: float) -> None:
    noise = GumbelNoise(5, VOCAB)
    predictor = new(4, temperature=temperature)
    law = {2: 0.4, 3: 0.3, 4: 0.2, 5: 0.05}
    predictor.observe([TokenTree.root_only(1)], laws(law), [[0]])
    firsts = set()
    for position in range(3, 40):
        row = DraftRow(1, [1], offset=position - 1, noise_of=lambda at, tokens: noise.of(1, at, tokens))
        shares = predictor.shares(row, [], 0.0)
        perturbed = {t: math.log(p) / temperature + float(noise.at(1, position)[t]) for t, p in law.items()}
        assert sorted(shares, key=lambda t: -shares[t]) == sorted(perturbed, key=lambda t: -perturbed[t])
        assert 0.0 < sum(shares.values()) < 1.0
        firsts.add(max(shares, key=lambda t: shares[t]))
        # A child of a child is chosen one position further on.
        predictor.observe([TokenTree.root_only(7)], laws(law), [[0]])
        row.offset -= 1
        assert predictor.shares(row, [7], 0.0) == shares
    assert len(firsts) > 2


def test_noise_of_single_tokens_is_that_of_all() -> None:
    for streams in (None, [77, 99]):
        noise = GumbelNoise(2**62 + 3, 500, streams=streams)
        for row, position in ((0, 0), (1, 7), (1, 12345)):
            tokens = [0, 1, 17, 499]
            assert noise.of(row, position, tokens) == pytest.approx(
                noise.at(row, position)[tokens].tolist(), rel=1e-12
            )


# -- the table of a model --


def test_a_table_lives_as_long_as_its_model_is_enabled() -> None:
    model = enable(build("llama"))
    table = table_of(model, VOCAB, 4)
    assert table_of(model, VOCAB, 4) is table
    assert table_of(model, VOCAB, 5) is not table and table_of(model, VOCAB, 5).candidates == 5
    # A call with another size of table does not cost what was learnt.
    assert table_of(model, VOCAB, 4) is table
    other = build("llama")
    others = table_of(other, VOCAB, 4)
    disable(model)
    assert model not in module._TABLES and table_of(other, VOCAB, 4) is others
    forget_tables(lambda one: one is not other)
    table_of(model, VOCAB, 4)
    count = len(module._TABLES)
    del model
    gc.collect()
    assert len(module._TABLES) == count - 1


def test_tables_of_installed_hooks_go_with_them() -> None:
    enabled, plain = enable(build("llama")), build("llama")
    table = table_of(enabled, VOCAB, 4)
    install()
    table_of(plain, VOCAB, 4)
    uninstall()
    assert plain not in module._TABLES and table_of(enabled, VOCAB, 4) is table
