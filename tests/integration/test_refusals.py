"""Calls that cannot be right are refused by name, before any forward and before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_treespec import (
    TreeConfig,
    TreeConfigError,
    TreeSpecError,
    UnsupportedCallError,
    UnsupportedModelError,
    _compat,
    enable,
    is_supported,
)
from letters import letters
from tiny import (
    FAMILIES,
    WIDTH,
    build,
    cache_argument,
    draft,
    fingerprint,
    new_cache,
    plain_cache,
    prompt,
    snapshot,
    stock,
    treed,
    vocabulary,
)

OFF = TreeConfig(fallback="off")


class Offloaded(DynamicCache):
    """Says that it moves its layers; the real one needs an accelerator to be made."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.offloading = True


class OddLayers(DynamicCache):
    """Layers of a class that nobody has looked at."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for layer in self.layers:
            layer.__class__ = type("StrangeLayer", (type(layer),), {})


def filled(length: int) -> Any:
    ids, mask = prompt("llama", 1)
    return plain_cache(stock("llama"), torch.cat([ids, ids, ids], 1), mask, length)


def call_with(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: options


# name: (arguments, error, what the message must name)
CALLS: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "beams": (call_with(num_beams=2), UnsupportedCallError, r"num_beams=2.*use num_beams=1"),
    "beams_with_assistant": (
        lambda: {"num_beams": 2, "assistant_model": draft("llama")},
        UnsupportedCallError,
        "num_beams=2",
    ),
    "beam_sampling": (call_with(num_beams=3, do_sample=True), UnsupportedCallError, "num_beams=3"),
    "use_cache": (call_with(use_cache=False), UnsupportedCallError, "use_cache=False"),
    "offloaded": (
        lambda: cache_argument(Offloaded(config=stock("llama").config)),
        UnsupportedCallError,
        "offloaded cache.*cache_implementation",
    ),
    "odd_layers": (
        lambda: cache_argument(OddLayers(config=stock("llama").config)),
        UnsupportedCallError,
        "StrangeLayer.*DynamicLayer",
    ),
    "attentions": (
        call_with(
            output_attentions=True,
            return_dict_in_generate=True,
            tree_config=TreeConfig(attention="sdpa"),
        ),
        UnsupportedCallError,
        r"output_attentions=True with TreeConfig\(attention='sdpa'\)",
    ),
    "embeds": (
        lambda: {"inputs_embeds": torch.zeros(1, WIDTH + 1, 32)},
        UnsupportedCallError,
        "attention_mask is 11 wide and inputs_embeds hold 12 tokens",
    ),
    "synced_gpus": (call_with(synced_gpus=True), UnsupportedCallError, "synced_gpus=True"),
    "model_without_assistant": (
        call_with(tree_config=TreeConfig(draft="model")),
        UnsupportedCallError,
        r"draft='model'\) without assistant_model",
    ),
    "ngram_with_assistant": (
        lambda: {"tree_config": TreeConfig(draft="ngram"), "assistant_model": draft("llama")},
        UnsupportedCallError,
        r"draft='ngram'\) with an assistant_model",
    ),
    "lookup": (call_with(prompt_lookup_num_tokens=3), UnsupportedCallError, "prompt_lookup_num_tokens=3"),
    "custom_generate": (
        call_with(custom_generate=lambda model, input_ids, **_: input_ids),
        UnsupportedCallError,
        "custom_generate with tree_config",
    ),
    "config_is_a_dict": (call_with(tree_config={"max_nodes": 4}), TreeConfigError, r"tree_config=.*from_dict"),
    "covered": (lambda: cache_argument(filled(WIDTH)), UnsupportedCallError, r"cache holds 11 tokens.*crop the cache"),
    "more_than_covered": (lambda: cache_argument(filled(WIDTH + 5)), UnsupportedCallError, "cache holds 16 tokens"),
    "mask_of_another_width": (
        lambda: {**cache_argument(filled(4)), "attention_mask": torch.tensor([[0] + [1] * (WIDTH + 1)])},
        UnsupportedCallError,
        r"attention_mask is 13 wide: expected 11 .* or 15",
    ),
    "recurrent_draft": (
        # Probed before the forwards are counted.
        lambda: {
            "assistant_model": enable(MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=8, num_hidden_layers=1)))
        },
        UnsupportedCallError,
        "assistant_model is a MambaForCausalLM, which takes no tree mask",
    ),
}


def assert_refused(
    model: PreTrainedModel, ids: Tensor, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The call raises as told, without a forward of target or draft, and leaves everything as it was."""
    call = {"attention_mask": torch.ones_like(ids), "tree_config": OFF, "max_new_tokens": 8, **options}
    if "do_sample" not in call:
        call["do_sample"] = False
    forwards: list[int] = []
    models = [m for m in (model, call.get("assistant_model")) if m is not None]
    hooks = [m.register_forward_pre_hook(lambda *_: forwards.append(1)) for m in models]
    cache = call.get("cache", call.get("past_key_values"))
    caches = [cache] if isinstance(cache, DynamicCache) else []
    before = [fingerprint(m) for m in models], torch.get_rng_state().tolist(), [repr(snapshot(c)) for c in caches]
    masks = [_compat.mask_function_of(name) for name in _compat.MASK_IMPLEMENTATIONS]
    try:
        with pytest.raises(error, match=f"(?s){message}") as caught:
            model.generate(ids, **call)
        after = [fingerprint(m) for m in models], torch.get_rng_state().tolist(), [repr(snapshot(c)) for c in caches]
    finally:
        for hook in hooks:
            hook.remove()
    assert type(caught.value) is error and isinstance(caught.value, TreeSpecError)
    assert isinstance(caught.value, ValueError | NotImplementedError)
    assert forwards == []
    assert after == before
    assert [_compat.mask_function_of(name) for name in _compat.MASK_IMPLEMENTATIONS] == masks


