"""What calls know of costs: from earlier calls of the model, and from the file that calibration writes."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from hf_treespec import TreeCache, TreeConfig, TreeSpecWarning, clock, enable
from hf_treespec.control import Costs, Measured, SizePolicy, keep_measured
from hf_treespec.control.costs import known_of
from hf_treespec.engine import costs as known
from hf_treespec.rules import RULES

WAY = "mask, DynamicCache of DynamicLayer"
ARGUMENTS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(name="seen")
def _seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Costs]:
    """The costs that each call begins with; the file lies in a folder of the test's own."""
    seen: list[Costs] = []
    plain = SizePolicy.__init__

    def init(self: SizePolicy, *args: Any, costs: Costs, **more: Any) -> None:
        seen.append(costs)
        plain(self, *args, costs=costs, **more)

    monkeypatch.setattr(SizePolicy, "__init__", init)
    monkeypatch.setenv("HF_TREESPEC_CACHE", str(tmp_path))
    return seen


def fresh() -> Any:
    return enable(copy.deepcopy(tiny.stock("llama")))


def test_a_call_begins_with_what_the_last_one_found_out(seen: list[Costs], tmp_path: Path) -> None:
    model, draft = fresh(), tiny.stock("llama")
    ids, mask = tiny.prompt("llama", 1)
    for assistant in (None, None, draft, draft):
        model.generate(ids, attention_mask=mask, assistant_model=assistant, tree_config=TreeConfig(), **ARGUMENTS)
    assert seen[0] is seen[1] and seen[2] is seen[3] and seen[0] is not seen[2]
    assert seen[0].at(20).target.known() and seen[0].at(20).due == 0
    enable(model).generate(ids, attention_mask=mask, tree_config=TreeConfig(fallback="off"), **ARGUMENTS)
    # Where nothing is chosen nothing is looked up.
    assert seen[4] is not seen[0]
    # Another cache is read at another cost.
    model.generate(ids, attention_mask=mask, tree_config=TreeConfig(kv_cache="int8"), **ARGUMENTS)
    assert seen[5] is not seen[0]
    # Nothing is written by calls.
    assert list(tmp_path.iterdir()) == []


def test_costs_are_read_from_the_file_of_calibration(seen: list[Costs]) -> None:
    model, draft = fresh(), tiny.stock("llama")
    ids, mask = tiny.prompt("llama", 1)
    setting = known.setting_of(model, WAY, ids.device)
    named = f"model LlamaForCausalLM {sum(p.numel() for p in draft.parameters())}"
    both = {0: 1.0, 16: 9.0}
    keep_measured(
        [
            Measured(setting=setting, batch=1, context=64, target=both),
            Measured(setting=setting, batch=1, context=64, target={}, draft=named, drafting={1: 0.5}),
            Measured(setting=setting, batch=1, context=64, target={}, draft="model X 1", drafting={1: 99.0}),
            Measured(setting=setting, batch=8, context=64, target={0: 99.0}),
            Measured(setting=replace(setting, dtype="float16"), batch=1, context=64, target={0: 99.0}),
        ]
    )
    model.generate(
        ids, attention_mask=mask, assistant_model=draft, tree_config=TreeConfig(), **{**ARGUMENTS, "max_new_tokens": 1}
    )
    costs = seen[0].at(20)
    assert costs.target.known() == both
    assert costs.drafting.known() == {1: 0.5} and costs.due == 0


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.9}])
def test_the_text_does_not_depend_on_what_is_known(sampling: dict[str, Any], seen: list[Costs]) -> None:
    model, draft = fresh(), tiny.stock("llama")
    for batch in (1, 3):
        ids, mask = tiny.prompt("llama", batch)

        def text(config: TreeConfig, ids: torch.Tensor = ids, mask: torch.Tensor = mask) -> torch.Tensor:
            return model.generate(
                ids, attention_mask=mask, max_new_tokens=20, assistant_model=draft, tree_config=config, **sampling
            )

        plain = text(TreeConfig(max_nodes=0, seed=3))
        for _ in range(3):
            assert torch.equal(text(TreeConfig(seed=3)), plain)


