"""Calibration: what is timed, what is kept and for whom, and the size that is chosen."""

from __future__ import annotations

import copy
import csv
import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from hf_treespec import TreeConfig, TreeConfigError, calibrate, clock, enable
from hf_treespec.api.calibration import best_size
from hf_treespec.control import find_measured, known_of
from hf_treespec.engine import setting_of

WAY = "mask, DynamicCache of DynamicLayer"
SMALL: dict[str, Any] = {"max_nodes": 8, "contexts": (16,), "repeats": 3}


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TREESPEC_CACHE", str(tmp_path / "cache"))


def prompts(count: int = 4) -> list[dict[str, torch.Tensor]]:
    return [
        dict(zip(("input_ids", "attention_mask"), tiny.prompt("llama", 1, seed=seed), strict=True))
        for seed in range(count)
    ]


def scripted(monkeypatch: pytest.MonkeyPatch, model: Any, draft: Any = None, per_token: float = 0.25) -> None:
    """Forwards take that long, by the tokens that they read, and nothing else takes any time."""
    now = 0.0

    def take(module: Any, args: Any, more: dict[str, Any]) -> None:
        nonlocal now
        now += 1.0 + per_token * (more["input_ids"].shape[1] - 1) if module is model else 0.5

    monkeypatch.setattr(clock, "now", lambda: now)
    for module in (model, draft):
        if module is not None:
            module.register_forward_pre_hook(take, with_kwargs=True)


def test_costs_are_those_of_the_rounds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny.stock("llama"))
    before = type(model)
    scripted(monkeypatch, model)
    found = calibrate(model, **{**SMALL, "batches": (1, 2), "contexts": (16, 40)})
    assert type(model) is before and found.config is None and not found.levels
    expected = {nodes: pytest.approx(1.0 + 0.25 * nodes) for nodes in (0, 1, 2, 4, 8)}
    for batch in (1, 2):
        for context in (16, 40):
            assert found.target(batch, context) == expected
    assert all(len(one.seconds) >= 3 for one in found.timings)
    kept = find_measured(setting_of(model, WAY, model.device))
    assert [(one.batch, one.context, one.target) for one in kept] == [
        (batch, context, expected) for batch in (1, 2) for context in (16, 40)
    ]


def test_a_draft_is_judged_on_prompts_and_a_config_follows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny.stock("llama"))
    draft = copy.deepcopy(model)
    scripted(monkeypatch, model, draft, per_token=0.01)
    steps: list[str] = []
    tree = TreeConfig(max_nodes=8, max_depth=4, max_children=2)
    found = calibrate(
        model, prompts=prompts(), draft_model=draft, tree_config=tree, max_new_tokens=24, report=steps.append,
        do_sample=False, **SMALL,
    )  # fmt: skip
    assert steps == ["costs: batch 1, context 16", *(f"draft: prompt {n} of 4" for n in range(1, 5))]
    # A level is a forward of half a second, and the draft is the target itself.
    assert found.levels == pytest.approx({1: 0.5, 2: 1.0, 4: 2.0})
    assert [round(row[0], 3) for row in found.acceptance()] == [1.0] * 4
    assert found.config is not None and found.config.max_depth == 4 and found.gain == pytest.approx(5 / 3.04, rel=0.02)
    assert found.config.replace(max_nodes=8, max_depth=4) == tree
    files = found.save(tmp_path / "out")
    assert [path.name for path in files] == [
        "calibration.json", "costs.csv", "levels.csv", "acceptance.csv", "tree_config.json",
    ]  # fmt: skip
    assert TreeConfig.from_pretrained(tmp_path / "out") == found.config
    facts = json.loads(files[0].read_text())
    assert facts["setting"]["model"] == "LlamaForCausalLM" and facts["measured"].endswith("+00:00")
    with files[1].open() as file:
        assert [row["nodes"] for row in csv.DictReader(file)] == ["0", "1", "2", "4", "8"]
    kept = find_measured(setting_of(model, WAY, model.device))
    assert [one.drafting for one in kept] == [None, found.levels] and kept[1].draft.startswith(
        "model LlamaForCausalLM "
    )


def test_a_draft_that_does_not_pay_gives_the_plain_config(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny.stock("llama"))
    useless = tiny.build("llama", seed=9)
    scripted(monkeypatch, model, useless)
    found = calibrate(model, prompts=prompts(2), draft_model=useless, max_new_tokens=16, keep=False, **SMALL)
    assert found.config is not None and found.config.max_nodes == 0 and found.gain == 1.0
    assert not find_measured(setting_of(model, WAY, model.device))


