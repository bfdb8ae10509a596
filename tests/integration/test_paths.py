"""Trees read path by path: causal models that no position id can tell where a sibling stands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

import seq2seq
import tiny
from calls import BUSHES, GREEDY, SAMPLED, Pair, goes_on_behind_a_cache, twice
from hf_treespec import Support, TreeConfig, UnsupportedCallError, _compat, enable, is_supported
from hf_treespec.api import assistants, hooks
from hf_treespec.engine.paths import PathForward, plan_paths
from hf_treespec.routes import Route
from hf_treespec.tree import TokenTree
from seq2seq import ALIBI, VOCAB, stock, treed
from sources import MAKERS, Source, drafting
from tiny import WIDTH, assert_lively, assert_same_cache, cache_argument, draft, prompt

# They have a route of their own, which these tests shut.
families = pytest.mark.parametrize("family", ALIBI)
batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])
OFF = TreeConfig(fallback="off", seed=3)


@pytest.fixture(autouse=True)
def path_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the families down the route of path batches."""

    def answer(model: Any, *name: str) -> Support:
        forced = Support(True, Route.PATHS, "by this test")
        return forced if type(model).__name__.startswith(("Bloom", "Mpt", "Falcon")) else is_supported(model)

    monkeypatch.setattr(hooks, "is_supported", answer)
    monkeypatch.setattr(hooks, "require_support", answer)
    monkeypatch.setattr(hooks, "draft_support", answer)
    monkeypatch.setattr(assistants, "require_draft_support", answer)


def both(family: str, batch: int, **arguments: Any) -> Pair:
    """`calls.twice` on a left-padded prompt."""
    ids, mask = prompt("qwen3", batch)
    return twice(ids, mask, **{"models": (stock(family), treed(family)), "max_new_tokens": 24, **arguments})


def test_paths_of_trees_are_rows() -> None:
    #     7 -> 1 -> 2        5
    #       -> 3
    trees = [TokenTree((7, 1, 3, 2), (-1, 0, 0, 1)), TokenTree.root_only(5)]
    plan = plan_paths(trees)
    assert plan.tokens_PT.tolist() == [[7, 3, 7], [7, 1, 2], [5, 5, 5]]
    assert plan.sources == [0, 0, 1]
    logits = torch.arange(9.0).reshape(3, 3, 1)
    # The root is read off the first path through it; the second tree repeats its root.
    assert plan.logits_of_nodes(logits)[..., 0].tolist() == [[0.0, 4.0, 1.0, 5.0], [6.0] * 4]


@families
@batches
@samplings
@pytest.mark.parametrize("maker", ["half_right", "chain", "wide"])
def test_equals_plain(family: str, batch: int, sampling: dict[str, Any], maker: str) -> None:
    pair = both(family, batch, maker=maker, **sampling)
    assert_lively(pair.expected)
    if maker == "chain":
        assert pair.stats.accepted_tokens > 0


@batches
@pytest.mark.parametrize("maker", ["half_right", "deep"])
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt2"])
def test_windows_and_position_tables(monkeypatch: pytest.MonkeyPatch, family: str, batch: int, maker: str) -> None:
    """Models that would take a mask, sent down the other route."""
    monkeypatch.setattr(hooks, "is_supported", lambda model: Support(True, Route.PATHS, "by this test"))
    forwards = []
    monkeypatch.setattr(PathForward, "__init__", noted(PathForward.__init__, forwards))
    ids, mask = prompt(family, batch)
    pair = twice(ids, mask, family=family, maker=maker, max_new_tokens=20, return_dict_in_generate=True)
    assert forwards
    caches = _compat.cache_from_outputs(pair.expected), _compat.cache_from_outputs(pair.actual)
    assert_same_cache(*caches, mask)


def noted(function: Any, calls: list[Any]) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return function(*args, **kwargs)

    return wrapper


@families
@batches
@samplings
def test_outputs_and_the_returned_cache(family: str, batch: int, sampling: dict[str, Any]) -> None:
    more = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    pair = both(family, batch, repetition_penalty=1.2, **more, **sampling)
    assert set(pair.actual) == set(pair.expected)
    for name in ("scores", "logits"):
        for one, two in zip(pair.expected[name], pair.actual[name], strict=True):
            torch.testing.assert_close(two, one, atol=1e-3, rtol=1e-4)
    caches = _compat.cache_from_outputs(pair.expected), _compat.cache_from_outputs(pair.actual)
    assert_same_cache(*caches, prompt("qwen3", batch)[1])


