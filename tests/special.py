"""Tiny models with attention of a special kind: keys chosen by an index, blocks, windows, sinks, shared caches.

Windows and choices are far shorter than a prompt of `tiny.WIDTH` tokens, so that they bite from the start (those of
doge begin later: keys with equal scores are chosen among by the number of slots, so that no tree goes so far).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tiny import shared

VOCAB = 71
# Enough heads that no key has an index score of exactly zero, which would tie with others.
_INDEX_HEADS = 64
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}
_INDEXED: dict[str, Any] = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "index_topk": 4,
    "index_head_dim": 8,
    "index_n_heads": _INDEX_HEADS,
    "mlp_layer_types": ["dense", "sparse"],
}
_TWO_KINDS = ["full_attention", "sliding_attention"]

FIELDS: dict[str, dict[str, Any]] = {
    "axk2": {**_INDEXED, "gated_norm_rank": 4},
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": {**_INDEXED, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"],
                    "mlp_layer_types": ["dense", "sparse", "dense"]},
    "hy_v4": {**_INDEXED, "head_dim": 8},
    "dots3_note_text": {**_INDEXED, "sliding_window": 5, "num_hidden_layers": 3, "head_dim": 8,
                        "mlp_layer_types": ["dense", "sparse", "dense"]},
    "minimax_m3_vl_text": {
        "dense_intermediate_size": 48, "shared_intermediate_size": 16, "num_local_experts": 4,
        "num_experts_per_tok": 2, "rotary_dim": 4, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4,
        "index_topk_blocks": 2, "index_local_blocks": 1,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    },
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": _TWO_KINDS * 2, "sliding_window": 6,
        "intermediate_size": 48, "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0], "laurel_rank": 4,
        "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "altup_num_inputs": 2,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention"]},
    "llama4_text": {"num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 6,
                    "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2,
                    "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 6},
    "doge": {"keep_window_size": 40},
    "modernbert-decoder": {"local_attention": 8, "layer_types": ["sliding_attention", "full_attention"],
                           "global_attn_every_n_layers": 2},
    "gemma2": {"sliding_window": 6, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
}  # fmt: skip
# Softmax in float32 makes nothing of a float64 mask's least number.
_EAGER = ("gemma2", "gpt_oss", "gpt_neo", "hy_v4")
INDEXED = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4")


def known(names: tuple[str, ...] = tuple(FIELDS)) -> list[str]:
    """Those that the installed transformers has."""
    return [name for name in names if name in CONFIG_MAPPING]


def build(name: str, *, attention: str | None = None, **changes: Any) -> Any:
    """A new model, the same each time, without an end token.

    Only eager attention knows sinks and soft caps.
    """
    fields = {**_BASE, **FIELDS[name], **changes}
    config = CONFIG_MAPPING[name](**fields)
    config.eos_token_id = None
    attention = attention or ("eager" if name in _EAGER else "sdpa")
    dtype = torch.float32 if attention == "eager" else torch.float64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval()
        if hasattr(config, "_experts_implementation") and model._can_set_experts_implementation():
            # The others know no float64.
            model.set_experts_implementation("eager")
        # What begins at zero would choose at random, or not at all: a token of zeros scores all keys alike.
        for parameter in model.parameters():
            if not parameter.detach().any():
                torch.nn.init.normal_(parameter, std=0.3)
        table = model.get_input_embeddings().weight.detach()
        table[0].normal_(std=float(table.std()))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(dtype)


stock, treed = shared(build)
