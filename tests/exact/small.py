"""Pairs of tiny models with few tokens: the law of the first tokens of generate() can be written down.

Nine tokens, and the law of three of them; or five, and the law of four, for which trees grow two levels deep.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, PreTrainedModel

from hf_treespec import TreeConfig, enable
from measures import chi_square
from tiny import perturbed

VOCAB, FEW = 9, 5
CONFIG = TreeConfig(max_nodes=6, max_depth=3, max_children=3, fallback="off", seed=11)


def _made(vocab: int) -> PreTrainedModel:
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.5, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


@functools.cache
def small() -> PreTrainedModel:
    """Nine tokens: the law of three of them can be written down."""
    return _made(VOCAB)


@functools.cache
def few() -> PreTrainedModel:
    """Five tokens: the law of four of them can be written down."""
    return _made(FEW)


@functools.cache
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    return enable(perturbed(small(), 0.0)), perturbed(small(), 0.12)


PROMPT = torch.tensor([[3, 5, 2, 7]])


@functools.cache
def exact_law(sampling: tuple[tuple[str, float], ...]) -> Tensor:
    """`[V, V, V]` of the first three tokens, from forwards and processors of transformers alone."""
    return law_of(small(), PROMPT, 3, dict(sampling)).view(VOCAB, VOCAB, VOCAB)


def law_of(model: PreTrainedModel, prompt: Tensor, length: int, sampling: dict[str, Any]) -> Tensor:
    """`[V ** length]` of the first tokens, padded with 0 behind an eos."""
    vocab = model.config.vocab_size
    said = torch.tensor(list(itertools.product(range(vocab), repeat=length - 1)))
    ids = torch.cat([prompt.expand(len(said), -1), said], 1)
    start = prompt.shape[1]
    with torch.no_grad():
        logits = model(ids).logits[:, start - 1 :].float()
    config = model._prepare_generation_config(None, do_sample=True, **sampling)[0]
    model._prepare_special_tokens(config, True, device="cpu")
    processors = model._get_logits_processor(config, start, device="cpu", logits_processor=LogitsProcessorList())
    chance = torch.ones(len(said), 1, dtype=torch.float64)
    ended = torch.zeros(len(said), 1, dtype=torch.bool)
    for place in range(length):
        law = processors(ids[:, : start + place], logits[:, place].clone()).double().softmax(-1)
        law = torch.where(ended, torch.eye(vocab, dtype=torch.float64)[0], law)
        if place == length - 1:
            return (chance * law).flatten()
        token = said[:, place : place + 1]
        chance = chance * law.gather(1, token)
        ended |= token == sampling.get("eos_token_id", -1)
    raise ValueError(f"length={length}: expected at least 1")


def goodness(counts: Tensor, law: Tensor) -> float:
    """p-value of the evals' test of counts against a law."""
    assert not counts[law == 0].any(), "a token that the target never says"
    return chi_square(counts.tolist(), law.tolist())[0]


def drawn(config: TreeConfig, rows: int, **sampling: Any) -> tuple[Tensor, Any]:
    target, helper = pair()
    out = target.generate(
        PROMPT, do_sample=True, num_return_sequences=rows, max_new_tokens=3, assistant_model=helper,
        tree_config=config, **{"top_k": 0, **sampling},
    )  # fmt: skip
    text = out[:, PROMPT.shape[1] :]
    return (text[:, 0] * VOCAB + text[:, 1]) * VOCAB + text[:, 2], target.treespec_stats