@pytest.mark.parametrize("name", list(CALLS))
def test_call_is_refused(name: str) -> None:
    make, error, message = CALLS[name]
    model = treed("llama")
    if name == "attentions":
        # The answer about eager attention is looked up beforehand.
        model = enable(build("llama", attention="eager"))
    ids, _ = prompt("llama", 1)
    assert_refused(model, ids, make(), error, message)


@pytest.mark.parametrize("family", FAMILIES)
def test_row_without_a_token_is_refused(family: str) -> None:
    ids, mask = prompt(family, 3)
    mask[1] = 0
    assert_refused(treed(family), ids, {"attention_mask": mask}, UnsupportedCallError, r"rows \[1\]")


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_cache_that_covers_the_prompt_is_refused_past_a_window(family: str) -> None:
    ids, mask = prompt(family, 3, width=20)
    cache = plain_cache(stock(family), ids, mask, 20)
    message = "cache holds 20 tokens"
    assert_refused(
        treed(family), ids, {"attention_mask": mask, **cache_argument(cache)}, UnsupportedCallError, message
    )


@pytest.mark.parametrize("wanted", ["sdpa", "eager"])
def test_refusal_comes_with_the_attention_as_it_was(wanted: str) -> None:
    other = "eager" if wanted == "sdpa" else "sdpa"
    model = enable(build("llama", attention=other))
    ids, mask = prompt("llama", 3)
    mask[2] = 0
    options = {"attention_mask": mask, "tree_config": TreeConfig(attention=wanted)}
    assert_refused(model, ids, options, UnsupportedCallError, r"rows \[2\]")


def test_a_misspelt_keyword_is_refused_as_by_transformers() -> None:
    ids, _ = prompt("llama", 1)
    for options in ({"tree_cfg": OFF}, {"tree_config": OFF, "max_nodes": 3}):
        with pytest.raises(ValueError, match=r"tree_cfg|max_nodes"):
            treed("llama").generate(ids, max_new_tokens=4, **options)


def test_a_model_that_cannot_take_a_tree_is_refused_by_enable() -> None:
    class OwnLoop(type(stock("llama"))):
        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            return super()._sample(*args, **kwargs)

    model = OwnLoop(stock("llama").config)
    before = fingerprint(model)
    support = is_supported(model)
    assert not support.ok and support.route == "refuse"
    with pytest.raises(UnsupportedModelError, match=type(model).__name__) as caught:
        enable(model)
    assert support.reason in str(caught.value)
    assert fingerprint(model) == before


def test_quantized_cache_is_refused() -> None:
    class QuantizedLayer(_compat.DynamicLayer):
        pass

    cache = new_cache(stock("llama"))
    cache.layers = [QuantizedLayer() for _ in cache.layers]
    ids, _ = prompt("llama", 1)
    assert_refused(treed("llama"), ids, cache_argument(cache), UnsupportedCallError, "QuantizedLayer.*DynamicCache")


def test_the_same_calls_work_without_what_was_refused() -> None:
    # The refusals must not be so wide that the plainest call falls under them.
    ids, mask = prompt("llama", 1)
    call = {"attention_mask": mask, "tree_config": OFF, "max_new_tokens": 8, "do_sample": False}
    tokenizer = letters(vocabulary("llama"))
    for options in (
        {},
        {"num_beams": 1, "use_cache": True, "output_attentions": True, "output_hidden_states": True},
        {"assistant_model": draft("llama"), "tokenizer": tokenizer, "assistant_tokenizer": letters(97)},
        {**cache_argument(filled(WIDTH - 1))},
        {"assistant_model": draft("llama"), "tree_config": TreeConfig(draft="model")},
    ):
        expected = stock("llama").generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        assert torch.equal(treed("llama").generate(ids, **{**call, **options}), expected)
