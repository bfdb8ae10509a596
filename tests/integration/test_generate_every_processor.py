"""Each class that `generate` can build a processor of, alone, tree against plain; and that none was forgotten."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from transformers import (
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import logits_process

from calls import Pair, twice
from tiny import WIDTH, prompt, reference, stock

NEW = 14
WANTED: dict[str, Any] = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True}
# class: settings that build it and that matter for the text.
PROCESSORS: dict[str, dict[str, Any]] = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": {"guidance_scale": 1.7},
    "SequenceBiasLogitsProcessor": {"sequence_bias": [[[n], 6.0] for n in range(20, 40)] + [[[30, 31], -40.0]]},
    "EncoderRepetitionPenaltyLogitsProcessor": {"encoder_repetition_penalty": 8.0},
    "RepetitionPenaltyLogitsProcessor": {"repetition_penalty": 2.5},
    "NoRepeatNGramLogitsProcessor": {"no_repeat_ngram_size": 1},
    "EncoderNoRepeatNGramLogitsProcessor": {"encoder_no_repeat_ngram_size": 1},
    "NoBadWordsLogitsProcessor": {"bad_words_ids": [[n] for n in range(20, 60)] + [[61, 62], [70, 71]]},
    "MinLengthLogitsProcessor": {"min_length": WIDTH + 8, "eos_token_id": list(range(5, 60))},
    "MinNewTokensLengthLogitsProcessor": {"min_new_tokens": 8, "eos_token_id": list(range(5, 60))},
    "PrefixConstrainedLogitsProcessor": {
        "prefix_allowed_tokens_fn": lambda row, ids: list(range(3 + row + int(ids[-1]) % 3, 97, 3))
    },
    "ForcedBOSTokenLogitsProcessor": {"forced_bos_token_id": 17},
    "ForcedEOSTokenLogitsProcessor": {"forced_eos_token_id": [9, 10]},
    "InfNanRemoveLogitsProcessor": {"remove_invalid_values": True, "sequence_bias": [[[8], float("inf")]]},
    "ExponentialDecayLengthPenalty": {"exponential_decay_length_penalty": (3, 1.6), "eos_token_id": [1, 68]},
    "SuppressTokensLogitsProcessor": {"suppress_tokens": list(range(20, 60))},
    "SuppressTokensAtBeginLogitsProcessor": {"begin_suppress_tokens": list(range(3, 90))},
    "WatermarkLogitsProcessor": {"watermarking_config": WatermarkingConfig(bias=6.0)},
    "SynthIDTextWatermarkLogitsProcessor": {
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=3)
    },
}
# These are built under sampling only.
WARPERS: dict[str, dict[str, Any]] = {
    "TemperatureLogitsWarper": {"temperature": 3.0},
    "TopHLogitsWarper": {"top_h": 0.3},
    "TopKLogitsWarper": {"top_k": 2},
    "TopPLogitsWarper": {"top_p": 0.3},
    "MinPLogitsWarper": {"min_p": 0.5},
    "TypicalLogitsWarper": {"typical_p": 0.3},
    "EpsilonLogitsWarper": {"epsilon_cutoff": 0.2},
    "EtaLogitsWarper": {"eta_cutoff": 0.4},
    "LogitNormalization": {"renormalize_logits": True, "temperature": 3.0},
}
batches = pytest.mark.parametrize("batch", [1, 3])
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0}


def run(name: str, settings: dict[str, Any], batch: int, sampling: dict[str, Any], maker: str) -> Pair:
    built: list[str] = []
    original = GenerationMixin._get_logits_processor

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        built.extend(type(one).__name__ for one in made)
        return made

    ids, mask = prompt("llama", batch)
    if name == "ForcedBOSTokenLogitsProcessor":
        ids, mask = ids[:, -1:], mask[:, -1:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationMixin, "_get_logits_processor", watched)
        pair = twice(ids, mask, maker=maker, **{**sampling, **settings}, **WANTED)
    assert name in built
    without = reference(stock("llama"), ids, mask, seed=3, max_new_tokens=NEW, **sampling)
    # The first never does; what samples of the other repeat of the prompt is a matter of luck.
    if name not in ("LogitNormalization", "EncoderNoRepeatNGramLogitsProcessor"):
        assert not torch.equal(pair.actual.sequences, without), "the processor must matter"
    one, two = (torch.stack(out.scores).clamp(min=-15.0, max=1e9) for out in (pair.expected, pair.actual))
    torch.testing.assert_close(two, one, atol=1e-3, rtol=1e-3)
    return pair


@batches
@pytest.mark.parametrize("sampling", [{"do_sample": False}, SAMPLED], ids=["t0", "t1"])
@pytest.mark.parametrize("name", list(PROCESSORS))
def test_processor(name: str, batch: int, sampling: dict[str, Any]) -> None:
    run(name, PROCESSORS[name], batch, sampling, "half_right")


@batches
@pytest.mark.parametrize("maker", ["half_right", "wide"])
@pytest.mark.parametrize("name", list(WARPERS))
def test_warper(name: str, batch: int, maker: str) -> None:
    run(name, WARPERS[name], batch, SAMPLED, maker)


def test_no_class_was_forgotten() -> None:
    source = inspect.getsource(GenerationMixin._get_logits_processor)
    built = set(re.findall(r"processors\.append\(\s*(\w+)\(", source))
    built |= {name for name in vars(logits_process) if name.endswith("WatermarkLogitsProcessor")}
    assert len(built) >= 25
    assert built == {*PROCESSORS, *WARPERS}


@batches
def test_list_of_the_caller_comes_before_the_warpers(batch: int) -> None:
    class Scaled(LogitsProcessor):
        """Order matters: a cut by probability after it is another cut than before it."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores * (0.05 if input_ids.shape[1] % 2 else 1.0)

    ids, mask = prompt("llama", batch)
    call = {"do_sample": True, "temperature": 2.0, "top_p": 0.6, "top_k": 0, **WANTED}
    pair = twice(ids, mask, logits_processor=LogitsProcessorList([Scaled()]), **call)
    one, two = (torch.stack(out.scores) for out in (pair.expected, pair.actual))
    torch.testing.assert_close(two, one, atol=1e-3, rtol=1e-3)
