"""Cache layers of classes that nobody has named: proven by a trial and a probe, or left to the path batch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer

import tiny
from calls import GREEDY, SAMPLED, twice
from hf_treespec import UnsupportedCallError, _compat, enable, is_supported
from hf_treespec.cache import layer_kind
from tiny import build, cache_argument, prompt

batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])


class RenamedLayer(DynamicLayer):
    """Nothing but another name."""


class CountedLayer(DynamicLayer):
    """A counter beside its states and a tensor that is written in place."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.reads = 0
        self.mass = torch.zeros(())

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.reads += key_states.shape[-2]
        self.mass.add_(key_states.abs().sum())
        return super().update(key_states, value_states)


class SmearingLayer(DynamicLayer):
    """Each key is mixed with the key of the slot before, which in a tree may be a sibling's."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states)
        before = torch.nn.functional.pad(keys, (0, 0, 1, 0))[:, :, :-1]
        return keys + 0.5 * before, values


class ForgetfulLayer(DynamicLayer):
    """Halves what it holds with every forward, however many tokens that has."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.is_initialized:
            self.values = self.values * 0.5
        return super().update(key_states, value_states)


CLASSES = {"renamed": RenamedLayer, "counted": CountedLayer, "smearing": SmearingLayer, "forgetful": ForgetfulLayer}


@pytest.fixture(autouse=True)
def known_to_transformers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, cls in CLASSES.items():
        monkeypatch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, name, cls)
    yield


def fresh(kind: str) -> Any:
    model = build("llama")
    model.config.layer_types = [kind, "full_attention"]
    return model


@functools.cache
def pair_of(kind: str) -> tuple[Any, Any]:
    return fresh(kind), enable(fresh(kind))


@pytest.mark.parametrize(("kind", "how"), [("renamed", "dense"), ("counted", "replayed")])
def test_they_are_proven(kind: str, how: str) -> None:
    assert is_supported(pair_of(kind)[0]) == (True, "mask", "a probe tree equals its paths")
    assert layer_kind(CLASSES[kind]()) == how


@pytest.mark.parametrize("kind", ["renamed", "counted"])
@batches
@samplings
@pytest.mark.parametrize("maker", ["half_right", "wide", "chain"])
def test_text_and_cache_are_plain(kind: str, batch: int, sampling: dict[str, Any], maker: str) -> None:
    ids, mask = prompt("llama", batch)
    models = pair_of(kind)
    pair = twice(ids, mask, models=models, maker=maker, max_new_tokens=24, return_dict_in_generate=True, **sampling)
    caches = [_compat.cache_from_outputs(out) for out in (pair.expected, pair.actual)]
    layers = [cache.layers[0] for cache in caches]
    assert type(layers[1]) is CLASSES[kind] and vars(layers[0]).keys() == vars(layers[1]).keys()
    if kind == "counted":
        assert layers[0].reads == layers[1].reads
        # Rows may have ended apart; the sum is over all of them.
        torch.testing.assert_close(layers[1].mass, layers[0].mass, rtol=1e-4, atol=1e-3)
    else:
        tiny.assert_same_cache(*caches, mask)


@batches
def test_a_passed_in_cache_goes_on(batch: int) -> None:
    ids, mask = prompt("llama", batch)
    models = pair_of("counted")
    ours, theirs = (DynamicCache(config=models[0].config) for _ in range(2))
    for _ in range(2):
        made = iter([theirs, ours])
        pair = twice(
            ids, mask, models=models, max_new_tokens=8, fresh=lambda made=made: cache_argument(next(made))
        )  # fmt: skip
        ids, mask = pair.expected, torch.cat([mask, mask.new_ones(batch, 8)], 1)
        assert ours.layers[0].reads == theirs.layers[0].reads == ids.shape[1] - 1


@batches
def test_a_layer_that_mixes_slots_is_read_path_by_path(batch: int) -> None:
    assert is_supported(fresh("smearing")).route == "paths"
    ids, mask = prompt("llama", batch)
    twice(ids, mask, models=pair_of("smearing"), max_new_tokens=24, **SAMPLED)


def test_a_layer_that_counts_forwards_is_refused() -> None:
    """How many tokens share a forward changes what it holds, so that no tree can give what plain decoding gives."""
    support = is_supported(fresh("forgetful"))
    assert support.route in ("refuse", "token-by-token") and "off by" in support.reason


def test_a_draft_whose_rows_cannot_part_is_refused() -> None:
    assistant = pair_of("counted")[0]
    assert is_supported(assistant).ok
    ids, mask = prompt("llama", 1)
    with pytest.raises(UnsupportedCallError, match="assistant_model .* class CountedLayer, whose rows"):
        tiny.treed("llama").generate(
            ids, attention_mask=mask, assistant_model=assistant, tree_config=tiny.TreeConfig(), max_new_tokens=4
        )


def test_a_class_that_failed_is_forgotten() -> None:
    is_supported(fresh("forgetful"))
    cache = DynamicCache(config=fresh("forgetful").config)
    with pytest.raises(UnsupportedCallError, match="class ForgetfulLayer cannot take a tree"):
        ids, mask = prompt("llama", 1)
        tiny.treed("llama").generate(
            ids, attention_mask=mask, tree_config=tiny.TreeConfig(), max_new_tokens=2, **cache_argument(cache)
        )