def test_a_file_that_cannot_be_looked_up_costs_one_warning_and_no_call(
    seen: list[Costs], monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    model = fresh()
    ids, mask = tiny.prompt("llama", 1)
    with pytest.warns(TreeSpecWarning, match="cannot be looked up and are ignored .RuntimeError: Could not determine"):
        text = model.generate(ids, attention_mask=mask, tree_config=TreeConfig(), **ARGUMENTS)
    assert text.shape[1] == ids.shape[1] + 12

    def never(*args: Any) -> Any:
        raise AssertionError("looked up though nothing is chosen")

    monkeypatch.setattr(known, "find_measured", never)
    for config in (TreeConfig(fallback="off"), TreeConfig(max_nodes=0)):
        assert torch.equal(fresh().generate(ids, attention_mask=mask, tree_config=config, **ARGUMENTS), text)


def test_keys_of_a_config_may_be_of_several_types() -> None:
    model = fresh()
    before = known.setting_of(model, WAY, model.device).config
    model.config.odd = {1: [{"b": 2, 3: 4}], "a": 3}
    odd = known.setting_of(model, WAY, model.device).config
    model.config.odd = {"a": 3, 1: [{3: 4, "b": 2}]}
    assert odd != before and odd == known.setting_of(model, WAY, model.device).config


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_call_under_independent_draws_begins_as_the_one_before(
    rule: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = 0.0
    model, draft = fresh(), tiny.perturbed(tiny.stock("llama"))

    def take(module: Any, args: Any, more: dict[str, Any]) -> None:
        nonlocal now
        now += 1.0 + 0.02 * (more["input_ids"].shape[1] - 1) if module is model else 0.15

    monkeypatch.setenv("HF_TREESPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(clock, "now", lambda: now)
    begun: list[Any] = []
    plain = SizePolicy.__init__

    def init(self: SizePolicy, *args: Any, **more: Any) -> None:
        plain(self, *args, **more)
        begun.append((self.limits().max_nodes, self.limits().max_depth, self.acceptance.table().tolist()))
        begun[-1] += self.costs.target.known(), self.costs.drafting.known(), self.costs.due

    monkeypatch.setattr(SizePolicy, "__init__", init)
    for module in (model, draft):
        module.register_forward_pre_hook(take, with_kwargs=True)
    ids, mask = tiny.prompt("llama", 1)
    for seed in range(3):
        calls = []
        for _ in range(2):
            config = TreeConfig(verification=rule, seed=seed, max_nodes=8, max_depth=4)
            text = model.generate(
                ids, attention_mask=mask, assistant_model=draft, do_sample=True, max_new_tokens=12, tree_config=config
            )
            calls.append((text.tolist(), model.treespec_stats.drafted_nodes))
        # The same coins, too.
        assert calls[0] == calls[1]
    assert begun == begun[:1] * 6
    # What rounds of other calls took is taken over, what their texts told is not.
    coupled = TreeConfig(max_nodes=8, max_depth=4)
    for config in (coupled, coupled.replace(verification=rule)):
        model.generate(
            ids, attention_mask=mask, assistant_model=draft, do_sample=True, max_new_tokens=12, tree_config=config
        )
    assert begun[-1][3] and begun[-1][2] == begun[0][2]


def test_costs_are_kept_by_the_cache_that_is_read_and_by_guidance(seen: list[Costs]) -> None:
    model = fresh()
    ids, mask = tiny.prompt("llama", 1)
    ways: list[dict[str, Any]] = [
        {},
        {"cache_implementation": "static"},
        {"guidance_scale": 1.5, "negative_prompt_ids": ids[:, -4:]},
        tiny.cache_argument(TreeCache(model.config, storage="int8")),
    ]
    for way in ways:
        model.generate(ids, attention_mask=mask, tree_config=TreeConfig(), **ARGUMENTS, **way)
    assert [key.route for key in known_of(model)] == [
        WAY,
        "mask, StaticCache of StaticLayer 32 slots",
        f"{WAY}, guided",
        "mask, TreeCache of TreeLayer int8",
    ]


def test_a_draft_tells_how_many_levels_it_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft, forwards = fresh(), tiny.perturbed(tiny.stock("llama")), 0
    told: list[tuple[int, int, int]] = []
    plain = SizePolicy.cut

    def count(*args: Any) -> None:
        nonlocal forwards
        forwards += 1

    def cut(self: SizePolicy, trees: Any, *args: Any, **more: Any) -> Any:
        nonlocal forwards
        told.append((forwards, more["levels"], trees[0].max_depth))
        forwards = 0
        return plain(self, trees, *args, **more)

    monkeypatch.setattr(SizePolicy, "cut", cut)
    draft.register_forward_pre_hook(count)
    ids, mask = tiny.prompt("llama", 1)
    config = TreeConfig(max_nodes=3, max_depth=5, max_children=2, growth="best_first", fallback="off")
    model.generate(ids, attention_mask=mask, assistant_model=draft, tree_config=config, **ARGUMENTS)
    # The first round reads the prompt besides, and is not booked.
    assert [read for _, read, _ in told[1:]] == [count for count, _, _ in told[1:]]
    assert any(read > depth for _, read, depth in told) and all(read >= depth for _, read, depth in told)
