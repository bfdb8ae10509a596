"""Tiny models of the rows that are about a kind of model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    CLIPVisionConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

_IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def t5() -> PreTrainedModel:
    config = T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, initializer_factor=2.0,
        decoder_start_token_id=0, tie_word_embeddings=False, **_IDS,
    )  # fmt: skip
    return _made(T5ForConditionalGeneration, config)


def bart() -> PreTrainedModel:
    config = BartConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=128, init_std=0.6,
        decoder_start_token_id=2, forced_eos_token_id=None, **_IDS,
    )  # fmt: skip
    return _made(BartForConditionalGeneration, config)


def whisper() -> PreTrainedModel:
    config = WhisperConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=20,
        max_target_positions=64, num_mel_bins=8, init_std=0.6, decoder_start_token_id=2, suppress_tokens=None,
        begin_suppress_tokens=None, **_IDS,
    )  # fmt: skip
    return _made(WhisperForConditionalGeneration, config)


def bloom() -> PreTrainedModel:
    config = BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.6, **_IDS)
    return _made(BloomForCausalLM, config)


def hybrid() -> PreTrainedModel:
    config = Lfm2Config(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, layer_types=["conv", "full_attention"],
        block_multiple_of=8, initializer_range=0.6, **_IDS,
    )  # fmt: skip
    return _made(Lfm2ForCausalLM, config)


def llava() -> PreTrainedModel:
    """The image token is 96; an image of 8 by 8 pixels takes four of them."""
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4,
        projection_dim=16,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.6, **_IDS,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=96, vision_feature_select_strategy="default",
        vision_feature_layer=-1, **_IDS,
    )  # fmt: skip
    return _made(LlavaForConditionalGeneration, config)


def _made(cls: Any, config: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: PreTrainedModel = cls(config).eval()
    # The config of a generation is taken from the model's, and some fill in ids of their own.
    model.generation_config.eos_token_id = None
    return model
