"""Which fields of a model's generation config change what plain decoding does, besides those that the evals set.

Whatever is not known to leave the law of the text alone counts as changing it: some processors act late in a text or
after certain tokens only, so that a look at a few laws would not see them.
"""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

__all__ = ["shaping"]

# Set by the evals for every call, or without a say in which token comes next.
_ALLOWED = frozenset({
    "do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "max_length", "max_new_tokens",
    "num_return_sequences", "return_dict_in_generate", "output_scores", "output_logits", "output_attentions",
    "output_hidden_states", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "use_cache",
    "cache_config", "max_cache_len", "prefill_chunk_size", "compile_config", "disable_compile", "low_memory",
    "continuous_batching_config", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind",
    "renormalize_logits", "length_penalty", "early_stopping", "transformers_version",
})  # fmt: skip
# Values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("min_p", "min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
         "epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha"), (0,)
    ),
    **dict.fromkeys(
        ("typical_p", "encoder_repetition_penalty", "guidance_scale", "num_beams", "num_beam_groups"), (1,)
    ),
    "cache_implementation": (
        "dynamic", "dynamic_full", "static", "hybrid", "sliding_window", "offloaded", "offloaded_static",
    ),
}  # fmt: skip


def shaping(config: GenerationConfig) -> list[str]:
    """The fields of a generation config that change plain decoding, as "name=value"."""
    known = GenerationConfig().to_dict()
    found = []
    for name, value in config.to_dict().items():
        # Fields of a model's own code are read by no processor of `generate`.
        if name.startswith("_") or name not in known or name in _ALLOWED:
            continue
        if value is None or value is False or value in ([], {}) or value in _NEUTRAL.get(name, ()):
            continue
        found.append(f"{name}={value!r}")
    return sorted(found)
