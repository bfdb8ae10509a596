"""What calls know of costs: from earlier calls of the model, and from the file that calibration writes."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from hf_treespec import TreeConfig, enable
from hf_treespec.control import Costs, Measured, SizePolicy, keep_measured
from hf_treespec.engine import costs as known

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
    assert seen[4] is seen[0]
    # Another cache is read at another cost.
    model.generate(ids, attention_mask=mask, tree_config=TreeConfig(kv_cache="int8"), **ARGUMENTS)
    assert seen[5] is not seen[0]
    # Nothing is written by calls.
    assert list(tmp_path.iterdir()) == []


def test_costs_are_read_from_the_file_of_calibration(seen: list[Costs]) -> None:
    model, draft = fresh(), tiny.stock("llama")
    ids, mask = tiny.prompt("llama", 1)
    setting = known.setting_of(model, "mask", ids.device)
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
    model.generate(ids, attention_mask=mask, assistant_model=draft, tree_config=TreeConfig(max_nodes=0), **ARGUMENTS)
    costs = seen[0].at(20)
    # Rounds are timed on; the form of the curve stays.
    known_now = costs.target.known()
    assert set(known_now) == {0, 16} and known_now[16] == pytest.approx(9.0 * known_now[0])
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