@families
@batches
def test_ended_rows_and_their_cache(family: str, batch: int) -> None:
    ids, mask = prompt("qwen3", batch)
    text = stock(family).generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    for place in (0, 1, 6):
        eos = int(text[0, WIDTH + place])
        pair = both(family, batch, truth=text, eos_token_id=eos, return_dict_in_generate=True)
        caches = _compat.cache_from_outputs(pair.expected), _compat.cache_from_outputs(pair.actual)
        assert_same_cache(*caches, mask)


@families
@batches
def test_a_passed_in_cache_goes_on(family: str, batch: int) -> None:
    goes_on_behind_a_cache((stock(family), treed(family)), *prompt("qwen3", batch), assert_same_cache)


class Burst(Exception):
    pass


@families
@batches
@pytest.mark.parametrize("at", [0, 3])
def test_an_exception_leaves_a_committed_prefix(family: str, batch: int, at: int) -> None:
    model, cache = enable(seq2seq.build(family)), DynamicCache(config=stock(family).config)
    ids, mask = prompt("qwen3", batch)
    text = stock(family).generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    count = 0

    def burst(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > at:
            raise Burst

    last = [module for name, module in model.named_modules() if name.endswith(("h.1", "blocks.1"))]
    handle = last[0].register_forward_pre_hook(burst)
    source = Source(MAKERS["half_right"], vocab=VOCAB, truth=tiny.real_texts(text, mask))
    with drafting(source), pytest.raises(Burst):
        model.generate(
            ids, attention_mask=mask, tree_config=BUSHES, max_new_tokens=24, do_sample=False, **cache_argument(cache)
        )
    handle.remove()
    length = cache.get_seq_length()
    assert length == 0 if at == 0 else WIDTH <= length < text.shape[1] - 1
    if length:
        assert_same_cache(tiny.plain_cache(stock(family), text, mask, length), cache, mask)


@batches
@pytest.mark.parametrize("maker", ["half_right", "wide"])
def test_mpt_up_to_the_end_of_its_biases(batch: int, maker: str) -> None:
    limit = stock("mpt").config.max_seq_len
    # The budget allows more than the table: a tree must not look past its end.
    end = {"stopping_criteria": [lambda ids, scores: torch.full((batch,), ids.shape[1] > limit)]}
    pair = both("mpt", batch, maker=maker, max_new_tokens=2 * limit, **end)
    assert pair.actual.shape[1] == limit + 1


@batches
@samplings
def test_a_draft_model_with_masks_serves_a_target_without(batch: int, sampling: dict[str, Any]) -> None:
    ids, mask = prompt("qwen3", batch)
    call = {"attention_mask": mask, "max_new_tokens": 20, "assistant_model": draft("qwen3"), **sampling}
    plain = tiny.reference(stock("bloom"), ids, mask, seed=3, max_new_tokens=20, **sampling)
    assert torch.equal(treed("bloom").generate(ids, tree_config=OFF, **call), plain)


@families
@batches
def test_guidance(family: str, batch: int) -> None:
    ids, mask = prompt("qwen3", batch)
    more = {"guidance_scale": 1.7, "negative_prompt_ids": ids.flip(0)[:, 3:]}
    both(family, batch, maker="half_right", **more)


def test_an_assistant_without_masks_is_refused() -> None:
    ids, mask = prompt("qwen3", 1)
    with pytest.raises(UnsupportedCallError, match="assistant_model is a BloomForCausalLM, which takes no tree mask"):
        tiny.treed("qwen3").generate(ids, attention_mask=mask, tree_config=OFF, assistant_model=stock("bloom"))


def test_refusals() -> None:
    ids, mask = prompt("qwen3", 1)
    call = {"attention_mask": mask, "tree_config": OFF}
    with pytest.raises(UnsupportedCallError, match="output_hidden_states=True with tree_config"):
        treed("bloom").generate(ids, **call, output_hidden_states=True, return_dict_in_generate=True)
    pair = EncoderDecoderCache(*(DynamicCache(config=stock("bloom").config) for _ in range(2)))
    with pytest.raises(UnsupportedCallError, match="cache of type EncoderDecoderCache .* expected DynamicCache"):
        treed("bloom").generate(ids, **call, **cache_argument(pair))
    static = StaticCache(config=stock("bloom").config, max_cache_len=64)
    with pytest.raises(UnsupportedCallError, match="StaticCache .* BloomForCausalLM reads a tree path by path"):
        treed("bloom").generate(ids, **call, **cache_argument(static))
