"""`treespec bench` refuses what cannot be measured before it measures anything."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_treespec import TreeConfig

Run = Callable[..., Any]
Check = Callable[..., None]

# Little to do, in case it is done after all.

QUICK = ("--limit", 1, "--repeats", 1, "--warmup", 0, "--max-new-tokens", 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "x=none.jsonl"], "--set x=none.jsonl: none.jsonl: no such file"),
        (["--config", "none.json"], "--config none.json: "),
        (["--draft-model", "/none"], "--draft-model: /none: no such file or folder"),
        (["--dtype", "int4"], "--dtype: "),
        (["--plot", "bench.png"], "--plot: is drawn from the file of --csv"),
        (["--csv", "/no/such/folder/bench.csv"], "--csv: /no/such/folder/bench.csv: expected a file in a folder"),
        (["--csv", "/"], "--csv: /: expected a file"),
    ],
)
def test_errors(
    treespec: Run, one_error: Check, llama_folder: str, sets: list[str], options: list[str], message: str
) -> None:
    one_error(treespec("bench", llama_folder, *QUICK, *sets, *options), message)


def test_errors_before_anything_is_measured(
    treespec: Run,
    one_error: Check,
    chatless_folder: str,
    cacheless_folder: str,
    llama_folder: str,
    sets: list[str],
    tmp_path: Path,
) -> None:
    one_error(treespec("bench", llama_folder, *QUICK, *sets, *sets[:2]), "--set code=", "a second set called 'code'")
    TreeConfig(draft="model").save_pretrained(tmp_path / "a" / "tree.json")
    TreeConfig().save_pretrained(tmp_path / "b" / "tree.json")
    configs = [("--config", tmp_path / name / "tree.json") for name in ("a", "b")]
    one_error(
        treespec("bench", llama_folder, *QUICK, *sets, *configs[0]), "--config", "draft='model' needs --draft-model"
    )
    one_error(
        treespec("bench", llama_folder, *QUICK, *sets, *configs[1], *configs[1]),
        "--config",
        "second config",
        "treespec:tree",
    )
    one_error(treespec("bench", chatless_folder, *QUICK, *sets), "--set chat: ", "no chat template; pass --raw")
    one_error(
        treespec("bench", llama_folder, *QUICK, *sets, "--draft-model", cacheless_folder),
        "--draft-model: ",
        "cannot take a tree",
    )
    refused = treespec("bench", cacheless_folder, *QUICK, *sets)
    assert (refused.exit_code, refused.stdout) == (1, "") and "cannot take a tree" in refused.stderr


def test_plot_without_matplotlib(
    treespec: Run,
    one_error: Check,
    llama_folder: str,
    sets: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    one_error(
        treespec("bench", llama_folder, *QUICK, *sets, "--csv", tmp_path / "b.csv", "--plot", tmp_path / "b.png"),
        "--plot: needs matplotlib: pip install -e '.[cli]' in the checkout",
    )
