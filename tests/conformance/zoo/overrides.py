"""What the default configs of single model types lack, and which models are built and how."""

from __future__ import annotations

from typing import Any

from hf_treespec.twin import VOCAB, WINDOW

_TWO_KINDS = ["full_attention", "sliding_attention"]
_ROPES = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _TWO_KINDS}

# Model type: (changed fields, why).
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "bamba": ({"attn_layer_indices": [1]}, "by default no layer has attention"),
    "cohere_compass_text": (
        {"layer_types": _TWO_KINDS,
         "rope_parameters": {kind: {**rope, "mrope_section": [3, 3, 2]} for kind, rope in _ROPES.items()}},
        "the default has no rotary settings and no window",
    ),
    "dbrx": (
        {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
         "ffn_config": {"ffn_hidden_size": 64}},
        "its sub-configs do not survive to_dict",
    ),
    "dory": (
        {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2},
        "each of its three stacks has a layer",
    ),
    "gemma3n_text": (
        {"num_kv_shared_layers": 2, "layer_types": _TWO_KINDS * 2, "num_hidden_layers": 4, "intermediate_size": 128,
         "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0]},
        "the layers that share a cache must be of the kinds that fill it",
    ),
    "granitemoehybrid": ({"layer_types": ["linear_attention", "full_attention"]}, "by default no layer has attention"),
    "jamba": (
        {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
         "use_mamba_kernels": False},
        "by default no early layer has attention",
    ),
    "laguna": (
        {"layer_types": _TWO_KINDS, "num_attention_heads_per_layer": [4, 4], "mlp_layer_types": ["dense", "sparse"]},
        "the default has windows in no layer",
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention"], "full_attn_idxs": None}, "the default has attention only"),
    "mellum": ({"layer_types": _TWO_KINDS, "rope_parameters": _ROPES}, "the default has windows in no layer"),
    "smollm3": (
        {"layer_types": _TWO_KINDS, "no_rope_layers": [1, 0]}, "the default has windows in no layer"
    ),
    "zaya": (
        {"num_hidden_layers": 4, "layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": WINDOW},
        "the default has windows in no layer",
    ),
    "minimax_m3_vl_text": (
        {"layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"]},
        "the default has no sparse layer",
    ),
    "lfm2_moe": ({"layer_types": ["conv", "full_attention"]}, "the default names no kinds of layers"),
    "mamba2": ({"n_groups": 2}, "each group has heads"),
    "musicgen": (
        {"pad_token_id": VOCAB, "decoder_start_token_id": VOCAB}, "its pattern of delays is of an id that no text has"
    ),
    "nemotron": ({"num_key_value_heads": 2}, "the default names no number of key heads"),
    "recurrent_gemma": ({"num_hidden_layers": 3}, "its block of three kinds repeats"),
    "xmod": ({"default_language": "en_XX"}, "it wants a language"),
    "zamba2": (
        {"num_hidden_layers": 3, "hybrid_layer_ids": [1, 2],
         "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
        "its two attention layers share weights",
    ),
    "zamba": (
        {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
         "use_mamba_kernels": False},
        "its two attention layers share weights",
    ),
    "qwen4_exp_text": (
        {"indexer_head_dim": 16},
        "the default has no sizes for its indexer",
    ),
    "reformer": (
        {"hash_seed": 1, "attn_layers": ["local", "lsh"]}, "hashes that are not drawn anew in each call"
    ),
}  # fmt: skip
KINDS["qwen4_exp"] = KINDS["qwen4_exp_text"]
KINDS["musicgen_melody"] = KINDS["musicgen"]

# Model type: why no model of it can be built here.
UNBUILT: dict[str, str] = {
    "gemma3n": "its vision tower needs timm; its text part is gemma3n_text",
    "gemma4_assistant": "a drafter that reads hidden states and caches of its target, no language model by itself",
    "gemma4_unified_assistant": "a drafter that reads hidden states and caches of its target, no language model by "
    "itself",
}

# Model type: why plain decoding has no lively text to compare with.
DULL: dict[str, str] = {
    "musicgen": "generate() is its own and takes other inputs than a text",
    "musicgen_melody": "generate() is its own and takes other inputs than a text",
    "blt": "generate() fails: the config has no number of layers",
    "xlm": "behind a cache its logits are not numbers",
    "xlnet": "behind a cache it reads other positions than without",
}

# Name: (model type, changed fields, why it is a case of its own).
VARIANTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "falcon-alibi": ("falcon", {"alibi": True}, "a bias by distance instead of rotary positions"),
}
