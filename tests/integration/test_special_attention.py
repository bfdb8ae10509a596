"""Attention of a special kind: the text and the cache are plain decoding's, below and past what it leaves out."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import special
from calls import BUSHES, CHAINS_OF_4, GREEDY, SAMPLED, Pair, twice
from hf_treespec import _compat, enable, is_supported
from special import stock, treed
from tiny import WIDTH, assert_lively, prompt

MASKED = special.known((*special.INDEXED, "doge", "gemma2", "gemma3n_text", "gpt_oss", "llama4_text",
                        "modernbert-decoder"))  # fmt: skip
BY_PATHS = special.known(("gpt_neo", "minimax_m3_vl_text"))
batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])


def both(name: str, batch: int, *, width: int = WIDTH, **arguments: Any) -> Pair:
    """`calls.twice` on a left-padded prompt, caches compared too."""
    ids, mask = prompt("qwen3", batch, width=width)
    models = arguments.pop("models", None) or (stock(name), treed(name))
    more = {"max_new_tokens": 24, "return_dict_in_generate": True, **arguments}
    pair = twice(ids, mask, models=models, **more)
    assert_same_states(*(_compat.cache_from_outputs(out) for out in (pair.expected, pair.actual)), mask)
    return pair


def assert_same_states(expected: Any, actual: Any, mask: Tensor) -> None:
    """Every tensor of every layer, wherever the slot is no padding."""
    assert [type(layer) for layer in actual.layers] == [type(layer) for layer in expected.layers]
    length = _compat.cache_length(expected)
    real = torch.cat([mask, mask.new_ones(len(mask), length - mask.shape[1])], 1).bool()
    for one, two in zip(expected.layers, actual.layers, strict=True):
        assert vars(one).keys() == vars(two).keys()
        for name, right in vars(one).items():
            found = getattr(two, name)
            if not isinstance(right, Tensor) or right.dim() < 3:
                assert isinstance(right, Tensor) or found == right, name
                continue
            assert found.shape == right.shape, name
            held = real[:, length - right.shape[-2] :]
            lanes = [right, found] if right.dim() == 3 else [right.transpose(1, 2), found.transpose(1, 2)]
            torch.testing.assert_close(lanes[1][held], lanes[0][held], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*MASKED, *BY_PATHS])
def test_the_route_is_found_from_the_model(name: str) -> None:
    support = is_supported(stock(name))
    assert support.route == ("mask" if name in MASKED else "paths"), support.reason


@pytest.mark.parametrize("name", MASKED)
@batches
@samplings
def test_equals_plain(name: str, batch: int, sampling: dict[str, Any]) -> None:
    pair = both(name, batch, maker="half_right", **sampling)
    assert pair.stats.accepted_tokens > 0
    if sampling is SAMPLED:
        assert_lively(pair.expected.sequences)


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("maker", ["deep", "wide"])
def test_hostile_trees(name: str, maker: str) -> None:
    both(name, 3, maker=maker, **SAMPLED)


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("width", [3, 30])
def test_an_oracle_is_always_right(name: str, width: int) -> None:
    """A prompt below and one past the windows; 25 tokens take 5 rounds of 5 behind the first."""
    pair = both(name, 1, width=width, maker="chain", config=CHAINS_OF_4, max_new_tokens=26)
    if width + 26 <= special.FIELDS[name].get("keep_window_size", 1000):
        assert pair.stats.rounds == 5 and pair.stats.accepted_tokens == 20


@pytest.mark.parametrize("name", BY_PATHS)
@batches
@samplings
@pytest.mark.parametrize("maker", ["half_right", "wide"])
def test_structure_in_cache_slots_goes_by_paths(name: str, batch: int, sampling: dict[str, Any], maker: str) -> None:
    assert both(name, batch, maker=maker, **sampling).stats.accepted_tokens > 0


def test_a_tree_mask_would_be_wrong_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the window a probe passes, so that the config's word is needed."""
    monkeypatch.setattr("hf_treespec.api.support.own_structure", lambda config: {})
    model = special.build("gpt_neo", window_size=24)
    assert is_supported(model).route == "mask", "else this test is about nothing"
    models = special.build("gpt_neo", window_size=24), enable(model)
    with pytest.raises(AssertionError):
        for maker in ("half_right", "wide", "deep"):
            both("gpt_neo", 3, models=models, maker=maker, width=20, max_new_tokens=60, **SAMPLED)


def test_a_model_that_chooses_among_equals_reads_trees_in_short_texts_only() -> None:
    """Its first layer gives equal scores to equal tokens: which of them is left out hangs on the last bits."""
    models = special.build("doge", keep_window_size=30), enable(special.build("doge", keep_window_size=30))
    assert is_supported(models[1]).route == "mask"
    for batch, new, more in ((1, 19, {}), (3, 40, {}), (1, 20, {}), (1, 19, {"guidance_scale": 1.4})):
        pair = both("doge", batch, models=models, maker="half_right", max_new_tokens=new, **more)
        trees = any(len(tree) > 1 for row in pair.source.rounds for tree in row)
        assert trees == (new == 19 and not more)


@functools.cache
def static_pair(name: str) -> tuple[Any, Any]:
    return special.build(name), enable(special.build(name))


@pytest.mark.parametrize("name", special.known(("deepseek_v32", "glm_moe_dsa")))
@batches
@samplings
def test_a_static_cache_with_an_indexer(name: str, batch: int, sampling: dict[str, Any]) -> None:
    both(name, batch, models=static_pair(name), cache_implementation="static", disable_compile=True, **sampling)


@pytest.mark.parametrize("name", special.known(special.INDEXED))
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_indexer_sees_ancestors_only(name: str, attention: str) -> None:
    """Far more slots than keys are chosen, most of them beside the path."""
    if name == "hy_v4" and attention == "sdpa":
        pytest.skip("it has eager attention alone")
    models = special.build(name, attention=attention), enable(special.build(name, attention=attention))
    for topk in (2, 9):
        for model in models:
            for module in model.modules():
                if hasattr(module, "index_topk"):
                    module.index_topk = topk
        pair = both(name, 3, models=models, maker="deep", config=BUSHES, **SAMPLED)
        assert max(len(tree) for trees in pair.source.rounds for tree in trees) > 9


def test_a_long_reach_is_judged_by_the_words_of_the_config() -> None:
    support = is_supported(special.build("gpt_neo", window_size=64))
    assert support.route == "paths" and "its config names window_size=64" in support.reason
