"""Trees of decoders behind an encoder: the same text, outputs and caches as plain generate()."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation.utils import GenerateEncoderDecoderOutput

import tiny
from calls import BUSHES, CHAINS_OF_4, GREEDY, SAMPLED
from hf_treespec import TreeConfig, UnsupportedCallError, _compat, enable, is_supported
from seq2seq import (
    LIVELY,
    PAIRED,
    VOCAB,
    assert_same_caches,
    build,
    pair_of_caches,
    source_text,
    stock,
    treed,
    twice,
)
from sources import MAKERS, Source, drafting
from tiny import assert_lively, cache_argument

families = pytest.mark.parametrize("family", PAIRED)
batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])
DICT: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
NGRAMS = TreeConfig(fallback="off", seed=3)


@families
def test_the_route_is_found_from_the_model(family: str) -> None:
    assert is_supported(stock(family)) == (True, "paths", "a probe tree equals its paths when each is a batch row")


@families
@batches
@samplings
@pytest.mark.parametrize("maker", ["half_right", "deep", "random_tree"])
def test_equals_plain(family: str, batch: int, sampling: dict[str, Any], maker: str) -> None:
    pair = twice(family, source_text(batch), maker=maker, **sampling)
    assert_lively(pair.expected, 1)
    if maker == "deep":
        assert pair.stats.accepted_tokens > 0


@pytest.mark.parametrize("maker", MAKERS)
def test_any_tree_equals_plain(maker: str) -> None:
    twice("bart", source_text(3), maker=maker)


@families
@batches
def test_a_right_draft_saves_forwards(family: str, batch: int) -> None:
    pair = twice(family, source_text(batch), maker="deep", max_new_tokens=24)
    assert pair.stats.rounds < 12


@families
@batches
@samplings
def test_scores_logits_and_the_returned_cache(family: str, batch: int, sampling: dict[str, Any]) -> None:
    pair = twice(family, source_text(batch), max_new_tokens=15, repetition_penalty=1.2, **DICT, **sampling)
    expected, actual = pair.expected, pair.actual
    assert type(actual) is GenerateEncoderDecoderOutput
    assert set(actual) == set(expected)
    for name in ("scores", "logits"):
        for one, two in zip(expected[name], actual[name], strict=True):
            assert two.dtype == one.dtype
            torch.testing.assert_close(two, one, atol=1e-3, rtol=1e-4)
    caches = _compat.cache_from_outputs(expected), _compat.cache_from_outputs(actual)
    assert caches[1].get_seq_length() == actual.sequences.shape[1] - 1
    assert_same_caches(*caches)


@families
@samplings
def test_rows_equal_their_own_runs(family: str, sampling: dict[str, Any]) -> None:
    inputs = source_text(3)
    whole = twice(family, inputs, **sampling).actual
    if not sampling["do_sample"]:
        for row in range(3):
            keep = inputs["attention_mask"][row].bool()
            alone = {name: value[row : row + 1, keep] for name, value in inputs.items()}
            assert torch.equal(twice(family, alone).actual[0], whole[row])


@families
@batches
@pytest.mark.parametrize("maker", ["chain", "half_right"])
def test_an_end_inside_a_path(family: str, batch: int, maker: str) -> None:
    text = stock(family).generate(**source_text(batch), max_new_tokens=24, do_sample=False, **LIVELY.get(family, {}))
    for place in (1, 3, 6):
        eos = int(text[0, place])
        pair = twice(family, source_text(batch), maker=maker, truth=text, max_new_tokens=24, eos_token_id=eos, **DICT)
        caches = _compat.cache_from_outputs(pair.expected), _compat.cache_from_outputs(pair.actual)
        assert_same_caches(*caches)


@families
@pytest.mark.parametrize("new", [1, 2, 7])
def test_a_budget_inside_a_path(family: str, new: int) -> None:
    text = stock(family).generate(**source_text(1), max_new_tokens=24, do_sample=False, **LIVELY.get(family, {}))
    pair = twice(family, source_text(1), maker="chain", truth=text, max_new_tokens=new)
    assert pair.actual.shape[1] == 1 + new


@families
@samplings
def test_num_return_sequences_share_their_encoder_run(family: str, sampling: dict[str, Any]) -> None:
    ran: list[int] = []
    handle = treed(family).get_encoder().register_forward_hook(lambda *_: ran.append(1))
    more = {"num_return_sequences": 2} if sampling["do_sample"] else {}
    twice(family, source_text(3), **more, **sampling)
    handle.remove()
    assert ran == [1]


@families
@batches
def test_forced_suppressed_and_stopping_tokens(family: str, batch: int) -> None:
    arguments: dict[str, Any] = {
        "forced_bos_token_id": 7,
        "forced_eos_token_id": 9,
        "eos_token_id": 9,
        "suppress_tokens": [11, 20, 27, 44],
        "begin_suppress_tokens": [5, 18],
        "no_repeat_ngram_size": 2,
        "encoder_no_repeat_ngram_size": 2,
        "encoder_repetition_penalty": 1.3,
    }
    pair = twice(family, source_text(batch), max_new_tokens=12, **arguments)
    assert pair.actual[:, 1].tolist() == [7] * batch
    assert pair.actual.shape[1] < 13 or set(pair.actual[:, -1].tolist()) <= {9, 0, VOCAB - 1}


@families
@batches
def test_decoder_ids_with_padding(family: str, batch: int) -> None:
    ids = torch.randint(3, VOCAB - 2, (batch, 5), generator=torch.Generator().manual_seed(4))
    ids[:, 0] = stock(family).config.decoder_start_token_id
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[1, 1:3] = 0
    given = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    pair = twice(family, source_text(batch), begin=5, **given)
    assert torch.equal(pair.actual[:, :5], ids)


@families
@batches
def test_encoder_outputs_instead_of_inputs(family: str, batch: int) -> None:
    inputs = source_text(batch)
    with torch.no_grad():
        states = stock(family).get_encoder()(**inputs)
    pair = twice(family, {"attention_mask": inputs["attention_mask"]}, encoder_outputs=states)
    assert torch.equal(pair.actual, twice(family, inputs).actual)


@families
def test_embedded_inputs_of_the_encoder(family: str) -> None:
    inputs = source_text(3)
    with torch.no_grad():
        embedded = stock(family).get_input_embeddings()(inputs.pop("input_ids"))
    twice(family, {**inputs, "inputs_embeds": embedded})


@families
@batches
def test_a_passed_in_cache_is_the_same_object_and_goes_on(family: str, batch: int) -> None:
    ours, theirs = pair_of_caches(stock(family)), pair_of_caches(stock(family))
    made = iter([theirs, ours])
    first = twice(family, source_text(batch), fresh=lambda: cache_argument(next(made)), max_new_tokens=8, **DICT)
    assert _compat.cache_from_outputs(first.actual) is ours
    assert_same_caches(theirs, ours)
    ids = first.expected.sequences
    made = iter([theirs, ours])
    given = {"decoder_input_ids": ids, "decoder_attention_mask": torch.ones_like(ids)}
    twice(
        family, source_text(batch), begin=ids.shape[1], fresh=lambda: cache_argument(next(made)), max_new_tokens=9,
        **given,
    )  # fmt: skip
    assert_same_caches(theirs, ours)
    # Without a mask the decoder reads the ids as they are, behind what the cache holds.
    made = iter([theirs, ours])
    twice(
        family, source_text(batch), begin=ids.shape[1], fresh=lambda: cache_argument(next(made)), max_new_tokens=9,
        decoder_input_ids=ids,
    )  # fmt: skip
    assert_same_caches(theirs, ours)


def test_a_cache_with_layers_that_the_decoder_never_fills() -> None:
    config = copy.deepcopy(stock("bart").config)
    config.decoder_layers = 4

    def fresh() -> dict[str, Any]:
        return cache_argument(EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config)))

    pair = twice("bart", source_text(3), fresh=fresh, return_dict_in_generate=True)
    assert len(_compat.cache_from_outputs(pair.actual).self_attention_cache.layers) == 4


class Burst(Exception):
    pass


@families
@batches
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("place", ["forward", "criterion"])
def test_an_exception_leaves_a_committed_prefix(family: str, batch: int, at: int, place: str) -> None:
    model, cache = enable(build(family)), pair_of_caches(stock(family))
    count = 0

    def burst(*_: Any, **__: Any) -> Tensor:
        nonlocal count
        count += 1
        if count > at:
            raise Burst
        return torch.zeros(batch, dtype=torch.bool)

    text = stock(family).generate(**source_text(batch), max_new_tokens=20, do_sample=False, **LIVELY.get(family, {}))
    call: dict[str, Any] = {**source_text(batch), "max_new_tokens": 20, "do_sample": False, **LIVELY.get(family, {})}
    handle = None
    if place == "forward":
        layers = [m for m in model.get_decoder().modules() if type(m).__name__.endswith(("DecoderLayer", "Block"))]
        handle = layers[-1].register_forward_pre_hook(lambda *_: (burst(), None)[1])
    more = {} if place == "forward" else {"stopping_criteria": [burst]}
    source = Source(MAKERS["half_right"], vocab=VOCAB, truth=text.tolist())
    with drafting(source), pytest.raises(Burst):
        model.generate(**call, tree_config=BUSHES, **more, **cache_argument(cache))
    if handle is not None:
        handle.remove()
    length = cache.get_seq_length()
    assert length == 0 if (at, place) == (0, "forward") else 1 <= length <= 19
    if length == 0:
        assert cache.cross_attention_cache.get_seq_length() == 0
        assert not any(cache.is_updated.values())
        return
    # What is left is what plain decoding would have read, and is good enough to go on from.
    theirs = pair_of_caches(stock(family))
    ids = text[:, :length]
    stock(family).generate(
        **source_text(batch), max_new_tokens=1, do_sample=False, decoder_input_ids=ids, **cache_argument(theirs)
    )
    assert_same_caches(theirs, cache)
    ids = text[:, : length + 1]
    out = model.generate(
        **{**call, "max_new_tokens": 20 - length}, tree_config=NGRAMS, decoder_input_ids=ids,
        decoder_attention_mask=torch.ones_like(ids), **cache_argument(cache),
    )  # fmt: skip
    assert torch.equal(out, text)


@pytest.mark.parametrize("family", ["bart", "marian"])
@batches
def test_up_to_the_end_of_the_positions(family: str, batch: int) -> None:
    limit = stock(family).config.max_position_embeddings
    # The budget allows more than the table: a tree must not look past its end.
    end = {"stopping_criteria": [lambda ids, scores: torch.full((batch,), ids.shape[1] > limit)]}
    pair = twice(family, source_text(batch), maker="half_right", max_new_tokens=2 * limit, **end)
    assert pair.actual.shape[1] == limit + 1


@families
@batches
@samplings
def test_ngrams_and_streams(family: str, batch: int, sampling: dict[str, Any]) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.steps: list[list[Any]] = []

        def put(self, tokens: Tensor) -> None:
            self.steps.append(tokens.tolist())

        def end(self) -> None:
            self.steps.append(["end"])

    streamers = [Streamer(), Streamer()]
    made = iter(streamers)
    twice(family, source_text(batch), fresh=lambda: {"streamer": next(made)}, max_new_tokens=9, **sampling)
    assert streamers[0].steps == streamers[1].steps
    call = {**source_text(batch), "max_new_tokens": 30, **sampling}
    plain = treed(family).generate(tree_config=NGRAMS.replace(max_nodes=0), **call)
    assert torch.equal(treed(family).generate(tree_config=NGRAMS, **call), plain)
    assert treed(family).treespec_stats.draft == "ngram"


@families
def test_the_model_is_left_as_it_was(family: str) -> None:
    model = enable(build(family))
    before = tiny.fingerprint(model)
    config = copy.deepcopy(CHAINS_OF_4)
    model.generate(**source_text(3), tree_config=config, max_new_tokens=9, do_sample=True)
    assert tiny.fingerprint(model) == before and config == CHAINS_OF_4


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "attentions": ({**DICT, "output_attentions": True}, "output_attentions=True with tree_config"),
    "states": ({**DICT, "output_hidden_states": True}, "output_hidden_states=True with tree_config"),
    "static": ({"cache_implementation": "static"}, "cache_implementation='static' with tree_config"),
}


@families
@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(family: str, name: str) -> None:
    arguments, message = REFUSALS[name]
    ran: list[int] = []
    handle = treed(family).register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(UnsupportedCallError, match=message):
        treed(family).generate(**source_text(1), tree_config=NGRAMS, **arguments)
    handle.remove()
    assert not ran


@families
def test_an_assistant_behind_an_encoder_is_refused(family: str) -> None:
    with pytest.raises(UnsupportedCallError, match=r"assistant_model is a .* cannot draft trees"):
        treed(family).generate(**source_text(1), tree_config=NGRAMS, assistant_model=stock(family))


@families
def test_a_cache_for_one_attention_only_is_refused_before_the_encoder_runs(family: str) -> None:
    model, ran = treed(family), []
    cache = DynamicCache(config=stock(family).config)
    handle = model.get_encoder().register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(UnsupportedCallError, match="cache of type DynamicCache .* expected EncoderDecoderCache"):
        model.generate(**source_text(1), tree_config=NGRAMS, **cache_argument(cache))
    handle.remove()
    assert not ran and cache.get_seq_length() == 0
