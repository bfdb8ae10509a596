"""Models without weights are answered for by a tiny twin: the same route as a real model of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import accelerate
import pytest
import torch
import transformers
from transformers import (
    LlamaConfig,
    LlavaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)
from transformers import LlamaForCausalLM as Llama

from hf_treespec import disable, enable, is_supported
from hf_treespec.api.support import path_traits
from hf_treespec.routes import PathTraits
from hf_treespec.twin import VOCAB, WINDOW, enliven, is_twin, tiny_twin

# Threads only cost time at these sizes.
torch.set_num_threads(1)

TOLD = ", in a tiny twin of this config"


def skeleton(model_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return model_class(config)  # type: ignore[no-any-return]


# -- the same answer --

HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
FEW_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, **HEADS}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61, **FEW_HEADS}
GEMMA = {"num_hidden_layers": 34, "hidden_size": 2560, "head_dim": 256, "sliding_window": 1024, "vocab_size": 262208}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
BART = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 8}
# Route, class, sizes as published, and what of these a real small model has instead.
KINDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": (
        "mask", "LlamaForCausalLM",
        {**LARGE, "vocab_size": 128256, "rope_parameters": LLAMA3, "bos_token_id": 128000,
         "eos_token_id": [128001, 128008], "max_position_embeddings": 131072},
        {**SMALL, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "gemma3_text": (
        "mask", "Gemma3ForCausalLM", GEMMA, {**SMALL, "num_hidden_layers": 6, "head_dim": 8, "sliding_window": 5}
    ),
    "mistral": ("mask", "MistralForCausalLM", {**LARGE, "sliding_window": 4096}, {**SMALL, "sliding_window": 5}),
    "falcon": (
        "mask+alibi", "FalconForCausalLM",
        {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "alibi": True, "multi_query": False,
         "parallel_attn": False, "bias": True},
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61},
    ),
    "gpt2": (
        "mask", "GPT2LMHeadModel", {"n_embd": 1600, "n_layer": 24, "n_head": 25},
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 64},
    ),
    "roformer": (
        "mask+positions", "RoFormerForCausalLM", {"is_decoder": True},
        {"hidden_size": 32, "embedding_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61,
         "intermediate_size": 48},
    ),
    "mamba2": (
        "paths", "Mamba2ForCausalLM",
        {"hidden_size": 2560, "num_heads": 80, "head_dim": 64, "num_hidden_layers": 64, "n_groups": 1},
        {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "num_hidden_layers": 2, "vocab_size": 61, "state_size": 8,
         "chunk_size": 4},
    ),
    "lfm2": (
        "paths", "Lfm2ForCausalLM", {**LARGE, "num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
        {**SMALL, "full_attn_idxs": [1]},
    ),
    "qwen3_next": (
        "paths", "Qwen3NextForCausalLM",
        {"hidden_size": 2048, "num_hidden_layers": 48, "num_experts": 64, "num_experts_per_tok": 10, "head_dim": 256},
        {**SMALL, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
    "deepseek_v3": (
        "mask", "DeepseekV3ForCausalLM",
        {"rope_parameters": YARN, "max_position_embeddings": 163840, "quantization_config": FP8},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61, "kv_lora_rank": 8,
         "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
         "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 8, "qk_rope_head_dim": 4,
         "qk_nope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": 16, "quantization_config": None},
    ),
    "bamba": (
        "paths", "BambaForCausalLM",
        {**LARGE, "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128, "mamba_d_head": 64},
        {**SMALL, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
         "mamba_chunk_size": 4},
    ),
    "jamba": (
        "token-by-token", "JambaForCausalLM", {**LARGE, "num_experts": 4},
        {**SMALL, "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
         "mamba_dt_rank": 4, "use_mamba_kernels": False},
    ),
    "xlstm": (
        "paths+own-state", "xLSTMForCausalLM", {"hidden_size": 4096, "embedding_dim": 4096},
        {"hidden_size": 128, "embedding_dim": 128, "num_hidden_layers": 2, "num_blocks": 2, "num_heads": 4,
         "vocab_size": 61},
    ),
    "bart": (
        "paths", "BartForConditionalGeneration", {"d_model": 1024, "encoder_layers": 12, "decoder_layers": 12},
        {**BART, "decoder_attention_heads": 2, "decoder_ffn_dim": 8, "vocab_size": 61, "max_position_embeddings": 64},
    ),
    "openai-gpt": (
        "refuse", "OpenAIGPTLMHeadModel", {},
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 64},
    ),
}  # fmt: skip


def of_kind(name: str) -> tuple[Any, Callable[..., PreTrainedConfig]]:
    _, model_class, large, small = KINDS[name]
    cls = getattr(transformers, model_class)
    changes = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

    def config(*, published: bool) -> PreTrainedConfig:
        return cls.config_class(**(large if published else {**changes, **large, **small}))  # type: ignore[no-any-return]

    return cls, config


@pytest.mark.parametrize("name", KINDS)
def test_the_route_is_that_of_a_real_model_of_the_kind(name: str) -> None:
    cls, config = of_kind(name)
    real = cls(config(published=False)).eval()
    enliven(real, 1)
    wanted, found = is_supported(real), is_supported(skeleton(cls, config(published=True)))
    assert (found.ok, found.route) == (wanted.ok, wanted.route) == (KINDS[name][0] != "refuse", KINDS[name][0])
    assert found.reason.endswith(TOLD) and not wanted.reason.endswith(TOLD)


TOWER = {"model_type": "clip_vision_model", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}


def llava() -> LlavaConfig:
    text = {"model_type": "mistral", "sliding_window": 4096, "num_hidden_layers": 32, "vocab_size": 32064}
    return LlavaConfig(text_config=text, vision_config=TOWER, image_token_index=32000)


def test_a_model_of_several_parts() -> None:
    model = skeleton(transformers.LlavaForConditionalGeneration, llava())
    assert is_supported(model) == (True, "mask", "a probe tree equals its paths" + TOLD)
    with tiny_twin(model) as twin:
        text = twin.config.get_text_config()
        assert (text.model_type, text.sliding_window, text.vocab_size) == ("mistral", WINDOW, VOCAB)
        assert twin.config.vision_config.model_type == "clip_vision_model"
        # A token of the vocabulary, as in the large one, and none that the probes read.
        assert 50 < twin.config.image_token_index < VOCAB


def test_a_pair_of_two_models() -> None:
    bert = transformers.BertConfig()
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert, bert)
    reason = "a probe tree equals its paths when each is a batch row" + TOLD
    assert is_supported(skeleton(transformers.EncoderDecoderModel, config)) == (True, "paths", reason)


def test_the_attention_is_kept_or_replaced_by_one_that_runs_here() -> None:
    for name, wanted in (("eager", "eager"), ("sdpa", "sdpa"), ("flex_attention", "sdpa")):
        model = skeleton(Llama, LlamaConfig(attn_implementation=name))
        with tiny_twin(model) as twin:
            assert twin.config._attn_implementation == wanted
    # Of the model that was asked about.
    assert "the model runs 'flex_attention'" in is_supported(model).reason


def test_sizes_in_the_reason_are_those_of_the_model() -> None:
    model = skeleton(transformers.GPTNeoForCausalLM, transformers.GPTNeoConfig(window_size=256))
    assert "its config names window_size=256" in is_supported(model).reason


# -- without a trace --


@pytest.mark.parametrize("inside", ["nothing", "meta", "inference"])
def test_nothing_of_the_caller_changes(inside: str) -> None:
    config = Qwen3NextConfig(num_hidden_layers=8, num_experts=8)
    model = skeleton(transformers.Qwen3NextForCausalLM, config)
    before = config.to_json_string(use_diff=False)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    verbosity = transformers.logging.get_verbosity()
    with ExitStack() as stack:
        if inside == "meta":
            stack.enter_context(torch.device("meta"))
        if inside == "inference":
            stack.enter_context(torch.inference_mode())
        with tiny_twin(model) as twin:
            assert {p.device.type for p in twin.parameters()} == {"cpu"}
            assert {p.dtype for p in twin.parameters()} == {torch.float32} and not twin.training
            torch.rand(3)
        assert torch.empty(0).device.type == ("meta" if inside == "meta" else "cpu")
        assert torch.is_inference_mode_enabled() == (inside == "inference")
        # A class of its own, so that no other answer is remembered.
        model.__class__ = type("Fresh", (type(model),), {"forward": type(model).forward})
        assert is_supported(model).route == "paths" and is_supported(model).reason.endswith(TOLD)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.to_json_string(use_diff=False) == before
    assert transformers.logging.get_verbosity() == verbosity and torch.get_default_dtype() == torch.float32
    assert all(p.device.type == "meta" for p in model.parameters())


def test_a_twin_is_always_the_same() -> None:
    # Some of its parameters are random, and not drawn anew.
    model = skeleton(transformers.Mamba2ForCausalLM, transformers.Mamba2Config())
    torch.manual_seed(1)
    with tiny_twin(model) as one:
        pass
    torch.manual_seed(2)
    with tiny_twin(model) as two:
        assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


def test_it_matters_to_a_twin_where_a_token_stands() -> None:
    with tiny_twin(skeleton(Llama, LlamaConfig())) as twin:
        ids, places = torch.tensor([[5, 3, 7, 8, 9]]), torch.arange(5)[None]
        one, two = (twin(ids, position_ids=places * step).logits[0, -1] for step in (1, 2))
        assert float((one - two).abs().max()) > 0.1 * float(one.abs().max())


def counted(model: PreTrainedModel, run: Callable[[], Any]) -> int:
    ran: list[int] = []
    handle = model.register_forward_pre_hook(lambda module, args: ran.append(1))
    run()
    handle.remove()
    return len(ran)


def test_a_model_with_weights_is_always_probed_itself() -> None:
    class Fresh(Llama):
        """Not asked about by any other test."""

    config = LlamaConfig(**SMALL)
    assert is_supported(skeleton(Fresh, config)).reason.endswith(TOLD)
    real = Fresh(config)
    assert counted(real, lambda: is_supported(real)) > 0
    assert not is_supported(real).reason.endswith(TOLD)
    assert is_supported(skeleton(Fresh, config)).reason.endswith(TOLD)
    # And not the twin's, if it has just the config of a twin.
    with tiny_twin(skeleton(Fresh, config)) as twin:
        assert is_twin(twin) and not is_twin(real)
        same = Fresh(twin.config)
        is_supported(twin)
        assert counted(same, lambda: is_supported(same)) > 0


def test_half_loaded_weights_pass_for_none() -> None:
    class Fresh(Llama):
        """Not asked about by any other test."""

    half, whole = Fresh(LlamaConfig(**SMALL)), Fresh(LlamaConfig(**SMALL))
    half.lm_head.to("meta")
    assert half.device.type == "cpu" and is_supported(half).reason.endswith(TOLD)
    assert not is_supported(whole).reason.endswith(TOLD)


def test_what_is_found_out_about_a_twin_is_no_trait_of_the_model() -> None:
    config = transformers.RwkvConfig(num_hidden_layers=2, hidden_size=32, attention_hidden_size=32, vocab_size=61)
    model = skeleton(transformers.RwkvForCausalLM, config)
    assert is_supported(model).route == "paths+own-state"
    assert path_traits(model) == PathTraits()


def test_an_answer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_treespec.api import support

    class Fresh(Llama):
        """Not asked about by any other test."""

    built: list[int] = []

    def counting(model: Any) -> Any:
        built.append(1)
        return tiny_twin(model)

    monkeypatch.setattr(support, "tiny_twin", counting)
    model = skeleton(Fresh, LlamaConfig())
    enabled = enable(skeleton(Fresh, LlamaConfig()))
    assert is_supported(model) == is_supported(enabled) == is_supported(model) and built == [1]
    with tiny_twin(enabled) as twin:
        assert type(twin) is Fresh
    disable(enabled)


def test_offloaded_weights_are_not_replaced() -> None:
    model = Llama(LlamaConfig(**SMALL))
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    reason = "by class, config and cache layers; not probed, its weights are offloaded"
    assert is_supported(model) == (True, "mask", reason)
    assert is_supported(skeleton(Llama, LlamaConfig(**SMALL))).reason.endswith(TOLD)


def test_what_is_not_probed_of_half_a_model_is_not_said_of_a_whole_one() -> None:
    half, whole = Llama(LlamaConfig(**SMALL, rope_theta=7777.0)), Llama(LlamaConfig(**SMALL, rope_theta=7777.0))
    accelerate.cpu_offload(half.model.layers[-1], execution_device=torch.device("cpu"))
    assert half.device.type == "cpu" and is_supported(half).reason.endswith("not probed, its weights are offloaded")
    assert is_supported(whole).reason == "a probe tree equals its paths"
