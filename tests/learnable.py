"""A tiny target whose texts have structure, so that a draft can learn them: a Llama taught a language of phrases."""

from __future__ import annotations

import functools
import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCAB = 64
# Ids of the first words of the tokenizer that the tests of the command line use; the ones before are special.
FIRST = 7


@functools.cache
def phrases() -> list[list[int]]:
    """Phrases that begin with different words."""
    dice = random.Random(3)
    heads = list(range(FIRST, FIRST + 8))
    return [[head, *(dice.randrange(FIRST + 8, VOCAB) for _ in range(dice.randrange(4, 7)))] for head in heads]


def sentence(dice: random.Random, length: int) -> list[int]:
    """Phrases one after the other; mostly, which comes next is a matter of the last one."""
    known, at = phrases(), dice.randrange(len(phrases()))
    words: list[int] = []
    while len(words) < length:
        words += known[at]
        at = (3 * at + 1) % len(known) if dice.random() < 0.8 else dice.randrange(len(known))
    return words[:length]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Beginnings of sentences, all different."""
    dice = random.Random(seed)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        found[tuple(sentence(dice, dice.randrange(3, 12)))] = None
    return [list(one) for one in found]


@functools.cache
def learnable(steps: int = 150) -> PreTrainedModel:
    """The target, float32; do not change it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        dice = random.Random(1)
        for _ in range(steps):
            ids = torch.tensor([sentence(dice, 40) for _ in range(16)])
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()
