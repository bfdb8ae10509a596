"""The mixer against transformers' own processor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.verify import NodeGuidance, are_length_free, are_pure

VOCAB = 13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 0.7, 1.5, -2.0])
def test_the_numbers_are_those_of_the_processor(scale: float, dtype: torch.dtype) -> None:
    """Bit by bit: at the prompt, then at other nodes of a tree for each row."""
    first_BUV = torch.randn(3, 4, VOCAB).to(dtype)
    tree_BNV = torch.randn(3, 5, VOCAB).to(dtype)
    nodes = [0, 4, 2]
    there = torch.stack([tree_BNV[row, node] for row, node in enumerate(nodes)])[:, None]
    answers = iter([first_BUV, there])

    def model(input_ids: Tensor, **_: Any) -> Any:
        answer = SimpleNamespace(logits=next(answers), get=lambda name, default: default)
        return answer

    ids = torch.zeros(3, 2, dtype=torch.long)
    theirs = _compat.GuidanceProcessor(scale, model)
    mine = NodeGuidance(scale, first_BUV[:, -1])
    scores = torch.randn(3, VOCAB)
    assert torch.equal(theirs(ids, scores), mine(ids, scores))
    mine.score(tree_BNV)
    for row, node in enumerate(nodes):
        mine.stand(row, node)
    assert torch.equal(theirs(ids, scores), mine(ids, scores))


def test_a_new_tree_is_entered_at_its_root() -> None:
    mixer = NodeGuidance(1.5, torch.randn(2, VOCAB))
    ids, scores = torch.zeros(2, 1, dtype=torch.long), torch.randn(2, VOCAB)
    mixer.score(torch.randn(2, 5, VOCAB))
    mixer.stand(1, 4)
    tree_BNV = torch.randn(2, 2, VOCAB)
    mixer.score(tree_BNV)
    assert torch.equal(mixer(ids, scores), NodeGuidance(1.5, tree_BNV[:, 0])(ids, scores))


def test_rows_may_run_apart_but_nodes_are_asked_one_by_one() -> None:
    mixer = NodeGuidance(1.5, torch.zeros(1, VOCAB))
    assert are_pure([mixer]) and not are_length_free([mixer])
    assert not are_pure([_compat.GuidanceProcessor(1.5, None)])
