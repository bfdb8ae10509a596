"""Whisper's own generate(), which calls the common one for each window of audio, with a tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from calls import BUSHES
from hf_treespec import TreeConfig, _compat, enable, is_supported
from seq2seq import VOCAB, build
from sources import MAKERS, Source, drafting
from tiny import gumbel_multinomial

OFF = TreeConfig(fallback="off", seed=3)
# <start> 1, <end> 2, languages 60 and 61, tasks 62 and 63, <no timestamps> 50; timestamps are 51 to 59.
FIELDS: dict[str, Any] = {
    "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_length": 30,
    "is_multilingual": True, "lang_to_id": {"<|en|>": 60, "<|de|>": 61},
    "task_to_id": {"transcribe": 62, "translate": 63}, "no_timestamps_token_id": 50, "max_initial_timestamp_index": 3,
    "suppress_tokens": [11, 12, 20], "begin_suppress_tokens": [2, 7], "prev_sot_token_id": 49,
}  # fmt: skip


def whisper() -> PreTrainedModel:
    model = build("whisper")
    model.generation_config = GenerationConfig(**FIELDS)
    return model


def audio(batch: int, frames: int = 40) -> Tensor:
    return torch.randn(batch, 8, frames, generator=torch.Generator().manual_seed(5))


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "german": {"language": "de", "task": "translate"},
    "timestamps": {"language": "en", "return_timestamps": True},
    # One window each: the noise of a second one would begin anew.
    "sampled": {"language": "en", "temperature": 0.9, "force_unique_generate_call": True},
    "two answers": {
        "do_sample": True,
        "temperature": 0.9,
        "num_return_sequences": 2,
        "force_unique_generate_call": True,
    },
    "prompted": {"language": "en", "prompt_ids": torch.tensor([49, 13, 14, 15])},
}


def both(batch: int, maker: str, frames: int, **call: Any) -> tuple[Any, Any, PreTrainedModel]:
    """What the call returns without and with a tree; noise counts the tokens of the decoder."""
    plain, model = whisper(), enable(whisper())
    begin: list[Tensor] = []
    hook = plain.register_forward_pre_hook(
        lambda _, args, kwargs: begin.append(kwargs["decoder_input_ids"]), with_kwargs=True
    )
    plain.generate(audio(1), **{**call, "temperature": None, "num_return_sequences": 1, "max_new_tokens": 1})
    hook.remove()
    rows = batch * call.get("num_return_sequences", 1)
    width = begin[-1].shape[1]
    # The noise goes by the prompt of the decoder, which is the same for all rows.
    with gumbel_multinomial(OFF.seed or 0, begin[-1][:1].tolist() * rows, [width] * rows, VOCAB):
        expected = plain.generate(audio(batch, frames), **call)
    text = expected if isinstance(expected, Tensor) else expected["sequences"]
    known = [[0] * width + row for row in text.tolist()]
    with drafting(Source(MAKERS[maker], vocab=VOCAB, truth=known)):
        actual = model.generate(audio(batch, frames), tree_config=BUSHES, **call)
    return expected, actual, model


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", CALLS)
def test_one_window_equals_plain(name: str, batch: int) -> None:
    expected, actual, model = both(batch, "half_right" if batch > 1 else "wide", 40, **CALLS[name])
    assert torch.equal(expected, actual)
    assert model.treespec_stats.rounds > 0


@pytest.mark.parametrize("batch", [1, 3])
def test_outputs(batch: int) -> None:
    call = {"language": "en", "return_dict_in_generate": True, "output_scores": True}
    expected, actual, _ = both(batch, "half_right", 40, **call)
    assert set(actual) == set(expected)
    assert torch.equal(expected.sequences, actual.sequences)
    for one, two in zip(expected.scores, actual.scores, strict=True):
        torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-4)
    caches = [_compat.cache_from_outputs(out) for out in (expected, actual)]
    for one, two in zip(*(cache.self_attention_cache.layers for cache in caches), strict=True):
        torch.testing.assert_close(one.keys, two.keys, atol=1e-3, rtol=1e-4)


def test_several_windows_equal_plain() -> None:
    call = {"language": "en", "return_timestamps": True, "attention_mask": torch.ones(2, 60)}
    expected, actual, _ = both(2, "half_right", 60, **call)
    assert torch.equal(expected, actual)


def test_ngrams_and_route() -> None:
    assert is_supported(whisper()).route == "paths"
    model = enable(whisper())
    out = model.generate(audio(3), language="en", tree_config=OFF)
    assert torch.equal(out, whisper().generate(audio(3), language="en"))
    assert model.treespec_stats.draft == "ngram"
