"""The model types that every run of the fast tests checks: all routes, and what is odd within them."""

from __future__ import annotations

CORE = (
    # One row under a mask: full and sliding layers, chunks, sinks, softcaps, learned positions, experts, caches that
    # layers share, latent and indexed attention, inputs by other names.
    "llama",
    "gemma2",
    "gemma3n_text",
    "gpt2",
    "gpt_oss",
    "llama4_text",
    "modernbert-decoder",
    "deepseek_v32",
    "qwen3_moe",
    "roberta",
    "whisper",
    # Positions counted by the cache.
    "bart",
    "roformer",
    # A bias by distance.
    "bloom",
    "falcon-alibi",
    "mpt",
    # State that goes token by token.
    "deepseek_v4",
    "jamba",
    "lfm2",
    "mamba2",
    "minimax_m3_vl_text",
    "qwen3_next",
    # State of their own.
    "recurrent_gemma",
    "xlstm",
    # Refused.
    "cpmant",
)
