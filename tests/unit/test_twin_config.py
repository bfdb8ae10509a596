"""What the tiny twin of a model keeps of its config, and what of it gets small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers
from transformers import (
    BambaConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3NextConfig,
)

from hf_treespec.twin import VOCAB, WINDOW, tiny_twin

# Threads only cost time at these sizes.
torch.set_num_threads(1)


@contextmanager
def twin_of(model_class: str, config: PreTrainedConfig) -> Iterator[PreTrainedModel]:
    with torch.device("meta"):
        skeleton = getattr(transformers, model_class)(config)
    with tiny_twin(skeleton) as twin:
        yield twin


@pytest.mark.parametrize("window", [None, 4096])
def test_windows_are_on_or_off_as_the_config_says(window: int | None) -> None:
    with twin_of("MistralForCausalLM", MistralConfig(sliding_window=window)) as twin:
        assert twin.config.sliding_window == (window and WINDOW)
    config = Qwen2Config(use_sliding_window=window is not None, sliding_window=window, max_window_layers=14)
    with twin_of("Qwen2ForCausalLM", config) as twin:
        assert twin.config.layer_types == ["full_attention", "sliding_attention" if window else "full_attention"]


def test_what_else_is_kept() -> None:
    config = Gemma2Config(final_logit_softcapping=None, attn_logit_softcapping=50.0, tie_word_embeddings=False)
    with twin_of("Gemma2ForCausalLM", config) as twin:
        assert (twin.config.attn_logit_softcapping, twin.config.final_logit_softcapping) == (50.0, None)
        assert twin.get_output_embeddings().weight is not twin.get_input_embeddings().weight
        assert twin.config.layer_types == ["sliding_attention", "full_attention"]
        assert twin.config.num_key_value_heads < twin.config.num_attention_heads
    for alibi in (True, False):
        with twin_of("FalconForCausalLM", FalconConfig(alibi=alibi, multi_query=True)) as twin:
            assert (twin.config.alibi, twin.config.multi_query) == (alibi, True)
    with twin_of("Qwen3NextForCausalLM", Qwen3NextConfig(num_experts=32)) as twin:
        assert twin.config.num_experts == 4 and set(twin.config.layer_types) == {"linear_attention", "full_attention"}


def test_layers_that_share_a_cache_come_behind_those_that_fill_it() -> None:
    with twin_of("Gemma3nForCausalLM", Gemma3nTextConfig(vocab_size=1000)) as twin:
        assert twin.config.num_kv_shared_layers == 2
        assert twin.config.layer_types == ["sliding_attention", "full_attention"] * 3


def test_numbers_of_layers_are_those_of_the_layers_that_stay() -> None:
    config = BambaConfig(attn_layer_indices=[9, 18, 27], num_hidden_layers=32)
    with twin_of("BambaForCausalLM", config) as twin:
        assert (twin.config.attn_layer_indices, twin.config.num_hidden_layers) == ([1], 2)


def test_weights_in_fewer_bits_are_none_of_a_twin() -> None:
    quantized = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    with twin_of("LlamaForCausalLM", LlamaConfig(quantization_config=quantized)) as twin:
        assert not hasattr(twin.config, "quantization_config")


def test_factors_by_frequency_are_as_many_as_the_head_rotates() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [1.5] * 48}
    config = Phi3Config(rope_parameters=rope, max_position_embeddings=131072, original_max_position_embeddings=4096)
    with twin_of("Phi3ForCausalLM", config) as twin:
        found = twin.config.rope_parameters
        assert found["rope_type"] == "longrope" and len(found["short_factor"]) == len(found["long_factor"]) == 8


def test_special_ids_are_different_tokens_of_the_vocabulary() -> None:
    ids = {"bos_token_id": 128000, "eos_token_id": [128001, 128009], "pad_token_id": 128004}
    with twin_of("LlamaForCausalLM", LlamaConfig(vocab_size=128256, **ids)) as twin:
        config = twin.config
        found = [config.bos_token_id, *config.eos_token_id, config.pad_token_id]
        assert len(set(found)) == 4 and all(0 <= one < VOCAB for one in found)
        assert config.vocab_size == VOCAB
    with twin_of("LlamaForCausalLM", LlamaConfig(pad_token_id=None, bos_token_id=1, eos_token_id=2)) as twin:
        assert (twin.config.pad_token_id, twin.config.bos_token_id, twin.config.eos_token_id) == (None, 1, 2)
