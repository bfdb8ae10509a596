"""A call with a tree says nothing that the same call does not say without one."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList, TextStreamer

from hf_treespec import TreeConfig, TreeSpecWarning, _compat, enable
from letters import letters
from tiny import WIDTH, build, cache_argument, draft, new_cache, prompt, stock, vocabulary

OFF = TreeConfig(fallback="off", seed=3)


def right_padded() -> dict[str, Any]:
    ids, mask = prompt("llama", 3)
    mask[1, -2:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


# name: (arguments, whether plain decoding has something to say; None: in some releases)
CALLS: dict[str, tuple[Callable[[], dict[str, Any]], bool | None]] = {
    "greedy": (lambda: {}, False),
    "sampled": (lambda: {"do_sample": True, "temperature": 0.8, "top_p": 0.9}, False),
    "batch": (lambda: dict(zip(("input_ids", "attention_mask"), prompt("llama", 3), strict=True)), False),
    "several": (lambda: {"do_sample": True, "num_return_sequences": 2}, False),
    "right_padded": (right_padded, True),
    "sampling_flags_under_greedy": (lambda: {"temperature": 0.7, "top_p": 0.9}, True),
    "two_lengths": (lambda: {"max_length": WIDTH + 9, "max_new_tokens": 5}, True),
    "no_length": (lambda: {"max_new_tokens": None}, True),
    "no_pad_id": (lambda: {"pad_token_id": None, "eos_token_id": 9}, False),
    "config_and_keywords": (
        lambda: {"generation_config": GenerationConfig(max_new_tokens=5, pad_token_id=0), "top_k": 7},
        True,
    ),
    "cache": (lambda: cache_argument(new_cache(stock("llama"))), False),
    "old_name_of_the_cache": (lambda: {"past_key_values": new_cache(stock("llama"))}, None),
    "dict": (lambda: {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}, False),
    "stop_strings": (lambda: {"stop_strings": ["ab"], "tokenizer": letters(vocabulary("llama"))}, False),
    "streamer": (lambda: {"streamer": TextStreamer(letters(vocabulary("llama")))}, False),
    "criterion": (
        lambda: {"stopping_criteria": StoppingCriteriaList([lambda ids, _, **__: ids.shape[1] > WIDTH + 3])},
        False,
    ),
    "processors": (lambda: {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "min_new_tokens": 3}, False),
    "guidance": (lambda: {"guidance_scale": 1.5}, False),
    "compile_settings": (lambda: {"disable_compile": True, "cache_implementation": "dynamic"}, False),
    "past_the_positions": (lambda: {"max_length": 300, "max_new_tokens": None, "eos_token_id": 79}, False),
}


class Kept(logging.Handler):
    """Log records of transformers, which does not use `warnings` for most of what it has to say."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.name}: {record.getMessage()}")


def said(model: PreTrainedModel, call: dict[str, Any]) -> list[str]:
    """What a call says by either way, in order."""
    # Each is said once a process.
    sys.modules["transformers.utils.logging"].warning_once.cache_clear()
    _compat.warning._WARNED.clear()
    kept, logger = Kept(), logging.getLogger("transformers")
    logger.addHandler(kept)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.generate(**call)
    finally:
        logger.removeHandler(kept)
    # Of torch, about itself, by whoever comes first.
    found = [f"{one.category.__name__}: {one.message}" for one in caught if "torch.jit" not in str(one.message)]
    return found + kept.said


def arguments(name: str) -> dict[str, Any]:
    ids, mask = prompt("llama", 1)
    return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False, **CALLS[name][0]()}


@pytest.mark.parametrize("speculation", ["ngram", "assistant"])
@pytest.mark.parametrize("name", list(CALLS))
def test_nothing_new_is_said(name: str, speculation: str) -> None:
    # Models say some things once each.
    plain, tree = build("llama"), enable(build("llama"))
    helper = {"assistant_model": draft("llama")} if speculation == "assistant" else {}
    expected = said(plain, arguments(name))
    actual = said(tree, {**arguments(name), "tree_config": OFF, **helper})
    assert CALLS[name][1] in (None, bool(expected)), expected
    assert sorted(actual) == sorted(expected)


def test_two_vocabularies_are_the_one_thing_that_is_said() -> None:
    helper = build("llama", vocab_size=90)
    ids, mask = prompt("llama", 1)
    call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8, "assistant_model": helper}
    (only,) = said(enable(build("llama")), {**call, "tree_config": OFF})
    assert only.startswith(f"{TreeSpecWarning.__name__}: target and assistant_model have vocabularies of 97 and 90")


def test_enabling_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = enable(build("llama", vocab_size=98))
    assert isinstance(model(torch.tensor([[3, 4]])).logits, torch.Tensor)
