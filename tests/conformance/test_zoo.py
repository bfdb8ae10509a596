"""The checks of model types can fail, and their models are such that they would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from conformance.zoo import checks, models
from conformance.zoo.caches import cache_difference
from conformance.zoo.weights import is_lively
from hf_treespec import Support, enable
from hf_treespec.engine import forward, loop
from hf_treespec.errors import UnsupportedModelError
from hf_treespec.routes import Route
from hf_treespec.twin import WINDOW, shrunk


def outputs(change: Callable[[DynamicCache], Any] = lambda cache: None) -> dict[str, Any]:
    cache = DynamicCache()
    for layer in range(2):
        generator = torch.Generator().manual_seed(layer)
        cache.update(*torch.randn(2, 3, 2, 7, 4, generator=generator), layer)
    change(cache)
    return {"cache": cache}


def swap(cache: DynamicCache) -> None:
    cache.layers[1].keys = cache.layers[1].keys[:, :, [0, 1, 2, 3, 5, 4, 6]]


def shorten(cache: DynamicCache) -> None:
    cache.layers[0].values = cache.layers[0].values[:, :, :-1]


def mark(cache: DynamicCache) -> None:
    cache.layers[0].left_behind = 1


def pad(cache: DynamicCache) -> None:
    cache.layers[0].keys[0, :, :2] = 9.0


def tremble(cache: DynamicCache) -> None:
    cache.layers[0].keys += 1e-6


MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swap, "layers.1.keys differs by"),
        (shorten, "layers.0.values: "),
        (mark, "['left_behind'] appeared"),
        (pad, ""),
        (tremble, ""),
    ],
)
def test_what_a_cache_may_differ_in(change: Callable[[DynamicCache], Any], said: str) -> None:
    found = cache_difference(outputs(), outputs(change), MASK)
    assert said in found and bool(said) == bool(found)


def test_a_missing_cache_differs() -> None:
    assert "only one output" in cache_difference(outputs(), {}, MASK)


def test_padding_of_other_rows_is_no_excuse() -> None:
    def change(cache: DynamicCache) -> None:
        cache.layers[0].keys[1, :, :2] = 9.0

    assert "layers.0.keys" in cache_difference(outputs(), outputs(change), MASK)


# Errors of the library that the checks must find, with the probe looking away.


def late_positions(last: Tensor, ahead: Tensor, depths: Tensor) -> Tensor:
    return last + (ahead + depths).to(last.dtype) + (depths > 1)


def test_a_position_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check("llama", whole=False).verdict == "equal"
    monkeypatch.setattr(forward, "node_positions", late_positions)
    found = checks.check("llama", whole=False)
    assert found.verdict == "wrong", found


def test_a_refusal_without_need_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "is_supported", lambda model: Support(False, Route.REFUSE, "by this test"))
    found = checks.check("llama", whole=False)
    assert (found.verdict, found.reason) == ("error", "not refused")


def test_a_draft_that_is_not_followed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shy(loop.RoundRunner):
        def _score_and_walk(self, trees: Any, *others: Any) -> Any:
            return super()._score_and_walk([type(tree).root_only(tree.tokens[0]) for tree in trees], *others)

    monkeypatch.setattr(loop, "RoundRunner", Shy)
    found = checks.check("llama", whole=False)
    assert found.verdict == "wrong" and "right tokens 0 were accepted" in found.reason, found


def test_windows_are_small_and_kinds_of_layers_are_kept() -> None:
    fields = {
        "num_hidden_layers": 40, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32,
        "sliding_window": None, "layer_types": ["a", "a", "b", "a"] * 10, "attention_dropout": 0.1,
        "some_config": {"vocab_size": 5000}, "eos_token_id": [1, 2],
    }  # fmt: skip
    small = shrunk(fields, {"some_config": {"vocab_size": 7}}, all_on=True)
    assert (small["sliding_window"], small["layer_types"], small["num_hidden_layers"]) == (WINDOW, ["a", "b"], 2)
    assert small["num_key_value_heads"] == small["num_attention_heads"] == 4
    assert (small["attention_dropout"], small["some_config"]["vocab_size"], small["eos_token_id"]) == (0.0, 7, None)


def test_text_that_hangs_on_the_last_token_alone_is_not_lively() -> None:
    model = models.build("llama")
    assert is_lively(model)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    assert not is_lively(model)


def test_enable_says_why_it_refuses() -> None:
    with pytest.raises(UnsupportedModelError, match="each of its steps reads 4 tokens at once"):
        enable(models.build("musicgen"))
