"""Rules at nodes of a real model, where laws are sharp and the vocabulary large."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_treespec.rules import RULES
from hf_treespec.tree import TreeBuilder
from hf_treespec.verify.draw import winners
from hf_treespec.verify.plan import plan

COINS, CHILDREN, NODES = 100_000, 4, 12


@pytest.mark.slow
@torch.no_grad()
def test_naive_accepts_the_mass_of_its_children(smollm2: Any) -> None:
    model, tokenizer = smollm2
    ids = tokenizer("The first thing to know about trees is", return_tensors="pt").input_ids
    torch.manual_seed(3)
    text = model.generate(ids, do_sample=True, top_k=0, max_new_tokens=NODES, eos_token_id=None)
    laws_NV = model(text).logits[0, -NODES:].double().softmax(-1)
    dice = torch.Generator().manual_seed(4)
    masses, shares = [], []
    for place, law_V in enumerate(laws_NV):
        # Children that the target finds likely at one node and unlikely at the next.
        children = law_V.topk(CHILDREN * (1 + place % 3)).indices[-CHILDREN:]
        builder = TreeBuilder(0)
        for rank, token in enumerate(children.tolist()):
            builder.add(0, token, -math.log1p(rank))
        tree, _ = builder.freeze()
        decided = plan(RULES["naive"], [tree], law_V.expand(1, CHILDREN + 1, -1))
        accept = decided.accept_BN[0, 1:]
        masses.append(float(law_V[children].sum()))
        assert 1 - float((1 - accept).prod()) == pytest.approx(masses[-1], abs=1e-12)
        many = replace(decided, accept_BN=decided.accept_BN.expand(COINS, -1))
        coins = torch.rand(COINS, CHILDREN + 1, generator=dice, dtype=torch.float64)
        shares.append(float((winners(many, [tree] * COINS, coins) != 0).double().mean()))
        assert abs(shares[-1] - masses[-1]) < 4.5 * math.sqrt(masses[-1] / COINS)
    assert max(masses) > 0.3 and min(masses) < 0.1
    assert sum(shares) / NODES == pytest.approx(sum(masses) / NODES, abs=1e-3)
