"""Calls that assisted decoding in transformers gets wrong, refuses or ignores: here they give plain decoding's text.

Each test states the case on a real draft model; `stock` is a model that was never enabled.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteriaList, SynthIDTextWatermarkingConfig

from hf_treespec import TreeConfig, _compat
from letters import letters
from tiny import (
    FAMILIES,
    WIDTH,
    assert_same_cache,
    assert_same_text,
    cache_argument,
    draft,
    new_cache,
    prompt,
    reference,
    stock,
    treed,
    vocabulary,
)

families = pytest.mark.parametrize("family", FAMILIES)
OFF = TreeConfig(fallback="off", seed=3)
NEW = 18


def with_tree(family: str, ids: Tensor, mask: Tensor, **call: Any) -> Any:
    call = {"do_sample": False, "max_new_tokens": NEW, "tree_config": OFF, **call}
    out = treed(family).generate(ids, attention_mask=mask, assistant_model=draft(family), **call)
    assert treed(family).treespec_stats.draft == "model"
    assert treed(family).treespec_stats.drafted_nodes > 0
    return out


@families
@pytest.mark.parametrize("batch", [1, 3])
def test_chat_that_goes_on_from_a_filled_cache(family: str, batch: int) -> None:
    # Assisted decoding since 5.3 feeds the prefix a second time.
    ids, mask = prompt(family, batch)
    plain, ours = new_cache(stock(family)), new_cache(stock(family))
    for turn in range(3):
        expected = reference(stock(family), ids, mask, max_new_tokens=NEW, **cache_argument(plain))
        actual = with_tree(family, ids, mask, **cache_argument(ours))
        assert_same_text(expected, actual, width=ids.shape[1])
        assert _compat.cache_length(ours) == expected.shape[1] - 1
        assert_same_cache(plain, ours, mask)
        ids = torch.cat([expected, prompt(family, batch, seed=50 + turn, width=4)[0].clamp(min=3)], 1)
        mask = torch.cat([mask, mask.new_ones(batch, ids.shape[1] - mask.shape[1])], 1)


def stock_assisted_parts_from_plain(family: str, ids: Tensor, mask: Tensor, expected: Tensor, **call: Any) -> bool:
    """Whether transformers' own assisted decoding gives another text here: then the case is a hard one."""
    out = stock(family).generate(
        ids, attention_mask=mask, assistant_model=draft(family), do_sample=False, max_new_tokens=NEW, **call
    )
    return not torch.equal(out, expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("scale", [1.5, 3.0])
def test_guidance_scale(family: str, scale: float) -> None:
    # The processor keeps a cache of its own; assisted decoding calls it out of order.
    ids, mask = prompt(family, 1)
    expected = reference(stock(family), ids, mask, max_new_tokens=NEW, guidance_scale=scale)
    assert not torch.equal(expected, reference(stock(family), ids, mask, max_new_tokens=NEW))
    if (family, scale) != ("gpt2", 3.0):  # there assisted decoding happens to choose the same tokens
        assert stock_assisted_parts_from_plain(family, ids, mask, expected, guidance_scale=scale)
    assert_same_text(expected, with_tree(family, ids, mask, guidance_scale=scale))


@families
@pytest.mark.parametrize("batch", [1, 3])
def test_guidance_scale_with_a_negative_prompt(family: str, batch: int) -> None:
    ids, mask = prompt(family, batch)
    call = {
        "guidance_scale": 2.0,
        "negative_prompt_ids": prompt(family, batch, seed=9, width=5)[0],
        "negative_prompt_attention_mask": prompt(family, batch, seed=9, width=5)[1],
    }
    expected = reference(stock(family), ids, mask, max_new_tokens=NEW, **call)
    assert_same_text(expected, with_tree(family, ids, mask, **call))


@families
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.9}], ids=["t0", "t0.9"])
def test_synthid_watermark(family: str, batch: int, sampling: dict[str, Any]) -> None:
    # The watermark remembers the contexts it has seen, so a call for a rejected token changes later ones.
    config = SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123, 340], ngram_len=2)
    ids, mask = prompt(family, batch)
    call = {"watermarking_config": config, "max_new_tokens": NEW, **sampling}
    expected = reference(stock(family), ids, mask, seed=3, **call)
    assert_same_text(expected, with_tree(family, ids, mask, **call))


