"""What single model types need beside the rules of `shrink`, and why: sizes that hang together."""

from __future__ import annotations

from typing import Any

from hf_treespec.twin.shrink import DROP

__all__ = ["OVERRIDES"]

# Model type: (changed fields, why).
OVERRIDES: dict[str, tuple[dict[str, Any], str]] = {
    "dory": (
        {"n_input_layers": 2, "n_recurrent_layers": 4, "n_output_layers": 2},
        "its three stacks add up to the number of layers",
    ),
    "falcon_h1": ({"mamba_d_ssm": 128, "mamba_d_head": 16}, "heads and head width make up the state width"),
    "hrm_text": ({"num_layers_per_stack": DROP}, "every cycle of a stack has layers of its own in the cache"),
    "inkling2_loop_text": ({"loop_layer_index_end": 12}, "layers that are run several times take their time"),
    "mamba2": ({"num_heads": 8}, "heads times head width is twice the hidden width"),
    "qwen4_exp_text": (
        {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_budget": 4, "indexer_compress_ratio": 1,
         "hc_lowrank": 16},
        "sizes of its indexer",
    ),
    "reformer": (
        {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 16], "local_attn_chunk_length": 8,
         "lsh_attn_chunk_length": 8, "num_buckets": 4},
        "tables and chunks of one size, chunks longer than there are heads (it mixes the two up)",
    ),
    "xlstm": ({"hidden_size": 128, "embedding_dim": 128}, "half of the hidden width is rounded up to 64"),
    "zamba": ({"attention_hidden_size": 128, "attention_head_dim": 32}, "attention reads twice the hidden width"),
    "zamba2": (
        {"mamba_headdim": 16, "n_mamba_heads": 8, "attention_hidden_size": 128, "attention_head_dim": 32,
         "kv_channels": 16},
        "attention reads twice the hidden width, heads and head width make up the state width",
    ),
}  # fmt: skip
