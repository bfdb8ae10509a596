"""Tiny Gemma-4 models and their assistants: random ones, and one that is right by construction."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    PreTrainedModel,
)

import heads
from tiny import shared

VOCAB, WINDOW = 60, 7
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "max_position_embeddings": 256,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCAB,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def _lively(model: PreTrainedModel, std: float) -> PreTrainedModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2 if "lm_head" in name else std)
    return model.eval()


def build(*, attention: str = "sdpa", **changes: Any) -> PreTrainedModel:
    """A target; half of its layers read the keys and values of the others, unless the changes say so."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = Gemma4TextConfig(**{**_TEXT, "num_kv_shared_layers": 2, **changes})
        model = Gemma4ForCausalLM._from_config(config, attn_implementation=attention)
        return _lively(model, 0.5)


stock, treed = shared(build)


def assistant(*, size: int = 32, ordered: bool = False, seed: int = 5, attention: str = "sdpa", **changes: Any) -> Any:
    """An assistant for a target of this size.

    Args:
        size: of the target's hidden states.
        ordered: whether it has logits of a few clusters of tokens only.
        seed: of its weights.
        attention: that it runs.
        changes: to the config of its decoder.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text = {**_TEXT, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "hidden_size": 16}
        text = {**text, "intermediate_size": 16, "num_hidden_layers": 2, "num_kv_shared_layers": 2, **changes}
        text["layer_types"] = text["layer_types"][:2]
        text["use_double_wide_mlp"] = False
        clusters = {"use_ordered_embeddings": True, "num_centroids": 10, "centroid_intermediate_top_k": 4}
        config = Gemma4AssistantConfig(
            text_config=Gemma4TextConfig(**text),
            backbone_hidden_size=size,
            tie_word_embeddings=False,
            **(clusters if ordered else {}),
        )
        model = _lively(Gemma4AssistantForCausalLM._from_config(config, attn_implementation=attention), 0.4)
        if ordered:
            model.masked_embedding.token_ordering.copy_(torch.randperm(text["vocab_size"]))
        model.generation_config.num_assistant_tokens = 8
        return model


def periodic() -> tuple[PreTrainedModel, Any]:
    """A target that walks through `heads.CYCLE` for ever, and an assistant that is never wrong about it."""
    size = heads.SIZE
    model = build(vocab_size=heads.VOCAB, vocab_size_per_layer_input=heads.VOCAB, hidden_size=size)
    helper = assistant(size=size, vocab_size=heads.VOCAB, hidden_size=size)
    model, helper = model.double(), helper.double()
    table = torch.randn(heads.VOCAB, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for each in (model, helper):
            decoder = each.model
            decoder.norm.weight.fill_(1.0)
            each.lm_head.weight.copy_(heads.walk(table))
            for layer in decoder.layers:
                # What the probe of the masks can just see.
                layer.post_attention_layernorm.weight.fill_(0.01 if each is model else 0.0)
                layer.post_feedforward_layernorm.weight.zero_()
                layer.layer_scalar.fill_(1.0)
                if each is model:
                    layer.post_per_layer_input_norm.weight.zero_()
        model.get_input_embeddings().weight.copy_(table)
        helper.pre_projection.weight.copy_(torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1))
    return model, helper
