"""Nobody sees whom they should not: siblings, cousins, neighbour rows. And nothing of the user's is changed."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from cases import FAST, FEW, SLOW, Case, cases, tree_configs
from hf_treespec import TreeConfig, _compat, disable, enable
from hf_treespec.attention import tree_masks
from hf_treespec.cache import RowCache
from hf_treespec.draft import DraftRow
from hf_treespec.engine import TargetForward
from hf_treespec.tree import TokenTree
from sources import Source, random_tree
from tiny import (
    FAMILIES,
    assert_same_text,
    build,
    draft,
    fingerprint,
    margins,
    new_cache,
    prompt,
    real_texts,
    reference,
    stock,
    treed,
    vocabulary,
)

families = pytest.mark.parametrize("family", FAMILIES)


@torch.no_grad()
def tree_logits(model: PreTrainedModel, ids: Tensor, mask: Tensor, trees: list[TokenTree]) -> Tensor:
    """Logits `[B, N, V]` of one tree per row behind a prompt whose last token has been read."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = new_cache(model)
    _compat.model_forward(model, input_ids=ids, cache=cache, position_ids=positions, attention_mask=mask)
    rows = RowCache(cache, [ids.shape[1]] * len(ids))
    padding = None if bool(mask.all()) else mask
    forward = TargetForward(model, rows, positions[:, -1:], padding, {"use_cache": True})
    with tree_masks(), rows.transaction():
        return forward(trees, [1] * len(ids))


@torch.no_grad()
def path_logits(model: PreTrainedModel, ids: Tensor, mask: Tensor, path: list[int]) -> Tensor:
    """Logits `[V]` behind one row's prompt and a path, by one plain forward without padding or cache."""
    text = torch.cat([ids[mask.bool()], torch.tensor(path)])[None]
    return model(text, position_ids=torch.arange(text.shape[1])[None]).logits[0, -1]


@st.composite
def forests(draw: st.DrawFn) -> tuple[int, int, TreeConfig]:
    return draw(st.sampled_from([1, 3])), draw(st.integers(0, 2**32)), draw(tree_configs())


def grown(family: str, seed: int, config: TreeConfig, batch: int) -> list[TokenTree]:
    source = Source(random_tree, seed=seed, vocab=vocabulary(family))
    roots = [DraftRow(index=row, tokens=[source.rng.randrange(3, source.vocab)]) for row in range(batch)]
    return source.propose(roots, [config.limits] * batch)


@families
@FAST
@given(forest=forests())
def test_node_logits_are_those_of_its_path(family: str, forest: tuple[int, int, TreeConfig]) -> None:
    batch, seed, config = forest
    ids, mask = prompt(family, batch, seed % 100)
    trees = grown(family, seed, config, batch)
    logits = tree_logits(stock(family), ids, mask, trees)
    for row, tree in enumerate(trees):
        for node in range(len(tree)):
            alone = path_logits(stock(family), ids[row], mask[row], tree.path_tokens(node))
            torch.testing.assert_close(logits[row, node], alone, atol=1e-4, rtol=1e-4)


@families
@FAST
@given(forest=forests())
def test_canary_of_a_sibling_reaches_nobody(family: str, forest: tuple[int, int, TreeConfig]) -> None:
    batch, seed, config = forest
    ids, mask = prompt(family, batch, seed % 100)
    trees = grown(family, seed, config, batch)
    source = Source(random_tree, seed=seed + 1, vocab=vocabulary(family))
    row = source.rng.randrange(batch)
    tree = trees[row]
    node = source.rng.randrange(1, len(tree))
    siblings = [tree.tokens[child] for child in tree.children(tree.parents[node])]
    token = source.token(siblings)
    assert token is not None
    changed = TokenTree((*tree.tokens[:node], token, *tree.tokens[node + 1 :]), tree.parents)
    before = tree_logits(stock(family), ids, mask, trees)
    after = tree_logits(stock(family), ids, mask, [*trees[:row], changed, *trees[row + 1 :]])
    below = {n for n in range(node, len(tree)) if n == node or _is_below(tree, n, node)}
    for other, theirs in enumerate(trees):
        for n in range(len(theirs)):
            if other == row and n in below:
                # The canary itself must sing, or the test would pass for a forward that reads nothing.
                assert not torch.equal(before[row, n], after[row, n])
            else:
                assert torch.equal(before[other, n], after[other, n]), (other, n)


