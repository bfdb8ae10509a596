"""`treespec index`, and `treespec generate --corpus` over what it made."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_treespec.draft import build_corpus_index, open_corpus_index

Run = Callable[..., Any]
Check = Callable[..., None]


def test_texts_of_every_kind_are_indexed(treespec: Run, llama_folder: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("w1 w2 w3")
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": "w4 w5"}) + "\n\n" + json.dumps({"body": "w6 w7"}) + "\n")
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write(json.dumps({"body": "w2 w8"}) + "\n")
    out = tmp_path / "corpus.tsx"
    files = [tmp_path / name for name in ("a.txt", "b.jsonl", "c.jsonl.gz")]
    result = treespec("index", llama_folder, *files, "--out", out, "--field", "body", "--max-match", 5, "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts == {"index": str(out), "tokens": 9, "texts": 4, "bytes": out.stat().st_size}
    index = open_corpus_index(out)
    assert index.max_match == 5 and index.fingerprint is not None
    told = treespec("index", llama_folder, *files, "--out", out, "--field", "body")
    assert f"{out}: 9 tokens of 4 texts" in told.stdout


def test_generate_drafts_from_the_corpus(treespec: Run, llama_folder: str, tmp_path: Path) -> None:
    common = ("generate", llama_folder, "--prompt", "w1 w2 w3", "--raw", "--max-new-tokens", 24, "--fallback", "off")
    plain = treespec(*common, "--max-nodes", 0, "--json")
    text = json.loads(plain.stdout)["text"]
    (tmp_path / "known.txt").write_text("w1 w2 w3 " + text)
    out = tmp_path / "corpus.tsx"
    assert treespec("index", llama_folder, tmp_path / "known.txt", "--out", out).exit_code == 0
    drafted = treespec(*common, "--draft", "suffix,recycle", "--corpus", out, "--json")
    assert drafted.exit_code == 0, drafted.stderr
    facts = json.loads(drafted.stdout)
    assert facts["text"] == text and facts["stats"]["draft"] == "suffix+recycle"
    assert facts["tree_config"]["draft"] == ["suffix", "recycle"]
    without = json.loads(treespec(*common, "--draft", "suffix", "--json").stdout)
    assert facts["stats"]["rounds"] < without["stats"]["rounds"]


def test_errors(treespec: Run, one_error: Check, llama_folder: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("w1 w2")
    (tmp_path / "b.jsonl").write_text('{"other": "w1 w2"}\n')
    (tmp_path / "c.jsonl").write_text("{\n")
    (tmp_path / "d.txt").write_text("w1")
    whole = gzip.compress(b"".join(b'{"text": "w%d w2"}\n' % number for number in range(999)))
    (tmp_path / "e.jsonl.gz").write_bytes(whole[:-20])
    (tmp_path / "f.jsonl.gz").write_bytes(whole[:20] + bytes(20) + whole[40:])
    out = tmp_path / "corpus.tsx"
    for name, message in (
        ("none.txt", "none.txt: no such file"),
        ("b.jsonl", "b.jsonl, line 1: expected an object with a text in 'text'; see --field"),
        ("c.jsonl", "c.jsonl cannot be read"),
        ("e.jsonl.gz", "e.jsonl.gz cannot be read"),
        ("f.jsonl.gz", "f.jsonl.gz cannot be read"),
        ("d.txt", "FILES: 1 texts without two tokens in a row"),
    ):
        one_error(treespec("index", llama_folder, tmp_path / name, "--out", out), message)
    one_error(treespec("index", llama_folder, tmp_path / "a.txt", "--out", tmp_path / "a.txt" / "x"), "--out: ")
    one_error(treespec("index", tmp_path / "nowhere", tmp_path / "a.txt", "--out", out), "MODEL: ")
    assert not out.exists()
    common = ("generate", llama_folder, "--prompt", "w1 w2", "--max-new-tokens", 3)
    one_error(treespec(*common, "--corpus", out), "--corpus: has no effect with draft 'auto'")
    one_error(treespec(*common, "--draft", "suffix", "--corpus", out), "corpus.tsx: cannot be read")
    build_corpus_index([[1, 2]], out, vocab_size=3)
    one_error(treespec(*common, "--draft", "suffix", "--corpus", out), "vocabulary of 3 ids")
    one_error(treespec(*common, "--draft", "ngram,other"), "--draft: ")


@pytest.mark.parametrize("draft", ["recycle", "ngram,recycle", "ngram, recycle"])
def test_generate_by_name(treespec: Run, llama_folder: str, draft: str) -> None:
    result = treespec("generate", llama_folder, "--prompt", "w1 w2", "--max-new-tokens", 5, "--draft", draft)
    assert result.exit_code == 0, result.stderr
    assert draft.replace(" ", "").replace(",", "+") in result.stderr
