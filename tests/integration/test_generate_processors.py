"""Processors with a state, with a view of the batch, or with an eye on the length: called as in plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig, WatermarkingConfig

from calls import BUSHES, CHAINS_OF_4, GREEDY, SAMPLED, Pair, twice
from tiny import WIDTH, prompt, reference, stock, treed

batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])
NEW = 16
WANTED: dict[str, Any] = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True}

SYNTHID = SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123, 340, 443, 597, 160, 57], ngram_len=3)
CONFIGURED: dict[str, dict[str, Any]] = {
    "guidance": {"guidance_scale": 1.8},
    "guidance_negative": {"guidance_scale": 3.0, "negative_prompt_ids": torch.tensor([[9, 8, 7]])},
    "synthid": {"watermarking_config": SYNTHID},
    "green_list": {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "green_list_selfhash": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")},
    "forced_eos": {"forced_eos_token_id": 1, "eos_token_id": 1},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.6), "eos_token_id": [1, 68]},
    "bad_words": {"bad_words_ids": [[n] for n in range(20, 60)] + [[61, 62], [70, 71]]},
    "inf_nan": {"remove_invalid_values": True, "renormalize_logits": True, "repetition_penalty": 1.5},
}


def assert_same_scores(pair: Pair) -> None:
    assert len(pair.actual.scores) == len(pair.expected.scores) == pair.actual.sequences.shape[1] - WIDTH
    # SynthID takes logarithms of differences that vanish: what is as good as forbidden is noise.
    one, two = (torch.stack(out.scores).clamp(min=-15.0) for out in (pair.expected, pair.actual))
    torch.testing.assert_close(two, one, atol=1e-3, rtol=1e-3)


@batches
@samplings
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("name", list(CONFIGURED))
def test_configured_processor_is_plain(family: str, name: str, batch: int, sampling: dict[str, Any]) -> None:
    ids, mask = prompt(family, batch)
    call = {**sampling, **CONFIGURED[name]}
    if "negative_prompt_ids" in call:
        call["negative_prompt_ids"] = call["negative_prompt_ids"].expand(batch, -1)
        call["negative_prompt_attention_mask"] = torch.ones(batch, 3, dtype=torch.long)
    pair = twice(ids, mask, family=family, **call, **WANTED)
    assert_same_scores(pair)
    assert pair.stats.accepted_tokens > 0
    without = reference(stock(family), ids, mask, seed=3, max_new_tokens=NEW, **sampling)
    assert not torch.equal(pair.actual.sequences, without), "the processor must matter for this to test anything"


@samplings
def test_forced_bos_behind_a_prompt_of_one_token(sampling: dict[str, Any]) -> None:
    ids, mask = torch.tensor([[3], [4], [5]]), torch.ones(3, 1, dtype=torch.long)
    pair = twice(ids, mask, forced_bos_token_id=17, max_new_tokens=NEW, **sampling)
    assert pair.actual[:, 1].tolist() == [17, 17, 17]


@samplings
@pytest.mark.parametrize("returned", [1, 2])
def test_prefix_allowed_tokens_gets_the_rows_of_the_batch(returned: int, sampling: dict[str, Any]) -> None:
    if returned > 1 and not sampling["do_sample"]:
        pytest.skip("greedy decoding returns one sequence")
    asked: list[list[tuple[int, list[int]]]] = []

    def fresh() -> dict[str, Any]:
        mine: list[tuple[int, list[int]]] = []
        asked.append(mine)

        def allowed(batch_id: int, ids: Tensor) -> list[int]:
            mine.append((batch_id, ids.tolist()))
            # Another third of the vocabulary for each row, shifted by the text.
            return list(range(3 + batch_id + int(ids[-1]) % 3, 97, 3))

        return {"prefix_allowed_tokens_fn": allowed}

    ids, mask = prompt("llama", 3)
    pair = twice(ids, mask, fresh=fresh, num_return_sequences=returned, **sampling, **WANTED)
    assert_same_scores(pair)
    # Which ids the rows get with several returned sequences differs between versions of transformers.
    assert asked[0] == asked[1] and {row for row, _ in asked[1]} >= {0, 1, 2}


class Counting(LogitsProcessor):
    """Has a state: the n-th call bans another residue class. Keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append((input_ids.clone(), scores.clone()))
        banned = torch.arange(scores.shape[1]) % 4 == len(self.calls) % 4
        return scores.masked_fill(banned, -float("inf"))


class InPlace(LogitsProcessor):
    """Writes into its arguments, and treats rows by their number."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for row in range(len(scores)):
            scores[row, row::5] -= 3.0 + int(input_ids[row, -1]) % 2
        return scores


@batches
@samplings
@pytest.mark.parametrize("maker", ["half_right", "wide", "wrong_chain"])
@pytest.mark.parametrize("eos", [None, [5, 6, 7, 9, 14, 23, 31, 40, 52]], ids=["no_eos", "eos"])
def test_processor_with_a_state_is_called_once_a_token(
    batch: int, sampling: dict[str, Any], maker: str, eos: list[int] | None
) -> None:
    ids, mask = prompt("qwen3", batch)
    call = {"max_new_tokens": NEW, "eos_token_id": eos, **sampling}
    pair = twice(
        ids,
        mask,
        family="qwen3",
        maker=maker,
        fresh=lambda: {"logits_processor": LogitsProcessorList([Counting()])},
        **call,
    )
    one, two = (extra["logits_processor"][0].calls for extra in (pair.plain, pair.tree))
    assert len(two) == len(one) == pair.actual.shape[1] - WIDTH
    for (ids1, scores1), (ids2, scores2) in zip(one, two, strict=True):
        assert torch.equal(ids1, ids2)
        torch.testing.assert_close(scores2, scores1, atol=1e-4, rtol=1e-4)


@batches
@samplings
def test_processor_that_writes_in_place_changes_nothing_else(batch: int, sampling: dict[str, Any]) -> None:
    ids, mask = prompt("llama", batch)
    pair = twice(
        ids, mask, logits_processor=LogitsProcessorList([InPlace()]), output_logits=True, **sampling, **WANTED
    )
    assert_same_scores(pair)
    # `logits` of the tree are raw. Plain decoding returns whatever the processor left of them.
    raw = stock("llama")(pair.actual.sequences[:1, mask[0].argmax() :]).logits[0, -NEW - 1 : -1]
    torch.testing.assert_close(torch.stack([step[0] for step in pair.actual.logits]), raw, atol=1e-3, rtol=1e-3)


@samplings
def test_scores_make_transition_scores(sampling: dict[str, Any]) -> None:
    ids, mask = prompt("llama", 3)
    eos = [5, 6, 7, 9, 14, 23, 31, 40, 52]
    pair = twice(ids, mask, config=CHAINS_OF_4, maker="chain", eos_token_id=eos, **sampling, **WANTED)
    one, two = (
        model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        for model, out in ((stock("llama"), pair.expected), (treed("llama"), pair.actual))
    )
    torch.testing.assert_close(two, one, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("batch", [1, 3])
def test_two_stateful_processors_together(batch: int) -> None:
    ids, mask = prompt("llama", batch)
    pair = twice(
        ids,
        mask,
        config=BUSHES,
        fresh=lambda: {"logits_processor": LogitsProcessorList([Counting(), InPlace()])},
        guidance_scale=1.6,
        watermarking_config=SYNTHID,
        no_repeat_ngram_size=2,
        **WANTED,
    )
    assert_same_scores(pair)
