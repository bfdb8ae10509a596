"""Tiny draft heads: random ones, and ones that are right by construction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_treespec import _compat
from hf_treespec.draft import DFlashHead, DraftHead, EagleHead, Features, MedusaHead, MLPHead

# The walk of `periodic`, for ever.
CYCLE = (3, 9, 4, 17, 11, 8, 20)
FOLLOWS = dict(zip(CYCLE, (*CYCLE[1:], CYCLE[0]), strict=True))
VOCAB, SIZE = 24, 64


class Reader(DraftHead):
    """A head that only names hidden states."""

    kind = "reader"

    def __init__(self, target: PreTrainedModel, layers: tuple[int, ...], last: bool) -> None:
        super().__init__(_compat.hidden_size(target), _compat.vocabulary_size(target))
        self.wanted = Features(layers, last)

    def features(self, target_layers: int) -> Features:
        return self.wanted


def layer_config(size: int, **changes: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=size, intermediate_size=size, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, initializer_range=0.5, **changes,
    )  # fmt: skip


def medusa(size: int, vocab: int, **changes: Any) -> MedusaHead:
    return MedusaHead(size, vocab, **{"heads": 3, "layers": 2, **changes})


def mlp(size: int, vocab: int, **changes: Any) -> MLPHead:
    return MLPHead(size, vocab, **{"inner_size": 16, "stages": 3, "scale_input": True, **changes})


def eagle(size: int, vocab: int, **changes: Any) -> EagleHead:
    own = {"version": 1, "lm_head": False, "fusion_bias": True, **changes}
    return EagleHead(layer_config(size), hidden_size=size, vocab_size=vocab, **own)


def eagle3(size: int, vocab: int, **changes: Any) -> EagleHead:
    ids = torch.arange(1, vocab, 2)
    own = {"layers": (0, 1), "feature_count": 2, "embeddings": True, "ids_V": ids, **changes}
    return EagleHead(layer_config(own.pop("width", 16)), hidden_size=size, vocab_size=vocab, **own)


def block_model(size: int, **changes: Any) -> PreTrainedModel:
    """A random block draft of transformers, with a layer of each kind."""
    settings = {
        "hidden_size": size, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "block_size": 4, "mask_token_id": 2,
        "target_layer_ids": [0], "layer_types": ["full_attention", "sliding_attention"], **changes,
    }  # fmt: skip
    return _compat.new_block_model(settings)


def dflash(size: int, vocab: int, **changes: Any) -> DFlashHead:
    """Without changes what is made of a model that is passed as it is."""
    return DFlashHead(block_model(size, **changes.pop("model", {})), vocab_size=vocab, **changes)


MAKERS: dict[str, Callable[..., DraftHead]] = {maker.__name__: maker for maker in (medusa, mlp, eagle, eagle3, dflash)}


def random_head(kind: str, target: PreTrainedModel, **changes: Any) -> DraftHead:
    """A head that guesses at random, in the target's type."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        head = MAKERS[kind](_compat.hidden_size(target), _compat.vocabulary_size(target), **changes)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.normal_(std=0.1)
    return head.to(target.dtype).eval()


# -- right by construction --


