"""Translating between two tokenizers, piece by piece: the mirrored text, and one tree of paths."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from hf_treespec.draft import DraftRow, RetokenizedDraft
from hf_treespec.draft.codec import TextCodec, shared_specials
from hf_treespec.draft.mirror import Mirror
from hf_treespec.tree import TokenTree, TreeLimits
from tongues import TEXT, byte_level, encode, sentence_piece, words

COARSE, FINE, MARKS = byte_level(400), byte_level(290), sentence_piece(370)
LOSSLESS = [(COARSE, FINE), (FINE, COARSE), (COARSE, MARKS), (MARKS, FINE), (FINE, FINE)]
lossless = pytest.mark.parametrize(("ours", "theirs"), LOSSLESS)
ROOM = TreeLimits(max_nodes=60, max_depth=50, max_children=5)


def mirror_of(ours: Any, theirs: Any) -> Mirror:
    one, two = TextCodec(ours), TextCodec(theirs)
    return Mirror(0, one, two, shared_specials(one, two))


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


# --- the mirrored text -----------------------------------------------------------------------------------------------


@lossless
@pytest.mark.parametrize("seed", range(3))
def test_mirror_holds_the_text_as_it_grows(ours: Any, theirs: Any, seed: int) -> None:
    rng = random.Random(seed)
    tokens = encode(ours, TEXT * 3)
    mirror = mirror_of(ours, theirs)
    end, settled, known = rng.randint(1, 60), [], ""
    while end < len(tokens):
        mirror.update(tokens[:end])
        # Bytes of an unfinished character are held back.
        text = text_of(ours, tokens[:end]).rstrip("\ufffd")
        # A missing byte makes some decoders give up the characters in front of it too.
        known = max(known, text, key=len)
        mirrored = text_of(theirs, mirror.row.tokens)
        assert mirrored.startswith(known) and text_of(ours, tokens).startswith(mirrored)
        assert len(mirrored) - len(known) < 3
        known = mirrored
        assert mirror.row.tokens[: len(settled)] == settled
        assert mirror.row.settled is not None and len(settled) <= mirror.row.settled < len(mirror.row.tokens)
        settled = mirror.row.tokens[: mirror.row.settled]
        end += rng.choice([1, 1, 2, 3, 7])
    # Nearly all of it is settled, and written as the tokenizer writes the whole text.
    assert len(mirror.row.tokens) - len(settled) < 40
    whole = encode(theirs, text_of(theirs, mirror.row.tokens))
    assert sum(a != b for a, b in zip(whole, mirror.row.tokens, strict=False)) < len(whole) // 4


def test_each_round_encodes_a_short_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    mirror = mirror_of(COARSE, FINE)
    tokens = encode(COARSE, TEXT * 5)
    mirror.update(tokens[:100])
    encoding, decoding = TextCodec._encode, TextCodec.decode

    def encode_and_count(self: TextCodec, texts: list[str]) -> list[list[int]]:
        asked.extend(len(text) for text in texts)
        return encoding(self, texts)

    def decode_and_count(self: TextCodec, pieces: Sequence[Sequence[int]]) -> list[str]:
        asked.extend(len(ids) for ids in pieces)
        return decoding(self, pieces)

    monkeypatch.setattr(TextCodec, "_encode", encode_and_count)
    monkeypatch.setattr(TextCodec, "decode", decode_and_count)
    for end in range(101, len(tokens)):
        mirror.update(tokens[:end])
    assert asked and max(asked) < 150


def test_a_tokenizer_that_loses_text_is_kept_up_with() -> None:
    mirror = mirror_of(FINE, words())
    tokens = encode(FINE, TEXT * 4)
    for end in range(1, len(tokens), 3):
        before = mirror.row.tokens[: mirror.row.settled]
        mirror.update(tokens[:end])
        assert mirror.row.tokens[: len(before)] == before
    assert len(mirror.row.tokens) > 100
    assert len(mirror.row.tokens) - (mirror.row.settled or 0) < 40


def test_special_tokens_are_carried_over_by_text_or_by_role_or_left_out() -> None:
    ours, theirs = byte_level.__wrapped__(300), byte_level.__wrapped__(340)
    ours.add_special_tokens({"additional_special_tokens": ["<user>", "<tool>"]})
    theirs.add_special_tokens({"additional_special_tokens": ["<user>"], "eos_token": "<end>"})
    user, tool = ours.convert_tokens_to_ids(["<user>", "<tool>"])
    one, two = TextCodec(ours), TextCodec(theirs)
    shared = shared_specials(one, two)
    assert shared[user] == theirs.convert_tokens_to_ids("<user>")
    assert tool not in shared
    assert shared[ours.eos_token_id] == theirs.convert_tokens_to_ids("</s>")
    assert shared_specials(two, one)[theirs.eos_token_id] == ours.eos_token_id
    mirror = Mirror(0, one, two, shared)
    text = [user, *encode(ours, "the river"), tool, *encode(ours, " bends"), ours.eos_token_id]
    for end in range(1, len(text) + 1):
        mirror.update(text[:end])
    assert text_of(theirs, mirror.row.tokens) == "<user>the river bends</s>"


def test_a_bos_is_put_in_front_once() -> None:
    theirs = byte_level.__wrapped__(300)
    from tokenizers.processors import TemplateProcessing

    theirs.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    for start in ([], [1]):
        mirror = mirror_of(COARSE, theirs)
        mirror.update([*start, *encode(COARSE, "the river")])
        assert text_of(theirs, mirror.row.tokens) == "<s>the river"


def test_text_of_nothing_but_unknown_specials_gives_no_tokens() -> None:
    ours = byte_level.__wrapped__(300)
    ours.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    mirror = mirror_of(ours, COARSE)
    mirror.update([ours.convert_tokens_to_ids("<tool>")])
    assert mirror.row.tokens == []


# --- one tree --------------------------------------------------------------------------------------------------------


class Scripted:
    """Stands for the draft model: proposes one tree of its own tokens."""

    forward_seconds = 0.0

    def __init__(self, tree: TokenTree, scores: list[float] | None = None) -> None:
        self.tree = tree
        self.scores = [scores or [-0.1 * depth for depth in tree.depths]]
        self.asked: list[TreeLimits] = []

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[TokenTree]:
        self.asked.extend(limits)
        return [self.tree]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self.paths = paths


def branches(theirs: Any, texts: Sequence[str], extra: Sequence[int] = ()) -> TokenTree:
    """A tree of the draft with one branch per text, behind a root that does not matter."""
    tokens, parents = [0], [-1]
    for text in texts:
        node = 0
        for token in [*encode(theirs, text), *extra]:
            same = [n for n in range(1, len(tokens)) if parents[n] == node and tokens[n] == token]
            if same:
                node = same[0]
                continue
            tokens.append(token)
            parents.append(node)
            node = len(tokens) - 1
    return TokenTree(tuple(tokens), tuple(parents))


def translate(
    ours: Any,
    theirs: Any,
    text: list[int],
    tree: TokenTree,
    *,
    limits: TreeLimits = ROOM,
    scores: list[float] | None = None,
    vocab: int = 10**6,
) -> TokenTree:
    draft: Any = Scripted(tree, scores)
    source = RetokenizedDraft(draft, ours, theirs, vocab_size=vocab)
    out = source.propose([DraftRow(index=0, tokens=text)], [limits])[0]
    assert out.tokens[0] == text[-1]
    assert out.drafted <= limits.max_nodes and out.max_depth <= limits.max_depth
    assert max(len(out.children(n)) for n in range(len(out))) <= limits.max_children
    return out


def paths_of(tree: TokenTree) -> list[list[int]]:
    return [tree.path_tokens(n)[1:] for n in range(1, len(tree)) if not tree.children(n)]


@lossless
def test_paths_are_written_as_the_target_writes_them(ours: Any, theirs: Any) -> None:
    whole = encode(ours, "the river bends where the old mill stands")
    checked = 0
    for cut in range(1, len(whole)):
        begun, rest = text_of(ours, whole[:cut]), text_of(ours, whole)[len(text_of(ours, whole[:cut])) :]
        before, both = encode(theirs, begun), encode(theirs, begun + rest)
        # Where a token of the draft lies across the cut, its path would not be the one it takes.
        if both[: len(before)] == before:
            tree = TokenTree.chain([before[-1], *both[len(before) :]])
            assert paths_of(translate(ours, theirs, whole[:cut], tree)) == [whole[cut:]]
            checked += 1
    assert checked >= 2


def test_common_beginnings_are_merged() -> None:
    tree = branches(FINE, [" where the old", " where the mill", " and"])
    text = encode(COARSE, "the river bends")
    out = translate(COARSE, FINE, text, tree)
    assert sorted(text_of(COARSE, path) for path in paths_of(out)) == [" and", " where the mill", " where the old"]
    assert len(out.children(0)) == 2
    assert len(out) < 1 + sum(len(path) for path in paths_of(out))


def test_a_word_begun_by_the_target_goes_on_where_it_stopped() -> None:
    # "the ri" in single letters: written together with what follows, other tokens would come out.
    text = [*encode(COARSE, "the"), *[encode(COARSE, c)[0] for c in ("r", "i")]]
    out = translate(COARSE, FINE, text, branches(FINE, ["ver bends"]))
    assert text_of(COARSE, paths_of(out)[0]) == "ver bends"


def test_a_character_begun_by_the_target_is_completed() -> None:
    bytes_of = encode(FINE, "\u65e5\u672c")
    assert len(bytes_of) == 6, "the test wants characters in pieces"
    text = [*encode(FINE, "the "), bytes_of[0]]
    theirs = byte_level(400)
    out = translate(FINE, theirs, text, branches(theirs, ["\u65e5\u672c", "mill", "\u672c"]))
    # Both characters begin with the byte that stands there, and "mill" does not.
    assert bytes_of[0] == bytes_of[3]
    assert sorted(paths_of(out)) == sorted([bytes_of[1:], bytes_of[4:]])


def test_bytes_without_an_end_are_not_proposed() -> None:
    pieces = encode(FINE, " mill \u65e5")
    for cut in (1, 2):
        tree = TokenTree.chain([0, *pieces[:-cut]])
        out = translate(COARSE, FINE, encode(COARSE, "the old"), tree)
        assert text_of(COARSE, paths_of(out)[0]).rstrip() == " mill"


def test_end_of_text_is_proposed_and_nothing_behind_it() -> None:
    tree = TokenTree.chain([0, *encode(FINE, " mill"), 2, *encode(FINE, " stands")])
    out = translate(COARSE, FINE, encode(COARSE, "the old"), tree)
    assert paths_of(out) == [[*encode(COARSE, " mill"), COARSE.eos_token_id]]


def test_specials_that_the_target_lacks_end_a_path() -> None:
    theirs = byte_level.__wrapped__(300)
    theirs.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    tree = TokenTree.chain([0, *encode(theirs, " mill"), theirs.convert_tokens_to_ids("<tool>"), 50])
    out = translate(COARSE, theirs, encode(COARSE, "the old"), tree)
    assert paths_of(out) == [encode(COARSE, " mill")]


def test_unknown_words_and_ids_end_a_path() -> None:
    ours = words()
    out = translate(ours, FINE, encode(ours, "river bends"), branches(FINE, [" old xyzzy mill"]))
    assert text_of(ours, paths_of(out)[0]) == "old"
    ids = encode(COARSE, " the river bends")
    assert max(ids) != ids[0]
    small = translate(COARSE, FINE, encode(COARSE, "where"), branches(FINE, [" the river bends"]), vocab=max(ids))
    assert paths_of(small)[0] == ids[: ids.index(max(ids))]


@pytest.mark.parametrize("limits", [(1, 9, 9), (3, 9, 9), (9, 1, 9), (9, 9, 1), (4, 2, 2)])
def test_the_best_nodes_are_kept_within_the_limits(limits: tuple[int, int, int]) -> None:
    nodes, depth, children = limits
    texts = [" where", " and", " the", " old mill stands"]
    tree = branches(FINE, texts)
    # The last branch is the best one.
    tops = tree.children(0)
    scores = [0.0] * len(tree)
    for node in range(1, len(tree)):
        top = tree.path_tokens(node)[1]
        branch = [tree.tokens[t] for t in tops].index(top)
        scores[node] = -1.0 * (len(tops) - branch) - 0.01 * tree.depths[node]
    room = TreeLimits(max_nodes=nodes, max_depth=depth, max_children=children)
    out = translate(COARSE, FINE, encode(COARSE, "river"), tree, limits=room, scores=scores)
    assert out.drafted >= min(nodes, depth, 3)
    assert encode(COARSE, " old mill stands")[0] in [out.tokens[n] for n in out.children(0)]


def test_rows_without_a_budget_ask_for_nothing() -> None:
    draft: Any = Scripted(TokenTree.root_only(7))
    source = RetokenizedDraft(draft, COARSE, FINE, vocab_size=400)
    out = source.propose([DraftRow(index=0, tokens=[9])], [TreeLimits(max_nodes=0, max_depth=0, max_children=1)])
    assert out == [TokenTree.root_only(9)]
    assert draft.asked[0].max_nodes == 0
    source.commit([[0]])
    assert draft.paths == [[0]]
