"""The corpus index: against a scan of the texts, damaged files, other vocabularies, many readers."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_treespec import TreeConfigError
from hf_treespec.draft import (
    DraftRow,
    SuffixDraft,
    build_corpus_index,
    open_corpus_index,
    tokenizer_fingerprint,
)
from hf_treespec.draft import corpus as module
from hf_treespec.tree import TokenTree, TreeLimits

TEXTS = st.lists(st.lists(st.integers(0, 4), max_size=25), min_size=1, max_size=5)


def scan(texts: Sequence[Sequence[int]], context: Sequence[int], max_match: int) -> list[tuple[int, dict[int, int]]]:
    """By match length, the longest first, what followed; of lengths with the same occurrences the longest."""
    found: dict[int, tuple[int, dict[int, int]]] = {}
    for length in range(1, min(len(context), max_match) + 1):
        wanted = list(context[len(context) - length :])
        followers = [
            text[p] for text in texts for p in range(length, len(text)) if list(text[p - length : p]) == wanted
        ]
        if not followers:
            break
        found[len(followers)] = length, dict(Counter(followers))
    return list(reversed(found.values()))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, st.lists(st.integers(0, 5), max_size=8), st.integers(1, 7))
def test_matches_equal_a_scan_of_the_texts(
    tmp_path: Path, texts: list[list[int]], context: list[int], max_match: int
) -> None:
    path = tmp_path / "corpus.tsx"
    if all(len(text) < 2 for text in texts):
        with pytest.raises(TreeConfigError, match=f"{len(texts)} texts without two tokens in a row"):
            build_corpus_index(texts, path, vocab_size=6, max_match=max_match)
        return
    index = open_corpus_index(build_corpus_index(texts, path, vocab_size=6, max_match=max_match))
    assert len(index) == sum(map(len, texts)) and index.texts == len(texts)
    for end in (context, texts[0], [*texts[-1][-3:], *context]):
        found = index.matches(reversed(end))
        assert [(m.length, dict(m.counts)) for m in found] == scan(texts, end, max_match)[: module._CONTEXTS]
        # The most frequent is last, where the most recent one of a text is.
        assert all(list(m.counts.values()) == sorted(m.counts.values()) for m in found)


def test_of_a_common_context_some_occurrences_are_read(tmp_path: Path) -> None:
    rng = random.Random(0)
    text = [token for _ in range(2000) for token in (1, rng.choice((2, 2, 2, 3)))]
    index = open_corpus_index(build_corpus_index([text], tmp_path / "c", vocab_size=4))
    match = index.matches([1])[-1]
    assert sum(match.counts.values()) == module._READ
    assert 0.65 < match.counts[2] / module._READ < 0.85


def test_a_corpus_votes_beside_the_text(tmp_path: Path) -> None:
    corpus = open_corpus_index(build_corpus_index([[9, 3, 4, 5, 6, 7, 8]], tmp_path / "c", vocab_size=20))
    limits = TreeLimits(max_nodes=4, max_depth=8, max_children=1)
    rows = [DraftRow(0, [1, 2, 3, 4, 5])]
    assert SuffixDraft(corpus=corpus, background=0.0).propose(rows, [limits]) == [TokenTree.chain([5, 6, 7, 8])]
    assert SuffixDraft(background=0.0).propose(rows, [limits]) == [TokenTree.root_only(5)]
    # At the same length of context the text itself goes first.
    rows = [DraftRow(0, [4, 5, 11, 4, 5])]
    assert SuffixDraft(corpus=corpus, background=0.0).propose(rows, [limits])[0].tokens[1] == 11
    rows = [DraftRow(0, [4, 5, 11, 3, 4, 5])]
    assert SuffixDraft(corpus=corpus, background=0.0).propose(rows, [limits])[0].tokens[1] == 6


def made(tmp_path: Path, **changes: Any) -> Path:
    arguments: dict[str, Any] = {"vocab_size": 10, "fingerprint": "abc", **changes}
    return build_corpus_index([[1, 2, 3, 4] * 30, [5, 6] * 20], tmp_path / "corpus.tsx", **arguments)


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    path = made(tmp_path)
    whole = path.read_bytes()
    header = struct.unpack_from("<8sIII", whole)[2]
    about = json.loads(whole[20 : 20 + header])
    offset, places = 20 + header, list(range(0, 20 + header, 7))
    for name in ("tokens", "order", "starts"):
        offset += -offset % 64
        size = about["arrays"][name]["length"] * np.dtype(about["arrays"][name]["dtype"]).itemsize
        places += [offset, offset + size // 2, offset + size - 1]
        offset += size
    assert offset == len(whole)
    for count, place in enumerate(places):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        os.utime(path, ns=(count, count))
        with pytest.raises(TreeConfigError, match=r"corpus.tsx: (damaged|not a corpus|version).*treespec index"):
            open_corpus_index(path)
    path.write_bytes(whole)
    assert len(open_corpus_index(path)) == 160


@pytest.mark.parametrize("size", [0, 5, 20, 100, -64, -1])
def test_a_file_cut_short_is_noticed(size: int, tmp_path: Path) -> None:
    path = made(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(TreeConfigError, match=r"corpus.tsx: (damaged|not a corpus index)"):
        open_corpus_index(path)


def test_a_longer_file_another_version_and_none_at_all_are_refused(tmp_path: Path) -> None:
    path = made(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 8)
    with pytest.raises(TreeConfigError, match="damaged: .* bytes instead of"):
        open_corpus_index(path)
    path.write_bytes(whole[:8] + struct.pack("<I", 2) + whole[12:])
    with pytest.raises(TreeConfigError, match="version 2, this release reads 1"):
        open_corpus_index(path)
    for missing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(TreeConfigError, match=f"corpus index {missing}: cannot be read: .*treespec index"):
            open_corpus_index(missing)


def test_another_vocabulary_or_tokenizer_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path)
    assert open_corpus_index(path, vocab_size=10, fingerprint="abc") is open_corpus_index(str(path))
    with pytest.raises(TreeConfigError, match="vocabulary of 10 ids, the model has 11; make it anew"):
        open_corpus_index(path, vocab_size=11)
    with pytest.raises(TreeConfigError, match="the tokenizer abc, this one is xyz"):
        open_corpus_index(path, fingerprint="xyz")
    unknown = made(tmp_path, fingerprint=None)
    assert open_corpus_index(unknown, fingerprint="xyz").fingerprint is None


def test_arguments_of_the_builder_are_checked(tmp_path: Path) -> None:
    with pytest.raises(TreeConfigError, match=r"text 1 has ids from 2 to 5: expected \[0, vocab_size=5"):
        build_corpus_index([[1, 2], [2, 5]], tmp_path / "c", vocab_size=5)
    for value in (0, 1025):
        with pytest.raises(TreeConfigError, match=f"max_match={value}: expected an integer in"):
            build_corpus_index([[1, 2]], tmp_path / "c", vocab_size=5, max_match=value)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr(module.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        build_corpus_index([[1, 2]], path, vocab_size=5)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def _read(path: str, queue: Any) -> None:
    index = open_corpus_index(path)
    queue.put([(m.length, dict(m.counts)) for m in index.matches([3, 2, 1])])


def test_readers_share_a_file_and_keep_it_while_it_is_replaced(tmp_path: Path) -> None:
    path = made(tmp_path)
    index = open_corpus_index(path)
    expected = [(m.length, dict(m.counts)) for m in index.matches([3, 2, 1])]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    readers = [context.Process(target=_read, args=(str(path), queue)) for _ in range(3)]
    for reader in readers:
        reader.start()
    assert [queue.get(timeout=60) for _ in readers] == [expected] * 3
    for reader in readers:
        reader.join()
    build_corpus_index([[3, 9] * 4], path, vocab_size=10)
    assert [(m.length, dict(m.counts)) for m in index.matches([3, 2, 1])] == expected
    assert [(m.length, dict(m.counts)) for m in open_corpus_index(path).matches([3])] == [(1, {9: 4})]


def test_a_fingerprint_is_of_ids_and_tokens() -> None:
    class Tokenizer:
        def __init__(self, **vocab: int) -> None:
            self.vocab = vocab

        def __len__(self) -> int:
            return len(self.vocab)

        def get_vocab(self) -> dict[str, int]:
            return self.vocab

    def fingerprint(**vocab: int) -> str:
        return tokenizer_fingerprint(Tokenizer(**vocab))  # type: ignore[arg-type]

    assert fingerprint(a=1, b=2) == fingerprint(b=2, a=1)
    assert len({fingerprint(a=1, b=2), fingerprint(a=2, b=1), fingerprint(a=1), fingerprint(a=1, c=2)}) == 4


@pytest.mark.parametrize("text", [[[1, 2], [3]], [[1, 2], [3, 4]], [1, 2.5], ["a"], [1, None], [True]])
def test_what_is_no_sequence_of_ids_is_named(tmp_path: Path, text: Any) -> None:
    with pytest.raises(TreeConfigError, match=r"text 1: expected a flat sequence of token ids, got \["):
        build_corpus_index([[1, 2], text], tmp_path / "c", vocab_size=9)
    assert not list(tmp_path.iterdir())


def test_an_index_is_readable_like_any_other_file(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    path = build_corpus_index([[1, 2]], tmp_path / "c", vocab_size=9)
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "other"]


class Vocabulary:
    """As much of a tokenizer as a fingerprint reads."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = list(tokens)
        self.asked = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def get_vocab(self) -> dict[str, int]:
        self.asked += 1
        return {token: place for place, token in enumerate(self.tokens)}


def test_a_fingerprint_is_made_once_and_anew_for_more_tokens() -> None:
    one, same, other = Vocabulary("a", "b"), Vocabulary("a", "b"), Vocabulary("b", "a")
    told = [tokenizer_fingerprint(t) for t in (one, one, same, other)]  # type: ignore[arg-type]
    assert len(set(told[:3])) == 1 and told[3] != told[0] and one.asked == 1
    one.tokens.append("c")
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(Vocabulary("a", "b", "c")) != told[0]  # type: ignore[arg-type]


def test_a_tokenizer_that_tells_no_vocabulary_is_named() -> None:
    with pytest.raises(TreeConfigError, match=r"tokenizer=object\(\.\.\.\): expected one of transformers"):
        tokenizer_fingerprint(object())  # type: ignore[arg-type]
