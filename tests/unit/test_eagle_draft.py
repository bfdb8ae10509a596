"""The draft around an EAGLE head by itself: what its cache keeps, and what an exception leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import heads
import tiny
from hf_treespec.draft import DraftRow, EagleHead, Ranker, head_draft
from hf_treespec.tree import TreeLimits

LIMITS = TreeLimits(max_nodes=8, max_depth=3, max_children=3)


class Flaky(Ranker):
    fails = False

    def rank(self, *arguments: Any) -> Any:
        if self.fails:
            raise RuntimeError("no")
        return super().rank(*arguments)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_an_exception_leaves_the_committed_pairs(kind: str) -> None:
    target = tiny.stock("llama")
    head = heads.random_head(kind, target)
    assert isinstance(head, EagleHead)
    width = head.features(2).count * head.hidden_size
    rows = [DraftRow(0, [5, 6, 7, 8]), DraftRow(1, [9, 3])]
    ranker = Flaky(97, ids_V=head.ids)
    draft: Any = head_draft(head, target, ranker, growth="best_first")
    twin: Any = head_draft(head, target, Ranker(97, ids_V=head.ids), growth="best_first")
    first, more = [torch.randn(3, width), torch.randn(1, width)], [torch.randn(2, width), None]

    def proposed(source: Any) -> Any:
        with torch.no_grad(), tiny_masks():
            return source.propose(rows, [LIMITS] * 2)

    for source in (draft, twin):
        source.read(first)
        trees = proposed(source)
        assert [tree.drafted for tree in trees] == [8, 8]
        source.read(more)
        source.commit([[0, 1], []])
        # All pairs of the row that advanced; what it drafted is not among them. The other keeps the prefill's.
        assert source._rows.lengths == [3, 0] and [len(fresh) for fresh in source._fresh] == [2, 1]
    rows[0].tokens += [trees[0].tokens[1], 11]
    before = tiny.snapshot(draft._rows.cache)
    ranker.fails = True
    with pytest.raises(RuntimeError):
        proposed(draft)
    for one, two in zip(before, tiny.snapshot(draft._rows.cache), strict=True):
        assert torch.equal(one["keys"], two["keys"]) and torch.equal(one["values"], two["values"])
    assert draft._rows.lengths == [3, 0]
    ranker.fails = False
    assert proposed(draft) == proposed(twin)


def test_ids_that_no_table_has() -> None:
    """As prompts with pictures have some: beside the text in front of the root, and in it."""
    target = tiny.stock("llama")
    for kind in ("eagle", "eagle3"):
        head = heads.random_head(kind, target)
        for prefilled in (True, False):
            draft: Any = head_draft(head, target, Ranker(97, ids_V=head.ids), growth="best_first")
            rows, limits = [DraftRow(0, [5, 6, 7]), DraftRow(1, [9, 500, -7, 3])], [LIMITS] * 2
            draft.read([torch.randn(len(row.tokens) - 1, draft.features.count * head.hidden_size) for row in rows])
            with torch.no_grad(), tiny_masks():
                if not prefilled:
                    draft.propose(rows, [LIMITS, LIMITS.capped(max_nodes=0)])
                assert [tree.drafted for tree in draft.propose(rows, limits)] == [8, 8]


def tiny_masks() -> Any:
    from hf_treespec.attention import tree_masks

    return tree_masks()


def test_without_budget_or_states_there_are_roots_only() -> None:
    target = tiny.stock("llama")
    for kind in heads.MAKERS:
        head = heads.random_head(kind, target)
        draft = head_draft(head, target, Ranker(97, ids_V=head.ids), growth="static")
        (tree,) = draft.propose([DraftRow(0, [5, 6])], [LIMITS])
        assert tree.drafted == 0
        draft.read([torch.randn(1, draft.features.count * head.hidden_size)])
        (tree,) = draft.propose([DraftRow(0, [5, 6])], [LIMITS.capped(max_nodes=0)])
        assert tree.drafted == 0