def test_all_sizes_are_tried_as_costs_are_stairs() -> None:
    acceptance = [[0.8, 0.1]] * 8
    stairs = {nodes: 1.0 + 0.8 * (nodes // 4) for nodes in range(13)}
    nodes, depth, gain = best_size(acceptance, stairs, {})
    rates = {n: (1 + sum(0.8**d for d in range(1, n + 1))) / stairs[n] for n in (3, 7, 8)}
    assert nodes == 3 == max(rates, key=lambda n: rates[n]) and depth >= 3 and gain == pytest.approx(rates[3])
    # Levels that cost stop the depth first.
    assert best_size(acceptance, stairs, {1: 0.3, 2: 0.6})[1] < 3
    assert best_size(acceptance, stairs, {1: 2.0})[0] == 0


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max_nodes", 0, "max_nodes=0"),
        ("repeats", True, "repeats=True"),
        ("contexts", (), r"contexts=\(\)"),
        ("batches", (1, 0), r"batches=\(1, 0\)"),
        (
            "contexts",
            (16, 250),
            r"contexts=\[16, 250\]\): the model reads 256 positions, of which the rounds take \d+",
        ),
    ],
)
def test_errors_name_the_argument(name: str, value: Any, text: str) -> None:
    model, steps = tiny.stock("llama"), count()
    with pytest.raises(TreeConfigError, match=rf"calibrate\({text}"):
        calibrate(model, report=lambda step: next(steps), **{**SMALL, name: value})
    assert next(steps) == 0


@pytest.mark.parametrize(
    ("prompt", "config", "text"),
    [
        (
            {"inputs": torch.ones(1, 4, dtype=torch.long)},
            None,
            r"prompts=...\): input_ids of prompts\[1\] are NoneT",
        ),
        ({"input_ids": torch.ones(2, 4, dtype=torch.long)}, None, r"prompts=...\): .*of shape \[2, 4\]"),
        ({"input_ids": [[1, 2]]}, None, r"prompts=...\): .*are list"),
        (torch.ones(1, 4), None, r"prompts=...\): .*none in a Tensor"),
        (None, TreeConfig(max_nodes=0), r"tree_config=...\) with prompts: its max_nodes is 0"),
    ],
)
def test_prompts_and_config_are_checked_before_anything_is_measured(prompt: Any, config: Any, text: str) -> None:
    steps: list[str] = []
    given = [*prompts(1), prompts(1)[0] if prompt is None else prompt]
    with pytest.raises(TreeConfigError, match=rf"calibrate\({text}"):
        calibrate(tiny.stock("llama"), prompts=given, tree_config=config, report=steps.append, **SMALL)
    assert not steps


def test_texts_that_end_at_once_are_held_open() -> None:
    model = copy.deepcopy(tiny.stock("llama"))
    model.generation_config.eos_token_id = list(range(model.config.vocab_size - 2))
    found = calibrate(model, **SMALL)
    assert [(one.nodes, len(one.seconds)) for one in found.timings] == [(nodes, 3) for nodes in (0, 1, 2, 4, 8)]


def test_sizes_that_could_not_be_timed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny.stock("llama"))
    plain = TreeConfig.__init__

    def narrow(self: TreeConfig, *args: Any, **more: Any) -> None:
        plain(self, *args, **{**more, "max_nodes": 2})

    monkeypatch.setattr(TreeConfig, "__init__", narrow)
    with pytest.raises(
        TreeConfigError, match=r"contexts=\[16\], batches=\[1\]\): rounds of .0, 1, 2, 4, 8. nodes could not"
    ):
        calibrate(model, **SMALL)


def test_costs_are_filed_under_the_attention_of_the_timed_rounds() -> None:
    model = copy.deepcopy(tiny.stock("llama"))
    own = setting_of(model, WAY, model.device).attention
    found = calibrate(model, tree_config=TreeConfig(attention="treespec"), **SMALL)
    assert found.setting.attention != own == setting_of(model, WAY, model.device).attention
    assert found.setting.route == WAY
    (ids, mask), enabled = tiny.prompt("llama", 1), enable(model)
    for attention, begun in (("treespec", True), ("auto", False)):
        config = TreeConfig(attention=attention)
        enabled.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False, tree_config=config)
        key, costs = list(known_of(enabled).items())[-1]
        assert key.draft != "calibration" and bool(costs.at(16).target) is begun


def test_a_running_process_takes_up_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable(copy.deepcopy(tiny.stock("llama")))
    ids, mask = tiny.prompt("llama", 1)
    model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, tree_config=TreeConfig())
    ((_, costs),) = known_of(model).items()
    found = calibrate(model, keep=False, **SMALL)
    assert costs.at(20).target.known() != found.target(1, 16)
    found = calibrate(model, **SMALL)
    assert costs.at(20).target.known() == pytest.approx(found.target(1, 16))
