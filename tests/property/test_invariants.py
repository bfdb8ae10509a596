"""Any tree, any draft: the text, scores, logits and cache are those of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, note

from cases import FAST, SLOW, Case, cases
from hf_treespec import TreeConfig, _compat
from tiny import (
    FAMILIES,
    assert_lively,
    assert_same_cache,
    assert_same_text,
    margins,
    prompt,
    real_texts,
    reference,
    stock,
    treed,
)

families = pytest.mark.parametrize("family", FAMILIES)


def check_coupled(family: str, case: Case) -> None:
    """Tree, `max_nodes=0` and transformers' own loop on the same noise give the same tokens."""
    ids, mask = case.prompt(family)
    seed = case.config.seed or 0
    expected = reference(stock(family), ids, mask, seed=seed, **case.arguments)
    margin = margins(treed(family), ids, mask, seed=seed, **case.arguments)
    none = TreeConfig(max_nodes=0, seed=seed)
    plain = treed(family).generate(ids, attention_mask=mask, tree_config=none, **case.arguments)
    assert_same_text(expected, plain, margin)
    tree = case.run(family, ids, mask, real_texts(plain, mask))
    note(str(treed(family).treespec_stats))
    assert_same_text(plain, tree, margin)


@families
@FAST
@given(case=cases())
def test_any_tree_is_no_tree(family: str, case: Case) -> None:
    check_coupled(family, case)


@pytest.mark.slow
@families
@SLOW
@given(case=cases())
def test_any_tree_is_no_tree_at_length(family: str, case: Case) -> None:
    check_coupled(family, case)


def check_greedy(family: str, case: Case) -> None:
    """The whole output of greedy decoding is that of generate() on a model that was never enabled."""
    ids, mask = case.prompt(family)
    wanted: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = reference(stock(family), ids, mask, **case.arguments, **wanted)
    case = replace(case, batched=False)  # scores are only there where nodes are visited one by one
    actual = case.run(family, ids, mask, real_texts(expected.sequences, mask), **wanted)
    assert type(actual) is type(expected) and set(actual) == set(expected)
    assert_same_text(expected.sequences, actual.sequences, margins(treed(family), ids, mask, **case.arguments))
    if not torch.equal(expected.sequences, actual.sequences):
        return  # parted at a tie, which the line above allows
    assert len(actual.scores) == len(actual.logits) == actual.sequences.shape[1] - ids.shape[1]
    torch.testing.assert_close(actual.scores, expected.scores, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(actual.logits, expected.logits, atol=1e-4, rtol=1e-4)
    one, two = _compat.cache_from_outputs(expected), _compat.cache_from_outputs(actual)
    assert _compat.cache_length(two) == actual.sequences.shape[1] - 1
    assert_same_cache(one, two, mask)


@families
@FAST
@given(case=cases(sampled=False))
def test_greedy_output_is_stock(family: str, case: Case) -> None:
    check_greedy(family, case)


@pytest.mark.slow
@families
@SLOW
@given(case=cases(sampled=False))
def test_greedy_output_is_stock_at_length(family: str, case: Case) -> None:
    check_greedy(family, case)


@families
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.9, "top_k": 20}], ids=["t0", "t0.9"])
def test_reference_texts_are_lively(family: str, sampling: dict[str, Any]) -> None:
    # The tests above are worth what their texts are worth: a model that repeats one token cannot tell trees apart.
    ids, mask = prompt(family, 3)
    assert_lively(reference(stock(family), ids, mask, max_new_tokens=24, **sampling))


@families
@pytest.mark.parametrize("kind", ["half_right", "deep", "wide", "model"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_trees_of_these_tests_are_accepted_in_part(family: str, kind: str, batch: int) -> None:
    # Likewise: trees that never hit would leave the commit of a path untested.
    case = Case(
        batch=batch,
        prompt_seed=3,
        new=24,
        sampling={},
        processors={},
        eos=None,
        kind=kind,
        source_seed=1,
        config=TreeConfig(max_nodes=24, max_depth=6, max_children=20, fallback="off"),
    )
    ids, mask = case.prompt(family)
    expected = reference(stock(family), ids, mask, **case.arguments)
    assert_same_text(expected, case.run(family, ids, mask, real_texts(expected, mask)))
    stats = treed(family).treespec_stats
    assert stats.accepted_tokens > 0 and stats.tokens_per_round > 1.2
    assert stats.accepted_tokens < stats.drafted_nodes
    assert stats.rounds < case.new - 1
