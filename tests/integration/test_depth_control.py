"""Coupled and greedy text under every controller of the depth and every policy of growth is that of no tree."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

import tiny
from hf_treespec import TreeConfig, _compat, clock, enable
from hf_treespec.engine.shares import ConfidenceNotice, TargetShares
from hf_treespec.tree import TokenTree

CONTROLS = ("cost", "pid", "confidence", "kl")
SAMPLINGS: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 30}]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("control", CONTROLS)
def test_the_text_is_that_of_no_tree(control: str, batch: int, sampling: dict[str, Any]) -> None:
    model, ids_mask = tiny.treed("llama"), tiny.prompt("llama", batch)
    ids, mask = ids_mask
    arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 18, **sampling}
    plain = model.generate(ids, tree_config=TreeConfig(max_nodes=0, seed=5), **arguments)
    drafts = [(tiny.draft("llama"), "model"), (tiny.stock("llama"), "model"), (None, "ngram")]
    for fallback, growths in (("auto", ("best_first", "static")), ("off", ("best_first", "dynamic"))):
        for growth in growths:
            for assistant, draft in drafts[:2] if growth == "best_first" else drafts[1:]:
                config = TreeConfig(
                    draft=draft, max_nodes=8, max_depth=5, max_children=3, seed=5, growth=growth, fallback=fallback,
                    depth_control=control,
                )  # fmt: skip
                text = model.generate(ids, assistant_model=assistant, tree_config=config, **arguments)
                assert torch.equal(text, plain), (fallback, growth, draft)
                stats = model.treespec_stats
                assert fallback == "auto" or draft == "ngram" or stats.drafted_nodes > 0


@pytest.mark.parametrize("batch", [1, 3])
def test_shares_of_all_rows_are_those_of_each_and_one_transfer(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gen = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 5, 11, generator=gen)
    chain = TokenTree.chain([1, 2, 3, 4])
    trees = [dataclasses.replace(chain, scores=(0.0, -1.0, -2.0, -3.0)), chain, TokenTree.chain([1, 2, 3])]
    trees[2] = dataclasses.replace(trees[2], scores=(0.0, -1.0, -2.0))
    paths = {row: [[0, 1], [0, 1, 2], [0]][row] for row in range(batch)}
    moved: list[int] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: moved.append(1) or tolist(self))
    found = TargetShares(None, None).of_rows(trees, paths, logits, [0, 0, 0], torch.device("cpu"))
    assert len(moved) == 1
    laws = logits.softmax(-1)
    expected = {0: {1: laws[0, 0, 2], 2: laws[0, 1, 3]}, 2: {1: laws[2, 0, 2]}}
    assert found.keys() == {0, 2} & paths.keys()
    for row, shares in found.items():
        assert shares == pytest.approx({child: float(share) for child, share in expected[row].items()}, abs=1e-6)
    moved.clear()
    assert not TargetShares(None, None).of_rows([chain], {0: [0, 1]}, logits, [0], torch.device("cpu"))
    assert not moved


@pytest.mark.parametrize("control", CONTROLS)
def test_a_controller_with_nothing_to_go_by_says_so(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(_compat, "warn_once", said.append)
    ids, mask = tiny.prompt("llama", 1)
    for draft, assistant in (("lookahead", None), ("model", tiny.draft("llama"))):
        said.clear()
        config = TreeConfig(draft=draft, depth_control=control, fallback="off", max_nodes=6)
        tiny.treed("llama").generate(
            ids, attention_mask=mask, assistant_model=assistant, tree_config=config, max_new_tokens=20, do_sample=False
        )
        told = [one for one in said if f"depth_control={control!r}) has no effect" in one]
        assert len(told) == (draft == "lookahead" and control == "kl"), draft
    said.clear()
    notice = ConfidenceNotice(control, True)
    for _ in range(2):
        notice.see([TokenTree.root_only(1), TokenTree.chain([1, 2])], "odd")
    assert len(said) == (control in ("confidence", "kl")) and all("'odd' does not say" in one for one in said)


@pytest.mark.parametrize("rule", ["naive", "rrsw", "hybrid-joint"])
@pytest.mark.parametrize("control", CONTROLS)
def test_rules_of_independent_draws_run_with_every_controller(control: str, rule: str) -> None:
    model = tiny.treed("llama")
    ids, mask = tiny.prompt("llama", 3)
    for fallback in ("auto", "off"):
        config = TreeConfig(
            draft="model", max_nodes=6, max_depth=4, seed=3, verification=rule, depth_control=control,
            fallback=fallback,
        )  # fmt: skip
        text = model.generate(
            ids, attention_mask=mask, assistant_model=tiny.draft("llama"), tree_config=config, max_new_tokens=10,
            do_sample=True,
        )  # fmt: skip
        assert text.shape[1] <= ids.shape[1] + 10


def scripted(monkeypatch: pytest.MonkeyPatch, target: Any, draft: Any, level: float) -> dict[str, float]:
    """A clock that forwards alone move: 1 for the target's, with 1 % a token, `level` for the draft's."""
    clocks = {"now": 0.0}

    def take(module: Any, args: Any, more: dict[str, Any]) -> None:
        tokens = more["input_ids"].shape[1]
        clocks["now"] += 1.0 + 0.01 * (tokens - 1) if module is target else level

    for module in (target, draft):
        module.register_forward_pre_hook(take, with_kwargs=True)
    monkeypatch.setattr(clock, "now", lambda: clocks["now"])
    return clocks


@pytest.mark.parametrize("level", [0.1, 0.4])
def test_a_useless_draft_costs_little_in_a_whole_call(level: float, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = copy.deepcopy(tiny.stock("llama")), tiny.build("llama", seed=11)
    ids, mask = tiny.prompt("llama", 1)
    enable(target)
    clocks = scripted(monkeypatch, target, draft, level)
    tokens = 200

    def seconds(config: TreeConfig) -> float:
        start = clocks["now"]
        target.generate(
            ids, attention_mask=mask, assistant_model=draft, tree_config=config, max_new_tokens=tokens, do_sample=False
        )
        return clocks["now"] - start

    plain = seconds(TreeConfig(max_nodes=0))
    assert seconds(TreeConfig()) < 1.06 * plain
    assert seconds(TreeConfig()) < 1.03 * plain


@pytest.mark.parametrize("batch", [1, 3])
def test_a_draft_that_turns_to_garbage_is_noticed_within_64_tokens(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = copy.deepcopy(tiny.stock("llama"))
    draft = copy.deepcopy(target)
    ids, mask = tiny.prompt("llama", batch)
    enable(target)
    scripted(monkeypatch, target, draft, 0.15)
    from hf_treespec.engine.round import RoundRunner

    emitted, drafted = [], []
    plain = RoundRunner.run

    def run(self: RoundRunner) -> None:
        before = self._stats.drafted_nodes
        if self._text.new_lengths[0] >= 80 and len(drafted) == len(emitted) and not swapped:
            swapped.append(len(emitted))
            with torch.no_grad():
                draft.lm_head.weight.copy_(torch.randn_like(draft.lm_head.weight))
        plain(self)
        emitted.append(self._text.new_lengths[0])
        drafted.append(self._stats.drafted_nodes > before)

    swapped: list[int] = []
    monkeypatch.setattr(RoundRunner, "run", run)
    target.generate(
        ids, attention_mask=mask, assistant_model=draft, tree_config=TreeConfig(), max_new_tokens=200, do_sample=False
    )
    at = swapped[0]
    assert all(drafted[5:at]), "a perfect draft is used"
    # From some round on within 64 tokens nearly all rounds are plain.
    later = [flag for tokens, flag in zip(emitted, drafted, strict=True) if tokens > emitted[at] + 64]
    assert len(later) > 30 and sum(later) < 0.15 * len(later)
