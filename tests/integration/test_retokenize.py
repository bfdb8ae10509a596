"""Drafts with a tokenizer of their own: the text is plain's, and what the draft guesses right is accepted."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from calls import GREEDY
from hf_treespec import TreeConfig, TreeSpecWarning, enable
from tiny import assert_same_text, reference
from tongues import TEXT, byte_level, encode, ids_of, reciter, sentence_piece, tiny_llama, words

SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0}
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t1"])
BUSHES = TreeConfig(max_nodes=20, max_depth=6, max_children=3, fallback="off", seed=3)
NEW = 24

TOKENIZERS = {
    "coarse": functools.partial(byte_level, 400),
    "fine": functools.partial(byte_level, 290),
    "marks": functools.partial(sentence_piece, 450),
    "words": words,
}
PAIRS = [
    ("coarse", "fine"),
    ("fine", "coarse"),
    ("coarse", "marks"),
    ("marks", "coarse"),
    ("fine", "words"),
    ("words", "fine"),
]
pairs = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["-".join(pair) for pair in PAIRS])


@functools.cache
def random_model(name: str) -> PreTrainedModel:
    return tiny_llama(len(TOKENIZERS[name]()), seed=len(name))


@functools.cache
def random_tree_model(name: str) -> PreTrainedModel:
    return enable(tiny_llama(len(TOKENIZERS[name]()), seed=len(name)))


def prompts(tokenizer: PreTrainedTokenizerFast, batch: int) -> tuple[Tensor, Tensor]:
    """Rows of unequal length out of the text, the first with a bos, left-padded."""
    rows = [[1, *encode(tokenizer, TEXT[:40])], encode(tokenizer, TEXT[7:20]), encode(tokenizer, TEXT[60:170])][:batch]
    width = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def names(ours: str, theirs: str) -> dict[str, Any]:
    return {"tokenizer": TOKENIZERS[ours](), "assistant_tokenizer": TOKENIZERS[theirs]()}


# --- the text --------------------------------------------------------------------------------------------------------


@pairs
@samplings
@pytest.mark.parametrize("batch", [1, 3])
def test_text_is_plain(ours: str, theirs: str, sampling: dict[str, Any], batch: int) -> None:
    # A random target writes bytes that are no characters, and special tokens in mid-text.
    ids, mask = prompts(TOKENIZERS[ours](), batch)
    call = {"max_new_tokens": NEW, **sampling}
    expected = reference(random_model(ours), ids, mask, seed=3, **call)
    model = random_tree_model(ours)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TreeSpecWarning)
        actual = model.generate(
            ids,
            attention_mask=mask,
            assistant_model=random_model(theirs),
            tree_config=BUSHES,
            **names(ours, theirs),
            **call,
        )
    assert_same_text(expected, actual, width=ids.shape[1])
    assert model.treespec_stats.draft == "retokenized"
    assert model.treespec_stats.drafted_nodes > 0


@pytest.mark.parametrize("growth", ["static", "best_first", "dynamic"])
@pytest.mark.parametrize("limits", [(1, 1, 1), (9, 9, 1), (40, 4, 12)])
def test_any_growth_and_size(growth: str, limits: tuple[int, int, int]) -> None:
    ids, mask = prompts(byte_level(400), 3)
    nodes, depth, children = limits
    config = BUSHES.replace(growth=growth, max_nodes=nodes, max_depth=depth, max_children=children)
    expected = reference(random_model("coarse"), ids, mask, max_new_tokens=NEW, eos_token_id=[7, 90, 91, 110])
    actual = random_tree_model("coarse").generate(
        ids,
        attention_mask=mask,
        assistant_model=random_model("marks"),
        tree_config=config,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=[7, 90, 91, 110],
        **names("coarse", "marks"),
    )
    assert_same_text(expected, actual, width=ids.shape[1])


# --- acceptance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "bar"),
    [("coarse", "fine", 2.0), ("fine", "coarse", 3.0), ("coarse", "marks", 1.8), ("marks", "coarse", 2.3)],
)
def test_what_the_draft_knows_is_accepted(ours: str, theirs: str, bar: float) -> None:
    one, two = TOKENIZERS[ours](), TOKENIZERS[theirs]()
    text = TEXT.split("caf")[0] if "marks" in (ours, theirs) else TEXT
    target, draft = reciter(one, text), reciter(two, text)
    ids = ids_of(one, text)[:, :12]
    new = ids_of(one, text).shape[1] - 12
    expected = reference(target, ids, torch.ones_like(ids), max_new_tokens=new)
    assert one.decode(expected[0]) == text
    config = BUSHES.replace(max_depth=8)
    call = {"assistant_model": draft, "tree_config": config, "max_new_tokens": new, "do_sample": False}
    actual = enable(target).generate(ids, **call, **names(ours, theirs))
    assert torch.equal(actual, expected)
    stats = target.treespec_stats
    assert stats.tokens_per_round >= bar, stats.to_dict()


def test_without_tokenizers_the_same_draft_is_of_no_use() -> None:
    one, two = byte_level(400), byte_level(290)
    target, draft = enable(reciter(one)), reciter(two)
    ids = ids_of(one, TEXT)[:, :12]
    with pytest.warns(TreeSpecWarning, match="vocabularies of 400 and 290 ids.*assistant_tokenizer"):
        target.generate(ids, assistant_model=draft, tree_config=BUSHES, max_new_tokens=40, do_sample=False)
    assert target.treespec_stats.tokens_per_round < 1.5


def test_the_draft_reads_a_bounded_number_of_tokens_a_round() -> None:
    one, two = byte_level(400), byte_level(290)
    target, draft = enable(reciter(one, TEXT * 6)), reciter(two, TEXT * 6)
    ids = ids_of(one, TEXT * 6)[:, :8]
    widths: list[int] = []
    hook = draft.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        target.generate(
            ids,
            assistant_model=draft,
            tree_config=BUSHES,
            max_new_tokens=160,
            do_sample=False,
            tokenizer=one,
            assistant_tokenizer=two,
        )
    finally:
        hook.remove()
    assert target.treespec_stats.new_tokens == 160
    assert max(widths) < 70, widths


def test_one_vocabulary_in_two_tokenizers_needs_no_translation() -> None:
    one = byte_level(400)
    ids, mask = prompts(one, 1)
    model = random_tree_model("coarse")
    call = {"max_new_tokens": 8, "do_sample": False, "tokenizer": one, "assistant_tokenizer": one}
    out = model.generate(ids, assistant_model=random_model("coarse"), tree_config=BUSHES, **call)
    assert torch.equal(out, reference(random_model("coarse"), ids, mask, max_new_tokens=8))
    assert model.treespec_stats.draft == "model"
    assert model.treespec_stats.acceptance_rate > 0.1
