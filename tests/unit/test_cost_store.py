"""The file of measured costs: what comes back, and what is ignored with one warning."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_treespec import TreeSpecWarning, _compat
from hf_treespec.control.store import FILE_NAME, Measured, Setting, cache_folder, find_measured, keep_measured

HERE = Setting(
    model="LlamaForCausalLM", config="abc", parameters=7, dtype="float32", device="chip", attention="sdpa",
    route="mask", threads=2, torch="2.9", transformers="5.24",
)  # fmt: skip
CURVE = Measured(setting=HERE, batch=1, context=128, target={0: 1.0, 8: 2.0})
OTHERS: dict[str, Any] = {
    "model": "GPT2LMHeadModel", "config": "abd", "parameters": 8, "dtype": "bfloat16", "device": "other",
    "attention": "eager", "route": "paths", "threads": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat.warning, "_WARNED", set())


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TREESPEC_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("HF_TREESPEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "hf_treespec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "hf_treespec"


def test_what_was_kept_is_found_for_its_setting_alone(tmp_path: Path) -> None:
    assert find_measured(HERE, tmp_path) == []
    drafted = replace(CURVE, draft="model X 3", drafting={1: 0.1, 4: 0.5})
    assert keep_measured([CURVE], tmp_path / "new") == tmp_path / "new" / FILE_NAME
    keep_measured([drafted, replace(CURVE, batch=4)], tmp_path / "new")
    # Measured again: the new one counts.
    again = replace(CURVE, target={0: 3.0})
    keep_measured([again], tmp_path / "new")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_measured(HERE, tmp_path / "new") == [again, drafted, replace(CURVE, batch=4)]
        for name, value in OTHERS.items():
            assert find_measured(replace(HERE, **{name: value}), tmp_path / "new") == []
    assert [path.name for path in (tmp_path / "new").iterdir()] == [FILE_NAME]


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_costs_of_other_versions_are_ignored_with_one_warning(package: str, tmp_path: Path) -> None:
    keep_measured([CURVE], tmp_path)
    now = replace(HERE, **{package: "9.9"})
    with pytest.warns(
        TreeSpecWarning, match=r"LlamaForCausalLM were measured with torch 2\.9 .* `treespec calibrate` again"
    ):
        assert find_measured(now, tmp_path) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_measured(now, tmp_path) == []


BROKEN = {
    "no JSON": lambda text: text[:-20],
    "another schema": lambda text: text.replace('"schema_version": 1', '"schema_version": 2'),
    "a field too few": lambda text: text.replace('"batch": 1,', ""),
    "no seconds": lambda text: text.replace("2.0", "-2.0"),
    "not a number": lambda text: text.replace("2.0", "NaN"),
    "a list": lambda text: json.dumps([1]),
    "curves that are none": lambda text: json.dumps({"schema_version": 1, "curves": [3]}),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_file_is_ignored_with_one_warning_and_replaced(fault: str, tmp_path: Path) -> None:
    path = keep_measured([CURVE], tmp_path)
    path.write_text(BROKEN[fault](path.read_text()))
    with pytest.warns(TreeSpecWarning, match=rf"{FILE_NAME}: measured costs cannot be read and are ignored"):
        assert find_measured(HERE, tmp_path) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_measured(HERE, tmp_path) == []
        keep_measured([CURVE], tmp_path)
        assert find_measured(HERE, tmp_path) == [CURVE]
