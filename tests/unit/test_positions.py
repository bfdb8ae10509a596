"""Positions of nodes, and how far a learned position table reaches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from hf_treespec.attention import learned_position_limit, node_positions

SIZES: dict[str, Any] = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_siblings_share_the_position_after_their_parent(dtype: torch.dtype) -> None:
    last = torch.tensor([[4], [9]], dtype=dtype)
    ahead = torch.tensor([[1], [3]])
    depths = torch.tensor([[0, 1, 1, 2], [0, 1, 2, 0]])
    wanted = [[5, 6, 6, 7], [12, 13, 14, 12]]
    found = node_positions(last, ahead, depths)
    assert found.dtype == dtype and found.tolist() == wanted
    planes = torch.stack([last, last + 100])
    assert node_positions(planes, ahead, depths).tolist() == [wanted, [[n + 100 for n in row] for row in wanted]]


@pytest.mark.parametrize(
    ("build", "positions", "limit"),
    [
        (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=8)), 64, None),
        (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=24)), 24, 24),
        (
            # Its table has two rows more than there are positions.
            lambda: OPTForCausalLM(
                OPTConfig(
                    **SIZES, ffn_dim=8, word_embed_proj_dim=8, max_position_embeddings=20, do_layer_norm_before=True
                )
            ),
            20,
            20,
        ),
        (lambda: nn.ModuleDict({"embed_positions": nn.Embedding(7, 2)}), None, 7),
        (lambda: nn.ModuleDict({"wpe": nn.Embedding(7, 2)}), 30, 7),
        (lambda: nn.ModuleDict({"embed_tokens": nn.Embedding(7, 2), "position_net": nn.Linear(2, 2)}), 30, None),
        (lambda: nn.ModuleDict({"swpe": nn.Embedding(7, 2)}), 30, None),
    ],
)
def test_a_learned_table_ends_somewhere(build: Any, positions: int | None, limit: int | None) -> None:
    assert learned_position_limit(build(), positions) == limit
