"""Coupled sampling follows the target: a million draws from frozen nodes of the real model, and calls of generate().

`max_nodes=0` is the reference that every tree must equal, so that its own law is all there is to show of the coupled
rule. A draw is argmax(scores + noise of its position); only lanes that the processors leave are drawn here, by the
library's own generator of lanes, for many positions at once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_treespec import TreeConfig, enable
from hf_treespec.verify import GumbelNoise
from hf_treespec.verify.noise import _key, _Lanes, _signed
from measures import chi_square

pytestmark = [pytest.mark.slow, pytest.mark.real_model]
TEXTS = ["The capital of France is", "Once upon a time there was a", "def add(a, b):\n    return", "1 2 3 1 2 3 1 2"]
CHAINS: dict[str, list[Any]] = {
    "top_p": [TopPLogitsWarper(0.9)],
    "cold_top_p": [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.95)],
    "hot_top_k": [TemperatureLogitsWarper(1.5), TopKLogitsWarper(40)],
    "penalty": [RepetitionPenaltyLogitsProcessor(1.5), TopKLogitsWarper(64)],
}
MILLION = 1_000_000
SEED = 20


def draws(scores_V: Tensor, stream: int, count: int, chunk: int = 5_000) -> Tensor:
    """Tokens of the first `count` positions."""
    kept = scores_V.isfinite().nonzero()[:, 0]
    counters = _Lanes(len(scores_V), "cpu")._counters[kept]
    tokens = []
    for start in range(0, count, chunk):
        keys = [_signed(_key(SEED, stream, position)) for position in range(start, min(start + chunk, count))]
        lanes = _Lanes(1, "cpu")
        # A row of lanes for each position, each with its key.
        lanes._counters = counters + torch.tensor(keys)[:, None]
        tokens.append((scores_V[kept] + lanes.gumbel(0)).argmax(-1))
    return kept[torch.cat(tokens)]


def test_drawing_by_lanes_is_drawing() -> None:
    scores = torch.randn(500, generator=torch.Generator().manual_seed(2))
    scores[scores < 0.8] = -torch.inf
    noise = GumbelNoise(SEED, 500)
    for row in (0, 7):
        whole = [int((scores + noise.at(row, position)).argmax()) for position in range(200)]
        assert draws(scores, row, 200).tolist() == whole
        assert len(set(whole)) > 20


@pytest.mark.parametrize("chain", list(CHAINS))
def test_a_million_draws_follow_the_processed_law(smollm2: Any, chain: str) -> None:
    model, tokenizer = smollm2
    for stream, text in enumerate(TEXTS):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = model(ids).logits[:, -1].float()
        scores = LogitsProcessorList(CHAINS[chain])(ids, logits)[0]
        law = scores.double().softmax(-1)
        kept = law > 0
        counts = torch.bincount(draws(scores, 100 + stream, MILLION // len(TEXTS)), minlength=len(law))
        assert not counts[~kept].any()
        p, freedom = chi_square(counts[kept].tolist(), law[kept].tolist())
        assert p > 1e-4, (text, freedom)


def test_texts_of_generate_follow_the_whole_vocabulary(smollm2: Any) -> None:
    """No processor leaves tokens out: rare ones in one cell, by calls without a tree."""
    model, tokenizer = smollm2
    ids = tokenizer(TEXTS[1], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        law = model(ids).logits[0, -1].double().softmax(-1)
    enable(model)
    counts = torch.zeros(len(law))
    rows, calls = 200, 20
    for seed in range(calls):
        out = model.generate(
            ids, do_sample=True, top_k=0, max_new_tokens=1, num_return_sequences=rows, pad_token_id=0,
            tree_config=TreeConfig(max_nodes=0, seed=seed),
        )  # fmt: skip
        counts += torch.bincount(out[:, -1], minlength=len(law))
    assert counts.sum() == rows * calls
    p, freedom = chi_square(counts.tolist(), law.tolist())
    assert freedom > 15 and p > 1e-4
