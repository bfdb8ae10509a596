"""Prompts of the evals, and the drafts that are made from a target."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from drafts import make_draft
from expected import SettingsError
from promptsource import PromptSource
from tiny import stock


class Tokenizer:
    """Letters as numbers; the chat template puts 99 in front and 98 behind."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 96 for letter in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **told: Any) -> dict[str, list[int]]:
        assert told == {"add_generation_prompt": True, "return_dict": True} and messages[0]["role"] == "user"
        return {"input_ids": [99, *self(messages[0]["content"])["input_ids"], 98]}


def ids(source: PromptSource) -> list[tuple[int, ...]]:
    found = list(source.prompts(Tokenizer()))
    assert [prompt.index for prompt in found] == list(range(len(found)))
    return [prompt.ids for prompt in found]


def test_files(tmp_path) -> None:
    lines = '{"prompt": "abc"}\n\n{"prompt": "d", "turns": ["ef", "g"], "ids": [7, 8]}\n'
    path, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    path.write_text(lines)
    packed.write_bytes(gzip.compress(lines.encode()))
    assert ids(PromptSource(path=str(path))) == ids(PromptSource(path=str(packed))) == [(1, 2, 3), (4,)]
    assert ids(PromptSource(path=str(path), chat=True)) == [(99, 1, 2, 3, 98), (99, 4, 98)]
    assert ids(PromptSource(path=str(path), limit=1, max_tokens=2)) == [(1, 2)]
    one, two = (
        next(PromptSource(path=str(path), field=f, limit=0).prompts(Tokenizer())) for f in ("prompt", "prompt")
    )
    assert one.digest == two.digest
    path.write_text(lines.splitlines()[2] + "\n")
    assert ids(PromptSource(path=str(path), field="turns")) == [(5, 6)]
    assert [p.ids for p in PromptSource(path=str(path), field="ids").prompts(None)] == [(7, 8)]
    digest = PromptSource(path=str(path)).digest()
    path.write_text(lines)
    assert PromptSource(path=str(path)).digest() != digest


@pytest.mark.parametrize(
    ("line", "said"),
    [('{"prompt": 3}', "row 0: field 'prompt' holds 3"), ("{", "a.jsonl"), ('{"prompt": ""}', "row 0 has no tokens"),
     ('{"other": "a"}', "holds None")],
)  # fmt: skip
def test_bad_rows_are_named(tmp_path, line: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(SettingsError, match=said):
        ids(PromptSource(path=str(tmp_path / "a.jsonl")))


@pytest.mark.parametrize("damage", ["cut off", "overwritten"])
def test_damaged_archives_are_named(tmp_path, damage: str) -> None:
    whole = gzip.compress(b"".join(b'{"prompt": "%d"}\n' % number for number in range(999)))
    bad = whole[:-20] if damage == "cut off" else whole[:20] + bytes(20) + whole[40:]
    (tmp_path / "a.jsonl.gz").write_bytes(bad)
    with pytest.raises(SettingsError, match=r"prompts: .*a\.jsonl\.gz: "):
        ids(PromptSource(path=str(tmp_path / "a.jsonl.gz")))


def test_texts_without_a_tokenizer_are_refused(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "abc"}) + "\n")
    with pytest.raises(SettingsError, match="need a tokenizer"):
        list(PromptSource(path=str(tmp_path / "a.jsonl")).prompts(None))


def test_sets_of_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    taken = []

    def load_dataset(*names: Any, **told: Any) -> Any:
        asked.append((*names, told))

        def rows() -> Any:
            for letter in "abcdef":
                taken.append(letter)
                yield {"question": letter}

        return rows() if told["streaming"] else list(rows())

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    source = PromptSource.of(
        {"dataset": "x/y", "split": "train", "field": "question", "streaming": True, "limit": 2, "chat": True}
    )
    assert ids(source) == [(99, 1, 98), (99, 2, 98)]
    # A stream is read no further than asked.
    assert taken == ["a", "b"]
    assert asked == [("x/y", None, {"split": "train", "streaming": True})]
    assert source.digest() == "x/y//train"
    assert len(ids(PromptSource(dataset="x/y", name="main", field="question"))) == 6
    assert asked[1] == ("x/y", "main", {"split": "test", "streaming": False})
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SettingsError, match=r"pip install hf-treespec\[evals\]"):
        ids(PromptSource(dataset="x/y"))


def test_drafts_made_from_a_target() -> None:
    target = stock("llama")
    layers = target.config.num_hidden_layers
    assert layers >= 2
    text = torch.tensor([[3, 4, 5, 6]])
    first = make_draft("layers:1", target, 0)
    dropped = make_draft(f"drop:1-{layers}", target, 0)
    assert first is not None and dropped is not None
    assert first.config.num_hidden_layers == 1 and target.config.num_hidden_layers == layers
    for draft in (first, dropped):
        with torch.no_grad():
            hidden = target.model(text, output_hidden_states=True).hidden_states[1]
            expected = target.lm_head(target.model.norm(hidden))
            assert torch.allclose(draft(text).logits, expected, atol=1e-5)
    last = make_draft(f"drop:0-{layers - 1}", target, 0)
    assert last is not None
    weight = "self_attn.q_proj.weight"
    assert torch.equal(
        last.state_dict()[f"model.layers.0.{weight}"], target.state_dict()[f"model.layers.{layers - 1}.{weight}"]
    )
    noisy = make_draft("noise:0.1", target, 4)
    assert noisy is not None
    with torch.no_grad():
        off = (noisy(text).logits - target(text).logits).abs().max()
    assert float(off) > 1e-4 and not torch.equal(noisy.lm_head.weight, target.lm_head.weight)
    again = make_draft("noise:0.1", target, 4)
    assert again is not None and torch.equal(noisy.lm_head.weight, again.lm_head.weight)
    assert make_draft("ngram", target, 0) is None
    for spec in (f"layers:{layers}", "layers:0", f"drop:0-{layers}"):
        with pytest.raises(SettingsError, match=spec):
            make_draft(spec, target, 0)


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "closed.jsonl"
    path.write_text("{}\n")

    def refused(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(SettingsError, match=rf"prompts: path: {path}: Permission denied"):
        PromptSource(path=str(path)).digest()
