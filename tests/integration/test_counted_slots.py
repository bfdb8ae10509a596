"""Models that count positions, or a bias by distance, in cache slots: whole calls, whichever of the two they count."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, StaticCache

import slot_models
import tiny
from calls import BUSHES, CHAINS_OF_4, GREEDY, SAMPLED, Pair, goes_on_behind_a_cache, twice
from hf_treespec import TreeConfig, _compat, enable, is_supported
from slot_models import ALIBI, POSITIONS, TABLE, VOCAB, prompt, stock, treed
from sources import MAKERS, Source, drafting
from tiny import WIDTH, assert_lively, assert_same_cache, cache_argument, fingerprint

FAMILIES = (*POSITIONS, *ALIBI)
families = pytest.mark.parametrize("family", FAMILIES)
# Falcon makes its bias from a mask of two axes, which a static cache does not give.
STATIC = ("bart", "roformer", "bloom", "mpt")
# One of each way to count.
kinds = pytest.mark.parametrize("family", ["bart", "roformer", "bloom", "mpt", "falcon"])
OFF = TreeConfig(fallback="off", seed=3, max_nodes=12, max_depth=4)
batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])


def both(family: str, batch: int, **arguments: Any) -> Pair:
    """`calls.twice` on a left-padded prompt, caches compared if the call returns them."""
    ids, mask = prompt(batch)
    pair = twice(ids, mask, **{"models": (stock(family), treed(family)), "max_new_tokens": 24, **arguments})
    if arguments.get("return_dict_in_generate"):
        caches = _compat.cache_from_outputs(pair.expected), _compat.cache_from_outputs(pair.actual)
        assert_same_cache(*caches, mask, tolerance=1e-4)
    return pair


@families
def test_the_route_is_found_from_the_model(family: str) -> None:
    support = is_supported(stock(family))
    assert support.route == ("mask+alibi" if family in ALIBI else "mask+positions")
    assert ("its bias by distance" if family in ALIBI else "embed_positions taken by depth") in support.reason


@families
@batches
@samplings
@pytest.mark.parametrize("maker", ["half_right", "wide"])
def test_equals_plain(family: str, batch: int, sampling: dict[str, Any], maker: str) -> None:
    pair = both(family, batch, maker=maker, return_dict_in_generate=True, **sampling)
    assert_lively(pair.expected.sequences)
    if maker == "wide":
        assert pair.stats.accepted_tokens > 0


@families
@batches
@samplings
def test_a_chain_that_is_right_is_accepted_whole(family: str, batch: int, sampling: dict[str, Any]) -> None:
    pair = both(family, batch, maker="chain", config=CHAINS_OF_4, max_new_tokens=21, **sampling)
    # One token of the prefill, then five a round.
    assert (pair.stats.rounds, pair.stats.accepted_tokens) == (4, 16 * batch)


@kinds
@batches
def test_hidden_states_and_scores(family: str, batch: int) -> None:
    wanted = {"output_hidden_states": True, "output_scores": True, "output_logits": True}
    pair = both(family, batch, maker="deep", return_dict_in_generate=True, max_new_tokens=12, **wanted)
    assert pair.stats.accepted_tokens > 0
    assert set(pair.actual) == set(pair.expected)
    for name in ("scores", "logits"):
        for one, two in zip(pair.expected[name], pair.actual[name], strict=True):
            torch.testing.assert_close(two, one, atol=1e-3, rtol=1e-4)
    for one, two in zip(pair.expected.hidden_states[1:], pair.actual.hidden_states[1:], strict=True):
        for layer_one, layer_two in zip(one, two, strict=True):
            torch.testing.assert_close(layer_two, layer_one, atol=1e-3, rtol=1e-4)


@kinds
@batches
def test_attentions(family: str, batch: int) -> None:
    models = [slot_models.build(family, attn_implementation="eager") for _ in range(2)]
    wanted = {"output_attentions": True, "return_dict_in_generate": True}
    pair = both(family, batch, models=(models[0], enable(models[1])), maker="deep", max_new_tokens=12, **wanted)
    assert pair.stats.accepted_tokens > 0
    for one, two in zip(pair.expected.attentions[1:], pair.actual.attentions[1:], strict=True):
        for layer_one, layer_two in zip(one, two, strict=True):
            torch.testing.assert_close(layer_two, layer_one, atol=1e-4, rtol=1e-4)


@kinds
@batches
def test_ended_rows_and_their_cache(family: str, batch: int) -> None:
    ids, mask = prompt(batch)
    text = stock(family).generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    for place in (0, 6):
        eos = int(text[0, WIDTH + place])
        both(family, batch, truth=text, eos_token_id=eos, return_dict_in_generate=True)


@families
@batches
@pytest.mark.parametrize("maker", ["half_right", "chain"])
def test_a_mask_of_the_callers_own(family: str, batch: int, maker: str) -> None:
    """Holes in the midst of a prompt: a bias counts the tokens before it, a position the slots."""
    ids, mask = prompt(batch)
    mask[:, 6] = 0
    mask[-1, 8:10] = 0
    pair = twice(ids, mask, models=(stock(family), treed(family)), maker=maker, max_new_tokens=16)
    if maker == "chain":
        assert pair.stats.rounds <= 4


@pytest.mark.parametrize("family", STATIC)
@batches
def test_static_caches_up_to_their_end(family: str, batch: int) -> None:
    pair = both(family, batch, maker="half_right", cache_implementation="static", max_new_tokens=20)
    assert pair.stats.accepted_tokens > 0


@pytest.mark.parametrize("family", ["bart", "marian", "roformer", "mpt"])
@batches
@pytest.mark.parametrize("maker", ["half_right", "wide"])
def test_up_to_the_end_of_the_table(family: str, batch: int, maker: str) -> None:
    # The budget allows more than the table: a tree must not look past its end, not even with a node beside the path.
    end = {"stopping_criteria": [lambda ids, scores: torch.full((batch,), ids.shape[1] > TABLE)]}
    pair = both(family, batch, maker=maker, max_new_tokens=2 * TABLE, **end)
    assert pair.actual.shape[1] == TABLE + 1
    with pytest.raises(IndexError if family != "mpt" else RuntimeError):
        stock(family).generate(prompt(batch)[0], attention_mask=prompt(batch)[1], max_new_tokens=TABLE)


@kinds
@batches
def test_a_passed_in_cache_goes_on(family: str, batch: int) -> None:
    goes_on_behind_a_cache((stock(family), treed(family)), *prompt(batch), assert_same_cache)


class Burst(Exception):
    pass


@kinds
@batches
def test_an_exception_leaves_a_committed_prefix_and_the_model(family: str, batch: int) -> None:
    model, cache = enable(slot_models.build(family)), DynamicCache(config=stock(family).config)
    ids, mask = prompt(batch)
    text = stock(family).generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    before, rounds = fingerprint(model), 0

    def burst(module: Any, args: Any, output: Any) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 4:
            raise Burst

    last = [module for name, module in model.named_modules() if re.search(r"(layers?|h|blocks)\.1$", name)]
    handle = last[-1].register_forward_hook(burst)
    source = Source(MAKERS["half_right"], vocab=VOCAB, truth=tiny.real_texts(text, mask))
    with drafting(source), pytest.raises(Burst):
        model.generate(
            ids, attention_mask=mask, tree_config=BUSHES, max_new_tokens=24, do_sample=False, **cache_argument(cache)
        )
    handle.remove()
    assert fingerprint(model) == before
    length = cache.get_seq_length()
    assert WIDTH <= length < text.shape[1] - 1
    # Not read anew: in transformers 5.17 RoFormer looks ahead in its prompt.
    wanted = stock(family).generate(
        ids, attention_mask=mask, max_new_tokens=length - WIDTH + 1, do_sample=False, return_dict_in_generate=True
    )
    assert_same_cache(_compat.cache_from_outputs(wanted), cache, mask)


@kinds
@batches
def test_guidance(family: str, batch: int) -> None:
    ids, _ = prompt(batch)
    both(family, batch, guidance_scale=1.7, negative_prompt_ids=ids.flip(0)[:, 3:], max_new_tokens=12)


@kinds
def test_rows_of_one_prompt(family: str) -> None:
    both(family, 3, num_return_sequences=2, maker="half_right", max_new_tokens=12, **SAMPLED)


@families
@batches
@samplings
def test_an_assistant_that_counts_slots_too(family: str, batch: int, sampling: dict[str, Any]) -> None:
    ids, mask = prompt(batch)
    call = {"attention_mask": mask, "max_new_tokens": 21, **sampling}
    plain = tiny.reference(stock(family), ids, mask, seed=3, max_new_tokens=21, **sampling)
    model = treed(family)
    # The draft is the target: it is right wherever it reads what the target reads.
    actual = model.generate(ids, assistant_model=stock(family), tree_config=CHAINS_OF_4, **call)
    assert torch.equal(actual, plain)
    assert (model.treespec_stats.rounds, model.treespec_stats.accepted_tokens) == (4, 16 * batch)
    for growth in ("best_first", "dynamic"):
        actual = model.generate(ids, assistant_model=perturbed(family), tree_config=OFF.replace(growth=growth), **call)
        assert torch.equal(actual, plain)
        assert model.treespec_stats.accepted_tokens > 0


@functools.cache
def perturbed(family: str) -> Any:
    return tiny.perturbed(stock(family), 0.01)


@pytest.mark.parametrize("family", ["bart", "roformer", "mpt"])
@batches
def test_an_assistant_up_to_the_end_of_its_table(family: str, batch: int) -> None:
    """A target whose texts may be longer."""
    target = "bloom"
    ids, mask = prompt(batch)
    call = {"attention_mask": mask, "max_new_tokens": TABLE, "do_sample": False}
    plain = stock(target).generate(ids, **call)
    bushes = OFF.replace(max_nodes=12, max_depth=4)
    assert torch.equal(treed(target).generate(ids, assistant_model=stock(family), tree_config=bushes, **call), plain)
    drafts = treed(target).treespec_stats
    assert 0 < drafts.plain_rounds < drafts.rounds


def test_an_assistant_of_another_route() -> None:
    ids, mask = prompt(1)
    call = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
    plain = tiny.stock("llama").generate(ids, **call)
    for family in ("bart", "falcon"):
        out = tiny.treed("llama").generate(ids, assistant_model=stock(family), tree_config=OFF, **call)
        assert torch.equal(out, plain)


@kinds
def test_without_trees(family: str) -> None:
    """Models leave no trace of a call: a plain one afterwards is plain."""
    model, (ids, mask) = treed(family), prompt(3)
    both(family, 3)
    plain: list[Tensor] = [m.generate(ids, attention_mask=mask, max_new_tokens=12) for m in (stock(family), model)]
    assert torch.equal(*plain)


@pytest.mark.parametrize("family", STATIC)
def test_a_static_cache_that_is_passed_in(family: str) -> None:
    both(
        family, 3, maker="half_right", max_new_tokens=20,
        fresh=lambda: cache_argument(StaticCache(config=stock(family).config, max_cache_len=40)),
    )  # fmt: skip