def _is_below(tree: TokenTree, node: int, ancestor: int) -> bool:
    while node > ancestor:
        node = tree.parents[node]
    return node == ancestor


def check_neighbours(family: str, case: Case) -> None:
    """A row's text is the same among other neighbours and, where its row number is the same, alone."""
    case = replace(case, batch=3)
    ids, mask = case.prompt(family)
    others, _ = prompt(family, 3, case.prompt_seed + 1000)
    seed = case.config.seed or 0
    margin = margins(treed(family), ids, mask, seed=seed, **case.arguments)
    plain = reference(stock(family), ids, mask, seed=seed, **case.arguments)
    first = case.run(family, ids, mask, real_texts(plain, mask))
    batches = [(kept, torch.where(torch.arange(3)[:, None] == kept, ids, others * mask), mask) for kept in range(3)]
    for kept, mixed, mixed_mask in [*batches, (0, ids[:1], mask[:1])]:
        assert len(mixed) == 1 or not torch.equal(mixed, ids)
        plain = reference(stock(family), mixed, mixed_mask, seed=seed, **case.arguments)
        second = case.run(family, mixed, mixed_mask, real_texts(plain, mixed_mask))
        width = max(first.shape[1], second.shape[1])
        one, two = (torch.nn.functional.pad(out[kept], (0, width - out.shape[1])) for out in (first, second))
        assert_same_text(one[None], two[None], lambda row, column, kept=kept: margin(kept, column))


@families
@FEW
@given(case=cases())
def test_neighbours_change_nothing(family: str, case: Case) -> None:
    check_neighbours(family, case)


@pytest.mark.slow
@families
@SLOW
@given(case=cases())
def test_neighbours_change_nothing_at_length(family: str, case: Case) -> None:
    check_neighbours(family, case)


@families
@FEW
@given(case=cases(kinds=("model", "half_right")))
def test_call_changes_nothing_of_the_users(family: str, case: Case) -> None:
    ids, mask = case.prompt(family)
    generation = GenerationConfig(pad_token_id=0, **case.arguments)
    plain = reference(stock(family), ids, mask, seed=case.config.seed or 0, **case.arguments)
    target, helper = treed(family), draft(family)
    before = fingerprint(target), fingerprint(helper), repr(generation.to_dict()), vars(generation).keys()
    masks = {name: _compat.mask_function_of(name) for name in _compat.MASK_IMPLEMENTATIONS}
    ids_before, mask_before = ids.clone(), mask.clone()
    call: dict[str, Any] = {"attention_mask": mask, "generation_config": generation, "tree_config": case.config}
    if case.kind == "model":
        call["assistant_model"] = helper
    random_state = torch.get_rng_state()
    with case.injected(family, real_texts(plain, mask)):
        out = target.generate(ids, **call)
    assert out.shape == plain.shape
    assert (fingerprint(target), fingerprint(helper), repr(generation.to_dict()), vars(generation).keys()) == before
    assert torch.equal(ids, ids_before) and torch.equal(mask, mask_before)
    assert {name: _compat.mask_function_of(name) for name in _compat.MASK_IMPLEMENTATIONS} == masks
    # With a seed of its own the call leaves the global generator where it was.
    assert torch.equal(torch.get_rng_state(), random_state)
    assert out.data_ptr() != ids.data_ptr()


def test_enable_and_disable_leave_the_model_as_it_was() -> None:
    model = build("llama")
    before = fingerprint(model)
    twin = copy.deepcopy(model)
    enable(model)
    assert type(model) is not type(twin) and isinstance(model, type(twin))
    model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3, tree_config=TreeConfig())
    assert fingerprint(disable(model)) == before
    assert "treespec_stats" not in vars(model)
