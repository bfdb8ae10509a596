"""`treespec skips`, and `treespec generate` with what it wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_treespec import TreeConfig

Run = Callable[..., Any]
Check = Callable[..., None]


def prompts(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"w1 w2 w{n}"}) + "\n" for n in range(3, 9)))
    return file


def test_a_config_is_written_that_generates(treespec: Run, llama_folder: str, tmp_path: Path) -> None:
    out = tmp_path / "skip.yaml"
    common = ("skips", llama_folder, "--set", f"mine={prompts(tmp_path)}", "--out", out, "--limit", 2)
    result = treespec(*common, "--trials", 3, "--max-new-tokens", 8, "--max-nodes", 5, "--max-depth", 3, "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    config = TreeConfig.from_pretrained(out)
    assert config.draft == "layer_skip" and config.options_of("layer_skip")["skip"] == tuple(facts["skip"])
    assert facts["layers"] == 2 and facts["skip"] in ([0], [1]) and facts["config"] == str(out)
    assert config.max_nodes == 5 and config.max_depth == facts["depth"] <= 3
    assert facts["gain"] > 0 and facts["tokens_per_round"] >= 1
    told = treespec(*common, "--trials", 1, "--max-new-tokens", 8)
    assert f"{out}: skips 0 of 2 layers" in told.stdout
    call = ("generate", llama_folder, "--prompt", "w1 w2 w3", "--raw", "--max-new-tokens", 12, "--json")
    plain = json.loads(treespec(*call, "--max-nodes", 0).stdout)
    drafted = json.loads(treespec(*call, "--config", out, "--fallback", "off").stdout)
    assert drafted["text"] == plain["text"] and drafted["stats"]["draft"] == "layer_skip"
    assert drafted["stats"]["drafted_nodes"] > 0


def test_errors(treespec: Run, one_error: Check, llama_folder: str, tmp_path: Path) -> None:
    file, out = prompts(tmp_path), tmp_path / "skip.json"
    sets = ("--set", f"mine={file}", "--trials", 1, "--max-new-tokens", 4, "--limit", 1)
    one_error(treespec("skips", llama_folder, *sets, "--out", tmp_path / "skip.txt"), "--out: ")
    one_error(treespec("skips", llama_folder, "--set", "mine=none.jsonl", "--out", out), "--set mine=none.jsonl: ")
    one_error(treespec("skips", tmp_path / "nowhere", *sets, "--out", out), "MODEL: ")
    one_error(treespec("skips", llama_folder, *sets, "--out", out, "--max-depth", 0), "--max-depth: ")
    one_error(treespec("skips", llama_folder, *sets, "--out", file / "x.json"), "--out: ")
    one_error(
        treespec("generate", llama_folder, "--prompt", "w1", "--raw", "--draft", "early_exit"), "names no layers"
    )
    assert not out.exists()
