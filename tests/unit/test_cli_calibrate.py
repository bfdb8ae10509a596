"""`treespec calibrate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_treespec import TreeConfig

Run = Callable[..., Any]
Check = Callable[..., None]
FAST = ("--context", 8, "--repeats", 1, "--max-nodes", 4)


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TREESPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture(name="prompts")
def _prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"w1 w2 w{n}"}) + "\n" for n in range(3, 9)))
    return file


def test_costs_alone(treespec: Run, llama_folder: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = treespec("calibrate", llama_folder, "--out", out, *FAST)
    assert result.exit_code == 0, result.stderr
    assert "batch 1, context 8: milliseconds by nodes 0: " in result.stdout and "costs only" in result.stdout
    assert sorted(path.name for path in out.iterdir()) == ["calibration.json", "calibration.png", "costs.csv"]
    assert (tmp_path / "cache" / "costs.json").is_file()


def test_a_config_is_written_that_generates(treespec: Run, llama_folder: str, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sets = ("--set", f"mine={prompts}", "--limit", 3, "--max-new-tokens", 8, "--draft-model", llama_folder)
    result = treespec("calibrate", llama_folder, "--out", out, *sets, *FAST, "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert {Path(path).name for path in facts["files"]} == {path.name for path in out.iterdir()}
    config = TreeConfig.from_pretrained(out)
    assert config.to_dict() == facts["config"] == json.loads((out / "tree_config.json").read_text())
    assert facts["levels"] and facts["gain"] >= 1.0
    call = ("generate", llama_folder, "--prompt", "w1 w2 w3", "--raw", "--max-new-tokens", 12, "--json")
    drafted = treespec(*call, "--config", out, "--draft-model", llama_folder)
    assert drafted.exit_code == 0, drafted.stderr
    assert json.loads(drafted.stdout)["text"] == json.loads(treespec(*call, "--max-nodes", 0).stdout)["text"]


def test_errors(treespec: Run, one_error: Check, llama_folder: str, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    common = ("calibrate", llama_folder, "--out")
    one_error(treespec(*common, prompts, *FAST), "--out: ")
    one_error(treespec(*common, out, "--set", "mine=none.jsonl"), "--set mine=none.jsonl: ")
    one_error(treespec(*common, out, "--draft-model", llama_folder), "--draft-model: is judged on prompts")
    one_error(treespec(*common, out, "--max-nodes", 5000), "--max-nodes: ")
    one_error(treespec(*common, out, "--max-nodes", 0), "--max-nodes: ")
    one_error(treespec(*common, out, "--repeats", 0), "--repeats: ")
    one_error(treespec(*common, out, "--context", 0), "--context: ")
    one_error(treespec(*common, out, "--batch", 0), "--batch: ")
    one_error(treespec(*common, out, "--context", 10**6), "--context: ")
    one_error(treespec("calibrate", tmp_path / "nowhere", "--out", out), "MODEL: ")
    assert not out.exists()
