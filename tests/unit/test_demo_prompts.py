"""The prompts of the demo: the target's own messages, starts of functions, and none of an eval set."""

from __future__ import annotations

import gzip
import json
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import demo_prompts
from demo_prompts import eval_grams, functions, messages, starts
from learnable import FIRST, VOCAB, learnable


class Letters:
    """A tokenizer as far as messages need one: an id for each letter, and some are full stops."""

    eos_token_id = 3

    def apply_chat_template(self, turns: list[dict[str, str]], tokenize: bool) -> str:
        assert not tokenize
        return f"user: {turns[0]['content']} end"

    def __call__(self, text: str, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        return SimpleNamespace(input_ids=[FIRST + ord(letter) % (VOCAB - FIRST) for letter in text])

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join("." if token % 9 == 0 else chr(ord("a") + token % 26) for token in ids)


SOURCE = '''
def told(text):
    """Say the words of a text in the other order, one by one."""
    return text.split()[::-1]


def kept(text):
    """Say nothing at all of what was asked for by anyone."""


def bare():
    return 1
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of one module, and a folder of tests and a broken file, which are passed over."""
    folder = tmp_path / "library"
    (folder / "tests").mkdir(parents=True)
    (folder / "module.py").write_text(SOURCE)
    (folder / "tests" / "more.py").write_text(SOURCE.replace("told", "tested"))
    (folder / "broken.py").write_text("def (")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    return folder


def test_messages_are_what_the_target_makes_of_the_starts(tmp_path: Path) -> None:
    made = messages(learnable(0), Letters(), 6, tmp_path / "texts", 0)
    begun = [Letters().decode(Letters()(start, add_special_tokens=False).input_ids, True) for start in starts()[:6]]
    assert 0 < len(made) <= 6 and all(15 <= len(text) <= 400 and text[-1] in ".?!" for text in made)
    # Those that go on behind a start begin with it; the frame of the chat is gone.
    assert all(any(text.startswith(start[: len(text)]) for start in begun) for text in made)
    # A run that was stopped goes on from what is there.
    assert messages(learnable(0), Letters(), 6, tmp_path / "texts", 0) == made


def test_functions_are_signatures_and_docstrings(library: Path) -> None:
    made = functions(9, 0)
    assert sorted(text.partition("(")[0] for text in made) == ["def kept", "def told"]
    assert all(text.endswith('"""\n') for text in made) and len(functions(1, 0)) == 1


def test_texts_with_eight_words_of_an_eval_set_are_dropped(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    (data / "plain.jsonl").write_text(json.dumps({"question": "Why? Seven words are no reason to go."}) + "\n")
    with gzip.open(data / "packed.jsonl.gz", "wt") as file:
        file.write(json.dumps({"turns": ["x", "the words of a TEXT, in the other order"]}) + "\n")
    assert ("the", "words", "of", "a", "text", "in", "the", "other") in eval_grams(data)
    monkeypatch.setattr(demo_prompts, "load_smollm2", lambda dtype: (learnable(0), Letters()))
    monkeypatch.setattr(sys, "argv", ["demo_prompts.py", "--out", str(out), "--data", str(data), "--messages", "4"])
    assert demo_prompts.main() == 0
    (kept,) = map(json.loads, (out / "code.jsonl").read_text().splitlines())
    assert kept["prompt"].startswith("def kept")
    chat = [json.loads(line)["question"] for line in (out / "chat.jsonl").read_text().splitlines()]
    assert chat and "code: 1 of 2 texts" in capsys.readouterr().out
