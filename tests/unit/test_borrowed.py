"""What heads borrow of their target: its LM head, and what the target does to the logits behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, FalconH1Config, Gemma2Config, GraniteConfig, LlamaConfig

from heads import layer_config
from hf_treespec.draft import Borrowed, EagleHead

SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
TARGETS = {
    "llama": LlamaConfig(**SMALL),
    "gemma2": Gemma2Config(**SMALL, final_logit_softcapping=0.05),
    "cohere": CohereConfig(**SMALL, logit_scale=0.25),
    "granite": GraniteConfig(**SMALL, logits_scaling=8.0),
    "falcon_h1": FalconH1Config(**SMALL, **MAMBA, lm_head_multiplier=0.5),
}


@pytest.mark.parametrize("name", TARGETS)
def test_logits_are_those_of_the_target(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(TARGETS[name]).double().eval()
    ids = torch.tensor([[5, 9, 23, 41]])
    with torch.no_grad():
        outputs = model(ids, output_hidden_states=True)
        lent = Borrowed.of(model)
        state = outputs.hidden_states[-1]
        assert torch.allclose(lent.logits(state), outputs.logits, rtol=0, atol=1e-12)
        # The factors are of this target: without them they would be other ones.
        assert torch.allclose(lent.raw_logits(state), outputs.logits) == (name == "llama")
        head = EagleHead(layer_config(32), hidden_size=32, vocab_size=61, version=1, lm_head=False).double()
        assert torch.allclose(head.logits(state, lent), outputs.logits, rtol=0, atol=1e-12)
