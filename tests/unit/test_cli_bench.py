"""`treespec bench` on tiny models: what its figures say is what happened."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_treespec import TreeConfig
from hf_treespec.cli import progress
from hf_treespec.cli.measure import Bench, count_forwards, counting_seconds, make_methods
from hf_treespec.cli.rows import Row, read_rows

Run = Callable[..., Any]
TOKENS = 8


def bench(treespec: Run, folder: str, sets: list[str], csv_path: Path, *options: object) -> tuple[list[Row], Any]:
    result = treespec(
        *("bench", folder, *sets, "--max-new-tokens", TOKENS, "--warmup", 0, "--csv", csv_path, "--json", *options)
    )
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert result.stderr == ""
    return read_rows(csv_path), json.loads(result.stdout)


def by_method(rows: list[Row]) -> dict[str, list[Row]]:
    return {name: [row for row in rows if row.method == name] for name in dict.fromkeys(row.method for row in rows)}


def test_greedy_run(treespec: Run, llama_folder: str, draft_folder: str, sets: list[str], tmp_path: Path) -> None:
    options = ("--limit", 2, "--repeats", 2, "--draft-model", draft_folder, "--plot", tmp_path / "bench.png")
    rows, summary = bench(treespec, llama_folder, sets, tmp_path / "bench.csv", *options)
    methods = by_method(rows)
    assert list(methods) == ["plain", "prompt_lookup", "assisted", "treespec"]
    # Two prompts of one set and the only one of the other, twice.
    assert all(len(of_method) == 6 for of_method in methods.values())
    assert {(row.set, row.prompt, row.repeat) for row in methods["plain"]} == {
        *((name, prompt, repeat) for name, prompt in (("code", 0), ("code", 1), ("chat", 0)) for repeat in (0, 1))
    }
    # The text of the chat set went through the template: user a b a b bot.
    assert {(row.set, row.prompt_tokens) for row in rows} == {("code", 7), ("chat", 6)}
    for row in rows:
        assert (row.new_tokens, row.text_equal, row.first_difference) == (
            (TOKENS, None, None) if row.method == "plain" else (TOKENS, True, None)
        )
        assert row.reference == (None if row.method == "plain" else "plain")
        assert row.seconds > 0 and row.model == llama_folder and row.draft_model == draft_folder
        assert (row.dtype, row.device, row.threads) == ("float32", "cpu", torch.get_num_threads())
        assert (row.draft_seconds is None) == (row.method != "treespec")
    for row in methods["plain"]:
        assert (row.target_forwards, row.tokens_per_round) == (TOKENS, 1.0)
    assert [result["method"] for result in summary["results"]] == [*methods, *methods]
    code_plain, *_, code_tree = summary["results"][:4]
    assert (code_plain["ratio"], code_plain["compared"]) == (None, 0)
    assert (code_tree["equal"], code_tree["compared"], code_tree["calls"], code_tree["prompts"]) == (4, 4, 4, 2)
    seconds = {name: sum(row.seconds for row in methods[name] if row.set == "code") for name in methods}
    assert code_tree["ratio"]["value"] == pytest.approx(seconds["plain"] / seconds["treespec"])
    assert code_tree["ratio"]["low"] <= code_tree["ratio"]["value"] <= code_tree["ratio"]["high"]
    assert summary["results"][-1]["ratio"]["low"] is None  # a single prompt
    assert summary["schema_version"] == 1 and summary["settings"]["repeats"] == 2
    assert set(summary["definitions"]) >= {"tokens_per_round", "ratio", "equal"}
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_forwards_are_those_of_the_target(treespec: Run, llama_folder: str, sets: list[str], tmp_path: Path) -> None:
    # With the target as its own draft every chain is accepted whole: three drafted tokens and one more a round.
    chain = TreeConfig(max_nodes=3, max_depth=3, max_children=1, fallback="off")
    chain.save_pretrained(tmp_path / "chain.json")
    rows, _ = bench(
        *(treespec, llama_folder, sets, tmp_path / "bench.csv", "--limit", 1, "--repeats", 1),
        *("--draft-model", llama_folder, "--config", tmp_path / "chain.json"),
    )
    for row in by_method(rows)["treespec:chain"]:
        # The first forward gives the first token; the seven others take two rounds.
        assert (row.new_tokens, row.target_forwards, row.tokens_per_round) == (8, 3, 3.5)
    for row in by_method(rows)["assisted"]:
        assert row.target_forwards < TOKENS


def test_methods_take_turns(treespec: Run, llama_folder: str, sets: list[str], tmp_path: Path) -> None:
    rows, _ = bench(treespec, llama_folder, sets[:2], tmp_path / "bench.csv", "--limit", 3, "--repeats", 1)
    orders = [[row.order for row in rows if row.prompt == prompt] for prompt in range(3)]
    # Of plain, prompt_lookup, treespec: each is first, second and last once.
    assert orders == [[0, 1, 2], [2, 0, 1], [1, 2, 0]]


def test_sampled_run(treespec: Run, llama_folder: str, sets: list[str], tmp_path: Path) -> None:
    # A seed of the config's own must not part it from its reference.
    TreeConfig(seed=99).save_pretrained(tmp_path / "seeded.json")
    options = ("--limit", 2, "--repeats", 2, "--temperature", 1.0, "--seed", 5, "--config", tmp_path / "seeded.json")
    rows, summary = bench(treespec, llama_folder, sets, tmp_path / "bench.csv", *options)
    methods = by_method(rows)
    assert list(methods) == ["plain", "prompt_lookup", "no-tree", "treespec:seeded"]
    for row in rows:
        assert (row.text_equal, row.reference) == (
            (True, "no-tree") if row.method == "treespec:seeded" else (None, None)
        )
    # The tree and its reference ran on the same noise; every prompt and repeat on another.
    assert len({row.seed for row in methods["treespec:seeded"] if row.set == "code"}) == 4
    for tree, plain in zip(methods["treespec:seeded"], methods["no-tree"], strict=True):
        assert json.loads(tree.config or "")["seed"] == json.loads(plain.config or "")["seed"] == tree.seed
        assert json.loads(plain.config or "")["max_nodes"] == 0
        assert plain.tokens_per_round == 1.0
    assert [result["equal"] for result in summary["results"] if result["method"] == "treespec:seeded"] == [4, 2]


def test_sampled_table_is_per_token(treespec: Run, llama_folder: str, sets: list[str]) -> None:
    options = ("--limit", 1, "--repeats", 1, "--max-new-tokens", 4, "--warmup", 0, "--temperature", 1.0)
    assert "speed-up a token" in treespec("bench", llama_folder, *sets[:2], *options).stdout


def test_altered_text_is_found(
    treespec: Run, llama_folder: str, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    generate = LlamaForCausalLM.generate

    def lossy(self: Any, *arguments: Any, **keywords: Any) -> Any:
        output = generate(self, *arguments, **keywords)
        if "tree_config" in keywords:
            output[0, -2] = (output[0, -2] + 1) % 64
        elif "prompt_lookup_num_tokens" in keywords:
            output = output[:, :-3]
        return output

    monkeypatch.setattr(LlamaForCausalLM, "generate", lossy)
    rows, summary = bench(treespec, llama_folder, sets[:2], tmp_path / "bench.csv", "--limit", 2, "--repeats", 1)
    methods = by_method(rows)
    assert [(row.text_equal, row.first_difference) for row in methods["treespec"]] == [(False, TOKENS - 2)] * 2
    assert [(row.text_equal, row.first_difference) for row in methods["prompt_lookup"]] == [(False, TOKENS - 3)] * 2
    assert [row.new_tokens for row in methods["prompt_lookup"]] == [TOKENS - 3] * 2
    assert [(result["equal"], result["compared"]) for result in summary["results"]] == [(0, 0), (0, 2), (0, 2)]
    with (tmp_path / "bench.csv").open() as file:
        assert {line["text_equal"] for line in csv.DictReader(file) if line["method"] == "treespec"} == {"false"}


def test_configs_are_methods(
    treespec: Run, llama_folder: str, draft_folder: str, sets: list[str], tmp_path: Path
) -> None:
    TreeConfig(draft="ngram", max_nodes=4).save_pretrained(tmp_path / "lookup.yaml")
    TreeConfig(draft="model", max_nodes=2).save_pretrained(tmp_path / "small")
    configs = ("--config", tmp_path / "lookup.yaml", "--config", tmp_path / "small")
    rows, _ = bench(
        *(treespec, llama_folder, sets[:2], tmp_path / "bench.csv", *configs, "--limit", 1, "--repeats", 1),
        *("--draft-model", draft_folder),
    )
    methods = by_method(rows)
    assert list(methods) == ["plain", "prompt_lookup", "assisted", "treespec:lookup", "treespec:small"]
    assert json.loads(methods["treespec:lookup"][0].config or "")["max_nodes"] == 4
    assert json.loads(methods["treespec:small"][0].config or "")["draft"] == "model"
    assert methods["treespec:small"][0].text_equal and methods["treespec:lookup"][0].text_equal


def test_table_is_the_default(treespec: Run, llama_folder: str, sets: list[str]) -> None:
    result = treespec(
        *("bench", llama_folder, *sets[:2], "--limit", 1, "--repeats", 1, "--max-new-tokens", 4, "--warmup", 1)
    )
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [
        ["set", "method"],
        ["code", "plain"],
        ["code", "prompt_lookup"],
        ["code", "treespec"],
    ]


def test_interrupted_run_keeps_whole_rounds(
    treespec: Run, llama_folder: str, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, calls = Bench._call, []

    def failing(self: Bench, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return call(self, *arguments)

    monkeypatch.setattr(Bench, "_call", failing)
    path = tmp_path / "bench.csv"
    result = treespec("bench", llama_folder, *sets, "--max-new-tokens", 4, "--warmup", 0, "--csv", path)
    assert result.exit_code != 0
    # Three methods a round: two rounds were whole.
    assert [(row.prompt, row.method) for row in read_rows(path)] == [
        (prompt, method) for prompt in (0, 1) for method in ("plain", "prompt_lookup", "treespec")
    ]


def test_warm_up_runs_every_method_untimed(
    treespec: Run, llama_folder: str, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, names = Bench._call, []

    def recording(self: Bench, method: Any, *arguments: Any) -> Any:
        names.append(method.name)
        return call(self, method, *arguments)

    monkeypatch.setattr(Bench, "_call", recording)
    path = tmp_path / "bench.csv"
    options = ("--max-new-tokens", 4, "--limit", 1, "--repeats", 1, "--warmup", 2, "--csv", path)
    assert treespec("bench", llama_folder, *sets[:2], *options).exit_code == 0
    assert names == ["plain", "prompt_lookup", "treespec"] * 3
    assert len(read_rows(path)) == 3


# Counting


def test_hook_is_removed_whatever_happens() -> None:
    module = nn.Linear(2, 2)
    with count_forwards(module) as counter:
        module(torch.zeros(1, 2))
        module(torch.zeros(1, 2))
    module(torch.zeros(1, 2))
    assert counter.forwards == 2
    with pytest.raises(ZeroDivisionError), count_forwards(module):
        _ = 1 / 0
    assert not module._forward_pre_hooks


def test_counting_costs_microseconds() -> None:
    # A forward of the smallest useful model takes milliseconds.
    assert 0 <= counting_seconds(200) < 100e-6


def test_plain_runs_outside_our_class(llama_folder: str) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(llama_folder)
    classes: list[bool] = []
    runner = Bench(
        model=model,
        draft=None,
        methods=make_methods({"treespec": TreeConfig()}, has_draft=False, sampled=False),
        arguments={"max_new_tokens": 3, "do_sample": False},
        seed=0,
        constants={},
    )
    model.register_forward_pre_hook(lambda module, inputs: classes.append(type(module) is LlamaForCausalLM))
    inputs = {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    seen = []
    for method in runner.methods:
        classes.clear()
        runner._call(method, inputs, 0)
        seen.append((method.name, all(classes), any(classes)))
    assert seen == [("plain", True, True), ("prompt_lookup", True, True), ("treespec", False, False)]


def test_methods_by_settings() -> None:
    config = TreeConfig(draft="ngram")
    greedy = make_methods({"t": config}, has_draft=True, sampled=False)
    assert [(m.name, m.reference, m.assisted) for m in greedy] == [
        ("plain", None, False),
        ("prompt_lookup", "plain", False),
        ("assisted", "plain", True),
        ("t", "plain", False),
    ]
    # An assistant is for those that ask for one, or take what there is.
    drafts = {"model": True, "auto": True, "mtp": False, "early_exit": False, "recycle": False}
    configs = {name: TreeConfig(draft=name) for name in drafts} | {"both": TreeConfig(draft=("model", "ngram"))}
    own = make_methods(configs, has_draft=True, sampled=False)[3:]
    assert {m.name: m.assisted for m in own} == {**drafts, "both": True}
    sampled = make_methods({"t": TreeConfig()}, has_draft=True, sampled=True)
    assert [(m.name, m.reference, m.assisted) for m in sampled] == [
        ("plain", None, False),
        ("prompt_lookup", None, False),
        ("assisted", None, True),
        ("no-tree", None, False),
        ("t", "no-tree", True),
    ]


# Progress


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    import io

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    screen = Screen()
    monkeypatch.setattr(progress.sys, "stderr", screen)
    with progress.progress_bar(2, "bench") as bar:
        bar.update()
        bar.update()
    assert ("bench" in screen.getvalue()) is terminal
