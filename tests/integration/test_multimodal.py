"""Models that read pictures: the prefill sees them, the trees and a draft of text only never do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from calls import BUSHES, GREEDY, SAMPLED
from hf_treespec import Support, TreeConfig, UnsupportedCallError, _compat, disable, enable, is_supported
from inputs import compare
from tiny import assert_lively, assert_same_cache, cache_argument, draft, fingerprint
from vision import PICTURE, PLANES, READERS, build_cross_reader, build_reader, picture_prompt, pictures, readers

names = pytest.mark.parametrize("name", READERS)
batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])
NEW = 14
# Since 5.18 pictures are encoded before the prefill, which then gets what came out.
SENSES = {"pixel_values", "mm_encoder_outputs"}


@names
def test_the_probe_finds_the_language_model_inside(name: str) -> None:
    model = build_reader(name)
    before = fingerprint(model)
    assert is_supported(model) == Support(True, "mask", "a probe tree equals its paths")
    assert fingerprint(model) == before
    assert type(disable(enable(model))) is type(build_reader(name))


def test_a_cache_with_states_of_the_picture_is_refused() -> None:
    """Their length is that of the picture: no path of the text can be kept by it. A text alone fills no such layer."""
    model = enable(build_cross_reader())
    ids = torch.tensor([[3, 17, 5, 9, 12]])
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    forwards: list[int] = []
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    with pytest.raises(UnsupportedCallError, match=r"pixel_values with tree_config: layers \[1\] of .*Mllama"):
        model.generate(ids, pixel_values=torch.zeros(1, 1, 1, 3, 8, 8), tree_config=BUSHES, **call)
    cache = DynamicCache(config=model.config.get_text_config())
    cache.layers[1].update(*torch.zeros(2, 1, 2, 4, 16))
    with pytest.raises(UnsupportedCallError, match="a cache that has read them"):
        model.generate(ids, tree_config=BUSHES, **call, **cache_argument(cache))
    assert not forwards
    hook.remove()
    plain = disable(model).generate(ids, **call)
    assert torch.equal(enable(model).generate(ids, tree_config=BUSHES, **call), plain)


@names
@batches
@samplings
def test_text_behind_a_picture(name: str, batch: int, sampling: dict[str, Any]) -> None:
    call = picture_prompt(name, batch)
    mask = call["attention_mask"]
    wanted = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True, **sampling}
    pair = compare(readers(name), mask, **call, **wanted)
    if not sampling["do_sample"]:
        assert_lively(pair.actual.sequences, call["input_ids"].shape[1])
    assert pair.stats.accepted_tokens > 0 and pair.stats.rounds < NEW
    torch.testing.assert_close(
        torch.stack(pair.actual.scores), torch.stack(pair.expected.scores), atol=1e-3, rtol=1e-3
    )
    assert_same_cache(*(_compat.cache_from_outputs(out) for out in (pair.expected, pair.actual)), mask)
    other = compare(readers(name), mask, **{**call, **pictures(name, batch, seed=9)}, **wanted)
    assert not torch.equal(other.actual.sequences, pair.actual.sequences), "the picture must matter"


@names
@samplings
@pytest.mark.parametrize(("maker", "batch"), [("deep", 1), ("random_tree", 3)])
def test_text_alone(maker: str, name: str, batch: int, sampling: dict[str, Any]) -> None:
    call = picture_prompt(name, batch)
    ids, mask = call["input_ids"], call["attention_mask"]
    ids = torch.where(ids == PICTURE, 17, ids)
    compare(readers(name), mask, maker=maker, input_ids=ids, attention_mask=mask, max_new_tokens=NEW, **sampling)


@contextmanager
def arguments(model: PreTrainedModel) -> Iterator[list[dict[str, Any]]]:
    """Keyword arguments of every forward of the model that are not None."""
    seen: list[dict[str, Any]] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append({k: v for k, v in kwargs.items() if v is not None}),
        with_kwargs=True,
    )
    try:
        yield seen
    finally:
        hook.remove()


@names
@batches
def test_pixels_go_to_the_prefill_only(name: str, batch: int) -> None:
    call = picture_prompt(name, batch)
    helper = draft("llama")
    with arguments(readers(name)[1]) as target, arguments(helper) as drafted:
        compare(readers(name), call["attention_mask"], maker=None, assistant_model=helper, max_new_tokens=NEW, **call)
    assert SENSES & set(target[0]) and len(target) > 1
    assert not any(SENSES & set(kwargs) for kwargs in target[1:])
    assert drafted
    known = {"input_ids", "attention_mask", "position_ids", "use_cache", "return_dict", "logits_to_keep"}
    for kwargs in drafted:
        assert set(kwargs) - {"cache", "past_key_values"} <= known
        assert all(value.dtype == torch.long for value in kwargs.values() if isinstance(value, Tensor))


@names
@samplings
@pytest.mark.parametrize(("kind", "batch"), [("ngram", 3), ("same_model", 1), ("same_model", 3)])
def test_the_own_drafts(kind: str, name: str, batch: int, sampling: dict[str, Any]) -> None:
    call = picture_prompt(name, batch)
    if kind != "ngram":
        call["assistant_model"] = readers(name)[1]
    pair = compare(readers(name), call["attention_mask"], maker=None, max_new_tokens=20, **call, **sampling)
    assert pair.stats.draft == ("ngram" if kind == "ngram" else "model")


@names
def test_several_texts_for_a_picture(name: str) -> None:
    call = picture_prompt(name, 3)
    real = call["attention_mask"].repeat_interleave(2, 0)
    call |= {"num_return_sequences": 2, "max_new_tokens": NEW, **SAMPLED}
    try:
        readers(name)[0].generate(**call)
    except RuntimeError as error:
        pytest.skip(f"plain decoding of this version fails: {error}")
    compare(readers(name), real, **call)


@names
@batches
@pytest.mark.parametrize("whole", [True, False], ids=["whole_text", "new_words"])
def test_the_talk_goes_on_behind_the_picture(name: str, batch: int, whole: bool) -> None:
    """The second call gets the cache of the first and no picture."""
    call = picture_prompt(name, batch)
    turns = []
    for model, extra in zip(readers(name), ({}, {"tree_config": BUSHES}), strict=True):
        cache = DynamicCache(config=model.config.get_text_config())
        first = model.generate(**call, max_new_tokens=6, do_sample=False, **cache_argument(cache), **extra)
        words = torch.full((batch, 3), 21) + torch.arange(3)
        text = torch.cat([first, words], 1)
        mask = torch.cat([call["attention_mask"], call["attention_mask"].new_ones(batch, 9)], 1)
        kept = _compat.cache_length(cache)
        ids = text if whole else text[:, kept:]
        second = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **cache_argument(cache), **extra
        )
        turns.append((first, second, cache, getattr(model.model, "rope_deltas", None)))
    (first1, second1, cache1, deltas1), (first2, second2, cache2, deltas2) = turns
    assert torch.equal(first1, first2) and torch.equal(second1, second2)
    assert_same_cache(cache1, cache2, call["attention_mask"])
    assert (deltas1 is None and deltas2 is None) or torch.equal(deltas1, deltas2)
    assert readers(name)[1].treespec_stats.rounds > 0


@pytest.mark.parametrize("name", PLANES)
@batches
@samplings
def test_nodes_stand_behind_the_last_position_of_every_plane(name: str, batch: int, sampling: dict[str, Any]) -> None:
    call = picture_prompt(name, batch)
    model = readers(name)[1]
    with arguments(model) as seen:
        compare(readers(name), call["attention_mask"], maker="deep", max_new_tokens=NEW, **call, **sampling)
    first = seen[0]["position_ids"]
    last = first[..., -1:]
    assert last.shape[0] > 1 and not torch.equal(last[0], last[-1]), "the picture must push the planes apart"
    tree = seen[1]["position_ids"]
    assert tree.shape[:2] == first.shape[:2] and tree.shape[2] > 1
    ahead = tree - last
    assert torch.equal(ahead, ahead[:1].expand_as(ahead)), "planes move on together"
    assert ahead[..., 0].eq(1).all() and ahead.max() > 2


@pytest.mark.parametrize("name", PLANES)
@batches
def test_planes_of_the_user(name: str, batch: int) -> None:
    call = picture_prompt(name, batch)
    ids, mask = torch.where(call["input_ids"] == PICTURE, 17, call["input_ids"]), call["attention_mask"]
    counted = (mask.cumsum(-1) - 1).clamp(min=0)
    planes = torch.stack([counted, counted * 2, counted + 7, counted // 2])
    call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": NEW}
    pair = compare(readers(name), mask, position_ids=planes, **call)
    assert pair.stats.accepted_tokens > 0
    assert not torch.equal(pair.actual, compare(readers(name), mask, **call).actual)


@names
@batches
@samplings
def test_guidance_beside_a_picture(name: str, batch: int, sampling: dict[str, Any]) -> None:
    """The unconditional stream sees no picture."""
    call = picture_prompt(name, batch)
    mask = call["attention_mask"]
    call |= {"guidance_scale": 1.6, "max_new_tokens": NEW, **sampling}
    if name in PLANES:
        # The model hangs on to the positions of the last prompt, so that plain decoding fails in the second stream.
        with pytest.raises((RuntimeError, ValueError)) as plain:
            readers(name)[0].generate(**call)
        with pytest.raises(plain.type, match=re.escape(str(plain.value))):
            readers(name)[1].generate(**call, tree_config=BUSHES)
        return
    with arguments(readers(name)[1]) as seen:
        pair = compare(readers(name), mask, negative_prompt_ids=torch.full((batch, 4), 9), **call)
    assert sum(bool(SENSES & set(kwargs)) for kwargs in seen) == 1
    assert len(seen) == 2 + 2 * pair.stats.rounds


@names
def test_the_tower_has_no_say_in_positions(name: str) -> None:
    """A table of positions in the vision tower is far shorter than a text."""
    call = picture_prompt(name, 1)
    pair = compare(readers(name), call["attention_mask"], maker="chain", max_new_tokens=NEW, **call)
    assert pair.stats.rounds <= -(-NEW // 7) + 1
    out = readers(name)[1].generate(**call, max_new_tokens=NEW, do_sample=False, tree_config=TreeConfig(max_nodes=0))
    assert torch.equal(out, pair.actual)