def periodic() -> PreTrainedModel:
    """A model whose next token is a function of the last one: it walks through CYCLE for ever."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=SIZE, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
        tie_word_embeddings=False, eos_token_id=None, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().double()
    table = torch.randn(VOCAB, SIZE, dtype=torch.float64)
    with torch.no_grad():
        # What the probe of the masks can just see.
        model.model.layers[0].self_attn.o_proj.weight.mul_(0.01)
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(table)
        model.lm_head.weight.copy_(walk(table))
    return model


def walk(table_VE: Tensor, steps: int = 1) -> Tensor:
    """`[V, E]` that maps the row of a token of CYCLE to the token so many steps on."""
    out = torch.zeros_like(table_VE)
    for token in CYCLE:
        target = token
        for _ in range(steps):
            target = FOLLOWS[target]
        out[target] = table_VE[token]
    return out


def perfect_head(kind: str, target: PreTrainedModel) -> DraftHead:
    """A head that is never wrong about `periodic`."""
    table = target.get_input_embeddings().weight.detach()
    one_hot = torch.eye(VOCAB, dtype=torch.float64)
    with torch.no_grad():
        if kind == "dflash":
            return DFlashHead.around(perfect_block_model(table))
        if kind == "medusa":
            head = medusa(SIZE, VOCAB, heads=6).double()
            for parameter in head.parameters():
                parameter.zero_()
            for ahead, out in enumerate(head.heads):
                out.weight.copy_(walk(table, ahead + 2))
            return head.eval()
        if kind == "mlp":
            head = mlp(SIZE, VOCAB, inner_size=VOCAB, stages=6).double()
            for stage in range(6):
                head.proj[stage].weight.zero_()
                head.emb[stage].weight.copy_(one_hot)
                head.head[stage].weight.copy_(walk(one_hot))
            return head.eval()
        if kind == "eagle":
            head = eagle(SIZE, VOCAB, fusion_bias=False).double()
            head.fc.weight.copy_(torch.cat([torch.eye(SIZE), torch.zeros(SIZE, SIZE)], dim=1))
            head.decoder.layers[0].self_attn.o_proj.weight.zero_()
            head.decoder.layers[0].mlp.down_proj.weight.zero_()
            return head.eval()
        # Its state is the token before, one-hot; the feed-forward part moves it on by one.
        known = torch.tensor(sorted(CYCLE))
        head = eagle3(SIZE, VOCAB, width=VOCAB, layers=(0,), feature_count=1, ids_V=known).double()
        head.fc.weight.copy_(torch.linalg.pinv(table).T)
        layer = head.decoder.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        gain = torch.tensor(VOCAB**0.5, dtype=torch.float64)
        layer.mlp.gate_proj.weight.copy_(one_hot)
        layer.mlp.up_proj.weight.copy_(one_hot)
        moved = walk(one_hot) - torch.diag(torch.tensor([float(t in CYCLE) for t in range(VOCAB)])).double()
        layer.mlp.down_proj.weight.copy_(moved / (torch.nn.functional.silu(gain) * gain))
        head.lm_head.weight.copy_(walk(one_hot)[known])
        return head.eval()


@torch.no_grad()
def perfect_block_model(table_VE: Tensor) -> PreTrainedModel:
    """A block draft that is never wrong about `periodic`: one head for each place behind the anchor.

    All keys point one way, so that only distance tells them apart: head j + 1 sees what stands j + 1 places before. At
    mask j + 1 that is the anchor, and its token comes out j steps along the walk; other heads find masks or context
    there, which have no value.
    """
    ahead, size = 6, 8
    rope = {"rope_type": "default", "rope_theta": 16.0}
    model = block_model(
        SIZE, num_hidden_layers=1, num_attention_heads=ahead, num_key_value_heads=1, head_dim=size,
        block_size=ahead + 1, mask_token_id=0, layer_types=["full_attention"], rope_parameters=rope,
    ).double()  # fmt: skip
    reads = torch.linalg.pinv(table_VE).T  # row of a token: 1 on its own embedding, 0 on the others
    # A direction that no embedding has, in which the context lies.
    beside = torch.linalg.svd(table_VE).Vh[-1]
    turns = 16.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    layer = model.layers[0]
    attention = layer.self_attn
    for parameter in model.parameters():
        parameter.zero_()
    for norm in (layer.input_layernorm, model.norm, attention.q_norm, attention.k_norm, model.encoder.output_norm_enc):
        norm.weight.fill_(1.0)
    attention.q_norm.weight.fill_(3000.0)
    # Whatever the state of a token or of the context, this is positive.
    there = reads.sum(0) + beside
    model.encoder.fc.weight.copy_(torch.outer(beside, reads.sum(0)))
    half = torch.zeros(size, dtype=torch.float64)
    half[: size // 2] = 1.0
    attention.k_proj.weight.copy_(torch.outer(half, there))
    for head in range(ahead):
        back = (head + 1) * turns
        query = torch.cat([torch.cos(-back), torch.sin(-back)])
        attention.q_proj.weight[head * size : (head + 1) * size] = torch.outer(query, there)
        for place, token in enumerate(CYCLE):
            out = token
            for _ in range(head):
                out = FOLLOWS[out]
            attention.o_proj.weight[:, head * size + place] = 100.0 * table_VE[out]
    for place, token in enumerate(CYCLE):
        attention.v_proj.weight[place] = reads[token]
    return model