@families
@pytest.mark.parametrize("stop", range(1, 12))
def test_criterion_that_is_met_inside_a_block(family: str, stop: int) -> None:
    # Assisted decoding asks once a block and overshoots.
    asked: list[int] = []

    def criterion(text: Tensor, scores: Any, **_: Any) -> Tensor:
        asked.append(text.shape[1] - WIDTH)
        return torch.full((len(text),), text.shape[1] - WIDTH >= stop)

    ids, mask = prompt(family, 1)
    out = with_tree(family, ids, mask, stopping_criteria=StoppingCriteriaList([criterion])) if stop > 1 else None
    if out is None:
        # One token comes from the prefill: no tree is ever asked for.
        call = {"max_new_tokens": NEW, "do_sample": False, "tree_config": OFF, "assistant_model": draft(family)}
        out = treed(family).generate(
            ids, attention_mask=mask, stopping_criteria=StoppingCriteriaList([criterion]), **call
        )
    assert_same_text(reference(stock(family), ids, mask, max_new_tokens=stop), out)
    assert asked == list(range(1, stop + 1))


@families
@pytest.mark.parametrize("batch", [1, 3])
def test_stop_strings_with_an_assistant(family: str, batch: int) -> None:
    # Assisted decoding raises: the assistant's own generate() is given the strings but no tokenizer.
    tokenizer = letters(vocabulary(family))
    ids, mask = prompt(family, batch)
    text = reference(stock(family), ids, mask, max_new_tokens=NEW)
    stops = [tokenizer.decode(row[WIDTH + 7 : WIDTH + 9]) for row in text]
    call = {"stop_strings": stops, "tokenizer": tokenizer}
    with pytest.raises(ValueError, match="tokenizer"):
        stock(family).generate(
            ids[:1], attention_mask=mask[:1], assistant_model=draft(family), max_new_tokens=NEW, **call
        )
    expected = reference(stock(family), ids, mask, max_new_tokens=NEW, **call)
    assert expected.shape[1] < text.shape[1] or batch > 1
    assert_same_text(expected, with_tree(family, ids, mask, **call))


@families
def test_batches(family: str) -> None:
    ids, mask = prompt(family, 3)
    with pytest.raises(ValueError, match="batch.size"):
        stock(family).generate(ids, attention_mask=mask, assistant_model=draft(family), max_new_tokens=NEW)
    expected = reference(stock(family), ids, mask, max_new_tokens=NEW)
    assert_same_text(expected, with_tree(family, ids, mask))


@families
def test_num_return_sequences(family: str) -> None:
    ids, mask = prompt(family, 1)
    call = {"do_sample": True, "temperature": 0.9, "num_return_sequences": 4, "max_new_tokens": NEW}
    with pytest.raises(ValueError, match="num_return_sequences"):
        stock(family).generate(ids, attention_mask=mask, assistant_model=draft(family), **call)
    expected = reference(stock(family), ids, mask, seed=3, **call)
    actual = with_tree(family, ids, mask, **call)
    assert_same_text(expected, actual)
    assert len({tuple(row) for row in actual.tolist()}) == 4


def test_settings_of_the_assistant_are_not_written_to() -> None:
    # The heuristic schedule of assisted decoding writes its count back into the user's assistant.
    helper = draft("llama")
    before = repr(helper.generation_config.to_dict())
    ids, mask = prompt("llama", 1)
    with_tree("llama", ids, mask, num_assistant_tokens=7, num_assistant_tokens_schedule="heuristic")
    assert repr(helper.generation_config.to_dict()) == before
