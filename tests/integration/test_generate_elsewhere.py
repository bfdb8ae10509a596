"""Other ways in, and what must stay as it was: hooks for all models, pipelines, every call without a tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, TextGenerationPipeline

from hf_treespec import TreeConfig, enable, install, uninstall
from letters import letters
from tiny import (
    FAMILIES,
    assert_same_text,
    build,
    cache_argument,
    draft,
    new_cache,
    perturbed,
    prompt,
    reference,
    stock,
    treed,
    vocabulary,
)

OFF = TreeConfig(fallback="off", seed=3)


def assisted(model: PreTrainedModel, helper: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return model.generate(
        ids, attention_mask=mask, assistant_model=helper, do_sample=False, tree_config=OFF, max_new_tokens=20
    )


@pytest.fixture
def installed() -> Iterator[None]:
    install()
    try:
        yield
    finally:
        uninstall()


@pytest.mark.usefixtures("installed")
def test_installed_hooks_serve_models_that_were_never_enabled() -> None:
    model, helper = build("llama"), perturbed(build("llama"))
    before = type(model)
    ids, mask = prompt("llama", 3)
    expected = reference(stock("llama"), ids, mask, max_new_tokens=20)
    assert_same_text(expected, assisted(model, helper, ids, mask))
    assert type(model) is before and model.treespec_stats.accepted_tokens > 0
    assert_same_text(expected, assisted(enable(model), helper, ids, mask))
    assert model.treespec_stats.accepted_tokens > 0


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("sampled", [False, True])
def test_pipeline(sampled: bool) -> None:
    tokenizer = letters(vocabulary("llama"))
    model, helper = build("llama"), perturbed(build("llama"))
    plain = TextGenerationPipeline(model=build("llama"), tokenizer=tokenizer)
    trees = TextGenerationPipeline(model=model, tokenizer=tokenizer, assistant_model=helper)
    prompts = ["abcdefgh", "hgfedcba"]
    call: dict[str, Any] = {"max_new_tokens": 20, "do_sample": sampled, "return_full_text": False}
    config = OFF.replace(max_nodes=0) if sampled else None
    extra = {"tree_config": config} if config else {}
    expected = [out[0]["generated_text"] for out in plain(prompts, **call, **extra)]
    actual = [out[0]["generated_text"] for out in trees(prompts, tree_config=OFF, **call)]
    assert actual == expected and len(set(actual)) == 2
    assert model.treespec_stats.draft == "model" and model.treespec_stats.drafted_nodes > 0


# Calls of an enabled model without `tree_config`: they return what a model returns that was never enabled.
WITHOUT: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "temperature": 0.9, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "beam_sample": {"do_sample": True, "num_beams": 2},
    "assisted": {"do_sample": False, "assistant_model": draft},
    "assisted_sample": {"do_sample": True, "assistant_model": draft},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "static": {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", list(WITHOUT))
def test_calls_without_a_tree_are_stock(family: str, name: str) -> None:
    call = {"max_new_tokens": 16, "return_dict_in_generate": True, "output_scores": True, **WITHOUT[name]}
    batch = 1 if "assist" in name or name == "lookup" else 3
    ids, mask = prompt(family, batch)
    # A tree before it must leave nothing behind.
    enabled = treed(family)
    enabled.generate(ids, attention_mask=mask, tree_config=OFF, max_new_tokens=8)
    outputs: list[Any] = []
    for model in (stock(family), enabled):
        if "assistant_model" in call:
            call["assistant_model"] = perturbed(stock(family))
        torch.manual_seed(4)
        try:
            outputs.append(model.generate(ids, attention_mask=mask, **call))
        except RuntimeError as error:  # assisted decoding of 5.17 fails past a sliding window
            outputs.append(str(error))
    one, two = outputs
    if isinstance(one, str):
        assert one == two and family in ("mistral", "gemma2")
        return
    assert type(one) is type(two) and torch.equal(one.sequences, two.sequences)
    torch.testing.assert_close(two.scores, one.scores, atol=0.0, rtol=0.0)


def test_custom_generate_of_the_caller_is_served_as_in_stock() -> None:
    def backwards(model: PreTrainedModel, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids.flip(1)

    ids, mask = prompt("llama", 1)
    out = treed("llama").generate(ids, attention_mask=mask, custom_generate=backwards)
    assert torch.equal(out, ids.flip(1))


def test_forward_with_a_cache_between_two_calls_is_stock() -> None:
    # The hooks are on generate() only; the mask registry, which all models share, is given back.
    ids, mask = prompt("mistral", 3)

    def logits_of(model: PreTrainedModel) -> torch.Tensor:
        cache = new_cache(model)
        with torch.no_grad():
            model(ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True, **cache_argument(cache))
            return model(ids[:, -1:], attention_mask=mask, use_cache=True, **cache_argument(cache)).logits

    expected = logits_of(stock("mistral"))
    treed("mistral").generate(ids, attention_mask=mask, tree_config=OFF, max_new_tokens=8)
    assert torch.equal(logits_of(stock("mistral")), expected)
    assert torch.equal(logits_of(treed("mistral")), expected)
