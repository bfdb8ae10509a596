"""A pair of tiny models with nine tokens: the law of three tokens of generate() can be written down."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, PreTrainedModel

from hf_treespec import TreeConfig, enable
from tiny import perturbed

VOCAB = 9
CONFIG = TreeConfig(max_nodes=6, max_depth=3, max_children=3, fallback="off", seed=11)


@functools.cache
def small() -> PreTrainedModel:
    """Nine tokens: the law of three of them can be written down."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.5, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


@functools.cache
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    return enable(perturbed(small(), 0.0)), perturbed(small(), 0.12)


PROMPT = torch.tensor([[3, 5, 2, 7]])


@functools.cache
def exact_law(sampling: tuple[tuple[str, float], ...]) -> Tensor:
    """`[V, V, V]` of the first three tokens, from forwards and processors of transformers alone."""
    continuations = torch.tensor(list(itertools.product(range(VOCAB), repeat=2)))
    ids = torch.cat([PROMPT.expand(len(continuations), -1), continuations], 1)
    with torch.no_grad():
        logits = small()(ids).logits[:, 3:].float()
    config = small()._prepare_generation_config(None, do_sample=True, **dict(sampling))[0]
    processors = small()._get_logits_processor(config, 4, device="cpu", logits_processor=LogitsProcessorList())
    laws = [processors(ids[:, : 4 + place], logits[:, place]).double().softmax(-1) for place in range(3)]
    chances = [laws[place].gather(1, continuations[:, place : place + 1]) for place in range(2)]
    return (chances[0] * chances[1] * laws[2]).view(VOCAB, VOCAB, VOCAB)


def goodness(counts: Tensor, law: Tensor) -> float:
    """p-value of Pearson's test, cells that expect fewer than ten pooled."""
    total = counts.sum()
    assert not counts[law == 0].any(), "a token that the target never says"
    expected = law * total
    large = expected >= 10
    seen = torch.cat([counts[large], counts[~large].sum()[None]])
    wanted = torch.cat([expected[large], expected[~large].sum()[None]])
    keep = wanted > 0
    statistic = ((seen - wanted)[keep] ** 2 / wanted[keep]).sum()
    freedom = torch.tensor((int(keep.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def drawn(config: TreeConfig, rows: int, **sampling: Any) -> tuple[Tensor, Any]:
    target, helper = pair()
    out = target.generate(
        PROMPT, do_sample=True, num_return_sequences=rows, max_new_tokens=3, assistant_model=helper,
        tree_config=config, **{"top_k": 0, **sampling},
    )  # fmt: skip
    text = out[:, PROMPT.shape[1] :]
    return (text[:, 0] * VOCAB + text[:, 1]) * VOCAB + text[:, 2], target.treespec_stats
