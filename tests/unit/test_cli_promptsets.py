"""Prompt sets in the shapes that people have them in, and one clear line about every other shape."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hf_treespec.cli.faults import UsageFault
from hf_treespec.cli.promptsets import load_set


def write(path: Path, rows: list[Any]) -> Path:
    text = "\n".join(json.dumps(row) for row in rows) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize(
    ("rows", "chat"),
    [
        ([{"task_id": 0, "prompt": "one"}, {"task_id": 1, "prompt": "two"}], False),
        ([{"question": "one", "answer": "x"}, {"question": "two", "answer": "y"}], True),
        ([{"turns": ["one", "later"]}, {"turns": ["two", "later"]}], True),
    ],
)
def test_shapes(tmp_path: Path, suffix: str, rows: list[Any], chat: bool) -> None:
    loaded = load_set(f"name={write(tmp_path / f'set{suffix}', rows)}")
    assert (loaded.name, loaded.prompts, loaded.chat) == ("name", ("one", "two"), chat)


def test_limit_and_order(tmp_path: Path) -> None:
    path = write(tmp_path / "set.jsonl", [{"prompt": f"p{number}"} for number in range(9)])
    assert load_set(f"s={path}", 3).prompts == ("p0", "p1", "p2")
    assert len(load_set(f"s={path}", 99).prompts) == 9


def test_blank_lines_are_no_prompts(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('\n{"prompt": "one"}\n\n{"prompt": "two"}\n\n')
    assert load_set(f"s={path}").prompts == ("one", "two")


def test_path_may_hold_an_equals_sign(tmp_path: Path) -> None:
    assert load_set(f"s={write(tmp_path / 'a=b.jsonl', [{'prompt': 'one'}])}").prompts == ("one",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "one"}\n{"prompt": \n', "line 2 is no JSON"),
        ('{"prompt": "one"}\n[1]\n', "line 2 holds no JSON object"),
        ('{"text": "one", "label": 1}\n', "its rows have label, text; expected one of prompt, question, turns"),
        ('{"prompt": "one"}\n{"question": "two"}\n', "row 2: field 'prompt' holds None"),
        ('{"turns": []}\n', "row 1: field 'turns' holds"),
        ('{"prompt": "  "}\n', "row 1: field 'prompt' holds"),
        ("", "no prompts in it"),
    ],
)
def test_bad_content(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(content)
    with pytest.raises(UsageFault) as caught:
        load_set(f"s={path}")
    assert str(caught.value).startswith(f"--set s={path}: ")
    assert message in str(caught.value)


def test_bad_rows_behind_the_limit_are_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "one"}\nnonsense\n')
    assert load_set(f"s={path}", 1).prompts == ("one",)


WHOLE = gzip.compress(b"".join(b'{"prompt": "%d"}\n' % number for number in range(999)))


@pytest.mark.parametrize(
    "damage",
    [b"no gzip at all", WHOLE[:-20], WHOLE[:20] + bytes(20) + WHOLE[40:]],
    ids=["text", "cut off", "overwritten"],
)
def test_bad_gzip(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "set.jsonl.gz"
    path.write_bytes(damage)
    with pytest.raises(UsageFault, match="cannot be read"):
        load_set(f"s={path}")


@pytest.mark.parametrize("spec", ["name", "=x.jsonl", "name=", "", "s=hf:a:b:c", "s=hf::main:test:question"])
def test_bad_specs(spec: str) -> None:
    with pytest.raises(UsageFault, match=r"expected NAME=FILE"):
        load_set(spec)


def test_missing_file_and_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match="no such file"):
        load_set(f"s={tmp_path / 'none.jsonl'}")
    (tmp_path / "set.csv").write_text("prompt\none\n")
    with pytest.raises(UsageFault, match=r"set\.csv: unknown format"):
        load_set(f"s={tmp_path / 'set.csv'}")


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for the package that records what it is asked for."""
    calls: list[Any] = []
    module = ModuleType("datasets")

    def load_dataset(name: str, config: str | None, *, split: str) -> list[dict[str, Any]]:
        calls.append((name, config, split))
        if name == "empty":
            return []
        if name == "missing":
            raise RuntimeError("no\nsuch dataset")
        return [{"question": "one", "prompt": "raw", "dialog": ["first", "second"]}, {"question": "two"}]

    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_dataset(datasets: list[Any]) -> None:
    loaded = load_set("s=hf:openai/gsm8k:main:test:question")
    assert (loaded.prompts, loaded.chat) == (("one", "two"), True)
    assert load_set("s=hf:openai/humaneval::test:prompt", 1) == type(loaded)(name="s", prompts=("raw",), chat=False)
    assert load_set("s=hf:x:y:z:dialog", 1).prompts == ("first",)
    assert datasets == [("openai/gsm8k", "main", "test"), ("openai/humaneval", None, "test"), ("x", "y", "z")]


def test_dataset_that_cannot_be_loaded(datasets: list[Any]) -> None:
    with pytest.raises(UsageFault, match=r"^--set s=hf:missing:a:b:c: datasets cannot load it: no such dataset$"):
        load_set("s=hf:missing:a:b:c")
    with pytest.raises(UsageFault, match="no prompts in it"):
        load_set("s=hf:empty:a:b:c")


def test_dataset_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageFault, match=r"needs the datasets package: pip install -e '\.\[evals\]'"):
        load_set("s=hf:openai/gsm8k:main:test:question")
