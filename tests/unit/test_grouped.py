"""Tree forwards under sdpa on a CPU read keys and values that query heads share in place, with the same bits."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

from hf_treespec import TreeConfig
from hf_treespec.attention import TreeContext, attention_for_trees, tree_forward_context
from tiny import assert_same_text, draft, prompt, reference, stock, treed

TREE = TreeContext(
    0, torch.zeros(1, 5, dtype=torch.long), torch.zeros(1, 5, dtype=torch.long), torch.eye(5).bool()[None]
)
SHAPES = list(itertools.product((1, 3), (9, 4), (1, 2, 3, 9), (2, 16, 65), (65, 300)))


class Seen:
    """Head counts of the keys that torch's sdpa is given."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.heads: list[tuple[int, int, int]] = []
        own = torch.nn.functional.scaled_dot_product_attention

        def attend(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.heads.append((query.shape[1], key.shape[1], query.shape[2]))
            return own(query, key, *args, **kwargs)

        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, tree: TreeContext | None = TREE, **call: Any
) -> Tensor:
    """By the function that is registered, of a module with shared heads."""
    module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True, training=False)
    with tree_forward_context(tree):
        return AttentionInterface()["sdpa"](module, query, key, value, mask, **call)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["bool", "additive", "by head"])
def test_the_same_bits_without_a_copy(dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    torch.manual_seed(1)
    tried = 0
    for batch, heads, keys, queries, length in SHAPES:
        if heads % keys or heads == keys:
            continue
        tried += 1
        # As projections leave them, and as a cache with room behind gives them back.
        query = torch.randn(batch, queries, heads, 64, dtype=dtype).transpose(1, 2)
        key, value = (torch.randn(batch, keys, length + 7, 64, dtype=dtype)[:, :, :length] for _ in range(2))
        mask = torch.rand(batch, heads if kind == "by head" else 1, queries, length) > 0.3
        mask[..., 0] = True
        if kind == "additive":
            mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        expected = attend(query, key, value, mask, scaling=0.11)
        with attention_for_trees(stock("llama"), "auto"):
            found = attend(query, key, value, mask, scaling=0.11)
        assert torch.equal(expected, found) and found.is_contiguous(), (batch, heads, keys, queries, length)
        assert seen.heads[-2:] == [(heads, heads, queries), (heads, keys, queries)]
    assert tried == 48


def test_everything_else_is_left_to_the_models_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    with attention_for_trees(stock("llama"), "auto"):
        attend(query, key, key, mask)
        assert seen.heads.pop() == (4, 2, 5)
        attend(query, key, key, mask, output_attentions=False, softcap=None)
        assert seen.heads.pop() == (4, 2, 5)
        # A plain forward; one query; a bias that is added to the mask; values of another width.
        attend(query, key, key, mask, tree=None)
        assert seen.heads.pop() == (4, 4, 5)
        one = query[:, :, :1]
        attend(one, key, key, mask[:, :, :1])
        assert seen.heads.pop()[:2] != (4, 2)
        attend(query, key, key[..., :6], mask)
        assert seen.heads.pop() == (4, 4, 5)
        # Keys that lie with another stride take another kernel of torch's, which rounds otherwise.
        turned = key.transpose(2, 3).contiguous().transpose(2, 3)
        attend(query, turned, key, mask)
        assert seen.heads.pop() == (4, 4, 5)
        seen.heads.clear()
        # Refused by newer versions of transformers.
        with contextlib.suppress(ValueError):
            attend(query, key, key, mask, softcap=3.0)
        assert (4, 2, 5) not in seen.heads


def test_the_registered_function_comes_back() -> None:
    own = AttentionInterface()["sdpa"]
    with attention_for_trees(stock("llama"), "auto"):
        mine = AttentionInterface()["sdpa"]
        with attention_for_trees(stock("mistral"), "sdpa"):
            assert AttentionInterface()["sdpa"] is mine is not own
        assert AttentionInterface()["sdpa"] is mine
    assert AttentionInterface()["sdpa"] is own
    try:
        with attention_for_trees(stock("llama"), "auto"):
            AttentionInterface.register("sdpa", attend)
        assert AttentionInterface()["sdpa"] is attend
    finally:
        AttentionInterface.register("sdpa", own)


def test_calls_read_shared_heads_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = prompt("llama", 3)
    expected = reference(stock("llama"), ids, mask, max_new_tokens=12)
    seen = Seen(monkeypatch)
    call = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "assistant_model": draft("llama")}
    out = treed("llama").generate(ids, tree_config=TreeConfig(max_nodes=6, max_children=2, fallback="off"), **call)
    assert_same_text(expected, out)
    config = stock("llama").config
    shared = (config.num_attention_heads, config.num_key_value_heads)
    trees = [found for found in seen.heads if found[2] == 7]
    assert trees and {found[:2] for found in trees} == {shared}


def test_a_function_of_somebody_elses_stays() -> None:
    own = AttentionInterface()["sdpa"]
    AttentionInterface.register("sdpa", attend)
    try:
        with attention_for_trees(stock("llama"), "auto"):
            assert AttentionInterface()["sdpa"] is attend
    finally:
        AttentionInterface.register("sdpa", own)
