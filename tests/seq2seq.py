"""Tiny random models that read trees path by path: encoder-decoders, and causal models without position_ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    MarianConfig,
    MarianMTModel,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from calls import BUSHES, Pair, ids_of
from hf_treespec import TreeConfig
from sources import MAKERS, Source, drafting
from tiny import assert_same_cache, assert_same_text, gumbel_multinomial, shared

PAIRED = ("t5", "bart", "marian")
ALIBI = ("bloom", "mpt", "falcon")
VOCAB = 67
SOURCE_WIDTH = 9
# A tiny T5 of random weights soon repeats itself, whatever they are.
LIVELY: dict[str, dict[str, Any]] = {"t5": {"no_repeat_ngram_size": 2}}

_BART: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "init_std": 0.2,
}  # fmt: skip
_WIDE: dict[str, Any] = {"hidden_size": 32, "initializer_range": 0.3}
_KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "t5": (
        T5Config, T5ForConditionalGeneration,
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
         "initializer_factor": 1.0},
    ),
    "bart": (BartConfig, BartForConditionalGeneration, {**_BART, "max_position_embeddings": 48}),
    # Sinusoidal positions, a bias on the logits, decoding that begins with the padding id.
    "marian": (
        MarianConfig, MarianMTModel,
        {**_BART, "init_std": 0.1, "max_position_embeddings": 64, "pad_token_id": VOCAB - 1,
         "decoder_start_token_id": VOCAB - 1},
    ),
    "whisper": (
        WhisperConfig, WhisperForConditionalGeneration,
        {**_BART, "encoder_layers": 3, "max_source_positions": 20, "max_target_positions": 48, "num_mel_bins": 8,
         "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
    ),
    "bloom": (BloomConfig, BloomForCausalLM, {**_WIDE, "n_layer": 2, "n_head": 4}),
    "mpt": (MptConfig, MptForCausalLM, {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 48,
                                        "initializer_range": 0.1, "use_cache": True}),
    "falcon": (FalconConfig, FalconForCausalLM, {**_WIDE, "num_hidden_layers": 2, "num_attention_heads": 4,
                                                 "alibi": True}),
}  # fmt: skip


# With these greedy text does not fall into a loop at once; see `tiny.assert_lively`.
_SEEDS = {"bart": 0, "marian": 9, "t5": 4, "bloom": 2, "mpt": 3}


def build(family: str, **changes: Any) -> PreTrainedModel:
    """A new random float32 model, always the same, that never ends by itself."""
    seed = _SEEDS.get(family, 1)
    config_class, model_class, fields = _KINDS[family]
    ids = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "forced_eos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = config_class(**{"vocab_size": VOCAB, **ids, "tie_word_embeddings": False, **fields, **changes})
        model = model_class(config).eval()
    if family == "marian":
        model.final_logits_bias.normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        # Attention and positions that weigh little would let a wrong mask or position pass unnoticed.
        if family in ("t5", "bart"):
            for name, parameter in model.get_decoder().named_parameters():
                if "embed_positions" in name or "relative_attention" in name:
                    parameter.mul_(4.0)
                elif name.endswith((".o.weight", ".wo.weight")):
                    parameter.mul_(10.0)
    return model


stock, treed = shared(build)


def source_text(batch: int, seed: int = 0) -> dict[str, Tensor]:
    """Input of an encoder: random ids and a mask that ends two of three rows early."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB - 2, (batch, SOURCE_WIDTH), generator=generator)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, -3:] = 0
        mask[2, -1:] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def twice(
    family: str,
    inputs: dict[str, Any],
    *,
    models: tuple[PreTrainedModel, PreTrainedModel] | None = None,
    begin: int = 1,
    maker: str = "half_right",
    config: TreeConfig = BUSHES,
    truth: Tensor | None = None,
    fresh: Callable[[], dict[str, Any]] = dict,
    **arguments: Any,
) -> Pair:
    """Run a call of an encoder-decoder both ways and compare the sequences; see `calls.twice`.

    Args:
        family: of the shared models.
        inputs: of the encoder.
        models: a stock model and an enabled one, instead of the shared ones.
        begin: tokens that the decoder is given.
        maker: one of `sources.MAKERS`.
        config: of the tree; its seed is the noise of both.
        truth: text that the source believes in; default what transformers returned.
        fresh: makes arguments with a state of their own, once for each of the two.
        arguments: of generate().
    """
    plain_model, tree_model = models or (stock(family), treed(family))
    plain, tree = fresh(), fresh()
    call = {"do_sample": False, "max_new_tokens": 20, **LIVELY.get(family, {}), **inputs, **arguments}
    first = next(iter(inputs.values()))
    rows = len(first) * call.get("num_return_sequences", 1)
    # The noise goes by the prompt of the decoder.
    with torch.random.fork_rng(devices=[]):
        shown = ids_of(plain_model.generate(**{**call, "max_new_tokens": 1}))[:, :begin]
    with gumbel_multinomial(config.seed or 0, shown.tolist(), [begin] * rows, VOCAB):
        expected = plain_model.generate(**call, **plain)
    known = (ids_of(expected) if truth is None else truth).tolist()
    source = Source(MAKERS[maker], seed=1, vocab=VOCAB, truth=known)
    with drafting(source):
        actual = tree_model.generate(tree_config=config, **call, **tree)
    assert type(actual) is type(expected)
    assert_same_text(ids_of(expected), ids_of(actual), width=begin)
    return Pair(expected, actual, plain, tree, source, tree_model.treespec_stats)


def pair_of_caches(model: PreTrainedModel) -> EncoderDecoderCache:
    return EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))


def assert_same_caches(expected: EncoderDecoderCache, actual: EncoderDecoderCache) -> None:
    assert type(actual) is EncoderDecoderCache
    assert actual.is_updated == expected.is_updated
    for one, two in (
        (expected.self_attention_cache, actual.self_attention_cache),
        (expected.cross_attention_cache, actual.cross_attention_cache),
    ):
        batch, width = one.layers[0].keys.shape[0], one.get_seq_length()
        assert_same_cache(one, two, torch.ones(batch, width, dtype=torch.long))
