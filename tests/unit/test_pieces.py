"""States that wait: what is left of them, and that waiting costs nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import heads
import multitoken
import tiny
from hf_treespec.draft import MtpHead, Ranker, head_draft
from hf_treespec.draft.heads.pieces import Pieces


def test_what_is_left() -> None:
    states = torch.randn(9, 4)
    pieces = Pieces(states[:2])
    for start, end in ((2, 3), (3, 3), (3, 7)):
        pieces.add(states[start:end])
    assert len(pieces) == 7 and torch.equal(pieces.whole, states[:7])
    pieces.drop(3)
    pieces.add(states[7:])
    assert len(pieces) == 6
    pieces.drop(0)
    pieces.drop(1)
    assert len(pieces) == 5 and torch.equal(pieces.whole, states[4:])
    pieces.drop(5)
    assert len(pieces) == 0 and pieces.whole.shape == (0, 4)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dflash", "mtp"])
def test_rounds_without_a_tree_join_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "mtp":
        target = multitoken.stock("glm4_moe")
        head: Any = MtpHead(multitoken.random_modules(target))
    else:
        target = tiny.stock("llama")
        head = heads.random_head(kind, target)
    draft: Any = head_draft(head, target, Ranker(71, ids_V=head.ids), growth="best_first")
    width = draft.features.count * head.hidden_size
    joins: list[Any] = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda *args, **kwargs: joins.append(args) or cat(*args, **kwargs))
    for _ in range(5):
        draft.read([torch.randn(2, width), None])
    assert not joins
