"""Texts, hidden states and batches: the same whoever writes them, and however often it is stopped."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_treespec.cache import TreeCache
from hf_treespec.draft import Features
from hf_treespec.errors import TrainError
from hf_treespec.train import BrokenRunError, TextSettings, read_shards, read_texts, write_texts
from hf_treespec.train import features as features_module
from hf_treespec.train import texts as texts_module
from hf_treespec.train.batches import batches, share, stacked
from hf_treespec.train.features import Examples, write_features
from hf_treespec.train.fresh import frequent_ids
from hf_treespec.train.texts import Text, _Draw, count_units
from tiny import build

SETTINGS = TextSettings(new_tokens=7, batch=3, temperatures=(0.0, 1.0), seed=5)
PROMPTS = [[n % 90 + 1, *range(2, 2 + n % 4)] for n in range(20)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    made = build("llama")
    made.generation_config.eos_token_id = [5, 40, 41, 42]
    return made


def written(folder: Path, model: PreTrainedModel, *, world: int = 1, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for rank in range(world):
        write_texts(model, PROMPTS, folder, SETTINGS, rank=rank, world=world, **changes)
    return folder


def test_texts_are_those_of_generate(tmp_path: Path, model: PreTrainedModel) -> None:
    units = count_units(PROMPTS, SETTINGS)
    texts = read_texts(written(tmp_path / "one", model), units)
    assert sorted(text.prompt for text in texts) == sorted(map(tuple, PROMPTS)) and units == 7
    assert {text.temperature for text in texts} == {0.0, 1.0}
    greedy = next(text for text in texts if text.temperature == 0)
    ids = torch.tensor([greedy.prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, do_sample=False, pad_token_id=0)
    assert out[0, ids.shape[1] :].tolist() == list(greedy.new)
    # An end token ends a text, and is part of it.
    ended = [text for text in texts if len(text.new) < 7]
    assert ended and all(text.new[-1] in (5, 40, 41, 42) for text in ended)
    assert all(token not in (5, 40, 41, 42) for text in texts for token in text.new[:-1])


def test_tokens_are_drawn_by_their_law() -> None:
    draw = _Draw(0.5, seed=3)
    scores = torch.tensor([0.3, -math.inf, 1.0, -0.5, -math.inf]).expand(20_000, -1)
    left = draw(torch.zeros((len(scores), 1), dtype=torch.long), scores)
    assert (left.isfinite().sum(-1) == 1).all()
    found = left.argmax(-1).bincount(minlength=5)
    law = (scores[0] / 0.5).softmax(-1)
    assert found[law == 0].sum() == 0
    # Five standard errors of the most uncertain share.
    torch.testing.assert_close(found / len(scores), law, atol=5 * 0.5 / len(scores) ** 0.5, rtol=0.0)
    # Each step has draws of its own, the same ones for the same seed.
    again = _Draw(0.5, seed=3)
    ids = torch.zeros((len(scores), 1), dtype=torch.long)
    assert torch.equal(again(ids, scores), left) and not torch.equal(again(ids, scores), left)


@pytest.mark.parametrize("mark", [0.0, 1 - 2**-24])
def test_no_mark_draws_an_impossible_token(monkeypatch: pytest.MonkeyPatch, mark: float) -> None:
    monkeypatch.setattr(torch, "rand", lambda size, **_: torch.full(size, mark))
    scores = torch.tensor([[-math.inf, 0.1, 0.2, 0.3, -math.inf, -math.inf]])
    left = _Draw(1.0, seed=0)(torch.zeros((1, 1), dtype=torch.long), scores)
    assert left.argmax(-1).item() == (1 if mark == 0 else 3)


def test_texts_are_written_over_a_cache_in_place_where_the_model_can(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache,) = texts_module._cache(model).values()
    assert isinstance(cache, TreeCache)
    monkeypatch.setattr(model.generation_config, "cache_implementation", "static")
    assert texts_module._cache(model) == {}


@pytest.mark.parametrize("tokens", [None, 1, 50])
def test_two_processes_write_the_texts_of_one(tmp_path: Path, model: PreTrainedModel, tokens: int | None) -> None:
    units = count_units(PROMPTS, SETTINGS)
    one = read_texts(written(tmp_path / "one", model, tokens=tokens), units, tokens)
    two = read_texts(written(tmp_path / "two", model, world=2, tokens=tokens), units, tokens)
    assert one == two
    if tokens is not None:
        count = sum(len(text.new) for text in one)
        assert tokens <= count < tokens + 3 * 7 and len(one) < len(PROMPTS)
    # More are wanted later, by another number of processes: what is there stays, and is the beginning of the whole.
    for folder, world in (("one", 2), ("two", 1)):
        assert read_texts(written(tmp_path / folder, model, world=world), units)[: len(one)] == one


def test_a_cut_run_goes_on_and_a_gap_is_no_end(tmp_path: Path, model: PreTrainedModel) -> None:
    whole = read_texts(written(tmp_path / "one", model), 7)
    file = tmp_path / "one" / "shard-0000.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], *lines[3:5], lines[5][:30]]))
    with pytest.raises(BrokenRunError, match="unit 2 of 7 is missing"):
        read_texts(tmp_path / "one", 7)
    assert read_texts(written(tmp_path / "one", model), 7) == whole


def test_more_passes_add_texts(tmp_path: Path, model: PreTrainedModel) -> None:
    twice = TextSettings(new_tokens=3, batch=8, passes=2)
    once = TextSettings(new_tokens=3, batch=8)
    tmp_path.joinpath("a").mkdir()
    write_texts(model, PROMPTS, tmp_path / "a", twice)
    texts = read_texts(tmp_path / "a", count_units(PROMPTS, twice))
    assert len(texts) == 40 and sorted(text.prompt for text in texts[20:]) == sorted(map(tuple, PROMPTS))
    assert read_texts(tmp_path / "a", count_units(PROMPTS, once)) == texts[:20]
    assert list(read_shards(tmp_path / "a")) == [f"{n:06d}" for n in range(6)]


def test_what_makes_no_text_is_refused(tmp_path: Path, model: PreTrainedModel) -> None:
    with pytest.raises(TrainError, match="no tokens"):
        write_texts(model, [[1], []], tmp_path, SETTINGS)
    for wrong in ({"new_tokens": 0}, {"temperatures": ()}, {"temperatures": (-1.0,)}, {"passes": 0}):
        with pytest.raises(TrainError, match=next(iter(wrong))):
            TextSettings(**wrong)


TEXTS = [
    Text(tuple(range(1, 2 + n % 5)), tuple((7 * n + k) % 90 + 1 for k in range(1 + n % 9)), 0.0) for n in range(11)
]


def test_hidden_states_are_those_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    monkeypatch.setattr(features_module, "_TEXTS", 4)
    monkeypatch.setattr(features_module, "_FORWARD_TOKENS", 25)
    write_features(model, TEXTS, tmp_path, Features((0, 1), last=True))
    found = Examples(tmp_path, len(TEXTS))
    assert len(list(tmp_path.iterdir())) == 3 and len(found) == 11
    for index, text in enumerate(TEXTS):
        example = found[index]
        ids = [*text.prompt, *text.new]
        assert example.tokens_T.tolist() == ids and example.prompt == len(text.prompt)
        assert (found.length(index), found.new_tokens(index)) == (len(ids), len(text.new))
        with torch.no_grad():
            out = model(torch.tensor([ids]), output_hidden_states=True)
        wanted = torch.cat([out.hidden_states[0], out.hidden_states[1], out.hidden_states[-1]], dim=-1)[0]
        torch.testing.assert_close(example.features_TF.float(), wanted, rtol=1e-2, atol=1e-2)
        top, likely = out.logits[0].log_softmax(-1).topk(64)
        assert torch.equal(example.likely_TK[:, 0], likely[:, 0])
        torch.testing.assert_close(example.logp_TK, top, rtol=1e-3, atol=1e-2)


def test_parts_serve_runs_of_more_and_of_fewer_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    monkeypatch.setattr(features_module, "_TEXTS", 4)
    features = Features(last=True)

    def wrote(count: int, world: int = 1) -> list[int]:
        done: list[int] = []
        for rank in range(world):
            write_features(model, TEXTS[:count], tmp_path, features, rank=rank, world=world, report=done.append)
        return done

    assert wrote(6) == [4, 6]
    assert wrote(6) == [] and wrote(5) == [] and len(Examples(tmp_path, 5)) == 5
    assert wrote(11, world=2) == [11, 8]
    assert wrote(6) == []
    whole = Examples(tmp_path, 11)
    assert [whole[index].tokens_T.tolist() for index in range(11)] == [[*t.prompt, *t.new] for t in TEXTS]
    assert pickle.loads(pickle.dumps(whole))[3].tokens_T.tolist() == whole[3].tokens_T.tolist()
    # What is there is of other texts.
    write_features(model, TEXTS[1:5], tmp_path, features)
    assert Examples(tmp_path, 4)[0].tokens_T.tolist() == [*TEXTS[1].prompt, *TEXTS[1].new]
    with pytest.raises(TrainError, match="expected 4 parts"):
        Examples(tmp_path, 13)


def test_batches_hold_every_text_once(tmp_path: Path) -> None:
    write_features(build("llama"), TEXTS * 5, tmp_path, Features())
    examples = Examples(tmp_path, 55)
    found = batches(examples, 40, seed=1, epoch=2)
    assert sorted(index for batch in found for index in batch) == list(range(55))
    assert all(len(batch) * max(map(examples.length, batch)) <= 40 for batch in found)
    assert found == batches(examples, 40, seed=1, epoch=2) != batches(examples, 40, seed=1, epoch=3)
    assert all(len(batch) == 1 for batch in batches(examples, 1, seed=1, epoch=0))
    whole = max(found, key=len)
    parts = [share(examples, whole, rank, 2) for rank in range(2)]
    assert sum(int(part.new_BT.sum()) for part in parts) == int(stacked([examples[n] for n in whole]).new_BT.sum())
    nothing = share(examples, whole[:1], 1, 2)
    assert nothing.tokens_BT.numel() and not nothing.new_BT.any()


def test_frequent_ids_come_first() -> None:
    texts = [Text((9,), (4, 4, 4, 7, 2), 0.0), Text((9,), (7, 2), 0.0)]
    assert frequent_ids(texts, 3, 10) == [4, 2, 7]
    assert frequent_ids(texts, 5, 10) == [4, 2, 7, 0, 1]
    assert sorted(frequent_ids(texts, 99, 10)) == list(range(10))
