"""A passed-in cache stays the same object, holds what plain decoding leaves there, and continues a conversation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given

from cases import FAST, SLOW, Case, cases
from hf_treespec import TreeConfig, _compat
from tiny import (
    FAMILIES,
    assert_same_cache,
    assert_same_text,
    cache_argument,
    margins,
    new_cache,
    real_texts,
    reference,
    stock,
    treed,
)

families = pytest.mark.parametrize("family", FAMILIES)
KINDS = ("half_right", "deep", "wide", "random_tree", "model", "ngram", "recycle")


def user_turn(width: int, batch: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 60, (batch, width), generator=torch.Generator().manual_seed(seed))


def check_conversation(family: str, case: Case, *, whole: bool) -> None:
    """Two turns on one cache. The second passes the whole text, or its new tokens and the whole mask.

    Processors that read the prompt are left out: they would see another prompt in the two forms, as in plain decoding.
    """
    case = replace(case, batched=False)
    ids, mask = case.prompt(family)
    model, seed = stock(family), case.config.seed or 0
    plain, ours = new_cache(model), new_cache(model)
    for turn in range(2):
        call: dict[str, Any] = {**case.arguments}
        past = _compat.cache_length(plain)
        passed = ids if whole else ids[:, past:]
        expected = model_call(family, passed, mask, seed, cache=plain, **call)
        # The real tokens of the text so far are what a draft source may know as `truth`.
        text = expected if whole else torch.cat([ids[:, :past], expected], 1)
        actual = case.run(family, passed, mask, real_texts(text, mask), **cache_argument(ours))
        margin = margins(treed(family), ids, mask, seed=seed, **call) if whole else None
        assert_same_text(expected, actual, margin, width=passed.shape[1])
        if not torch.equal(expected, actual):
            return  # parted at a tie: nothing to compare from here on
        assert _compat.cache_length(ours) == text.shape[1] - 1
        assert_same_cache(plain, ours, mask)
        says = user_turn(5, case.batch, seed=turn)
        ids = torch.cat([text, says], 1)
        mask = torch.cat([mask, mask.new_ones(case.batch, ids.shape[1] - mask.shape[1])], 1)


def model_call(family: str, ids: torch.Tensor, mask: torch.Tensor, seed: int, *, cache: Any, **call: Any) -> Any:
    return reference(stock(family), ids, mask, seed=seed, **cache_argument(cache), **call)


@families
@pytest.mark.parametrize("whole", [True, False], ids=["whole_text", "new_tokens"])
@FAST
@given(case=cases(kinds=KINDS))
def test_conversation_on_a_passed_cache_is_plain(family: str, whole: bool, case: Case) -> None:
    check_conversation(family, case, whole=whole)


@pytest.mark.slow
@families
@pytest.mark.parametrize("whole", [True, False], ids=["whole_text", "new_tokens"])
@SLOW
@given(case=cases(kinds=KINDS))
def test_conversation_on_a_passed_cache_is_plain_at_length(family: str, whole: bool, case: Case) -> None:
    check_conversation(family, case, whole=whole)


@families
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampled", [False, True])
def test_cache_that_is_returned_is_the_one_passed(family: str, batch: int, sampled: bool) -> None:
    case = Case(
        batch=batch,
        prompt_seed=5,
        new=15,
        sampling={"temperature": 0.9, "top_k": 20} if sampled else {},
        processors={},
        eos=[5, 6, 7, 9, 14, 23, 31, 40, 52],
        kind="half_right",
        source_seed=2,
        config=TreeConfig(max_nodes=20, max_depth=6, seed=3, fallback="off"),
    )
    ids, mask = case.prompt(family)
    expected = reference(stock(family), ids, mask, seed=3, **case.arguments)
    cache = new_cache(stock(family))
    layers = list(cache.layers)
    out = case.run(
        family, ids, mask, real_texts(expected, mask), return_dict_in_generate=True, **cache_argument(cache)
    )
    assert _compat.cache_from_outputs(out) is cache
    assert all(one is two for one, two in zip(layers, cache.layers, strict=True))
    assert _compat.cache_length(cache) == out.sequences.shape[1] - 1 == expected.shape[1] - 1
    # Our stand-ins for methods of a layer must not stay on it.
    assert not any(callable(value) for layer in cache.layers for value in vars(layer).values())
