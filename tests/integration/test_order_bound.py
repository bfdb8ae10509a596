"""Models whose state depends on the order of the tokens: recurrent, convolutional, of a kind of their own."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from calls import BUSHES, CHAINS_OF_4, GREEDY, SAMPLED, Pair, goes_on_behind_a_cache, twice
from conformance.zoo import build
from hf_treespec import TreeConfig, TreeSpecWarning, enable, is_supported
from hf_treespec.engine.stem import StemChoice
from hf_treespec.routes import Route
from ordered import ALONE, PATHS, STEPS, VOCAB, assert_same_state, prompt, returned, stock, treed
from sources import MAKERS, Source, drafting
from tiny import WIDTH, assert_lively, cache_argument, real_texts

pytestmark = pytest.mark.filterwarnings("ignore::hf_treespec.TreeSpecWarning")
batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])


def both(family: str, batch: int, **arguments: Any) -> Pair:
    """`calls.twice` on a left-padded prompt."""
    ids, mask = prompt(batch)
    models = stock(family), treed(family)
    return twice(ids, mask, **{"models": models, "max_new_tokens": 24, "pad_token_id": 0, **arguments})


@pytest.mark.parametrize(
    ("family", "route"),
    [
        *((family, Route.PATHS) for family in PATHS if family != "xlstm"),
        *((family, Route.OWN_STATE) for family in ("xlstm", "rwkv")),
        *((family, Route.STEPS) for family in STEPS),
    ],
)
def test_the_route_is_found_from_the_model(family: str, route: Route) -> None:
    support = is_supported(stock(family))
    assert support.route is route and support.ok, support.reason


@pytest.mark.parametrize("family", PATHS)
@batches
@samplings
@pytest.mark.parametrize("maker", ["half_right", "chain", "wide"])
def test_equals_plain(family: str, batch: int, sampling: dict[str, Any], maker: str) -> None:
    pair = both(family, batch, maker=maker, return_dict_in_generate=True, **sampling)
    assert_lively(pair.expected.sequences)
    assert pair.stats.accepted_tokens > 0
    assert_same_state(returned(pair.expected), returned(pair.actual), prompt(batch)[1])


@pytest.mark.parametrize("family", PATHS)
@pytest.mark.parametrize("maker", ["random_tree", "wrong_chain"])
def test_equals_plain_where_all_is_rejected(family: str, maker: str) -> None:
    pair = both(family, 1, maker=maker, return_dict_in_generate=True)
    assert_same_state(returned(pair.expected), returned(pair.actual), prompt(1)[1])


@pytest.mark.parametrize("family", ["lfm2_moe", "minimax", "xlstm"])
def test_an_oracle_is_believed(family: str) -> None:
    pair = both(family, 1, maker="chain", config=CHAINS_OF_4, max_new_tokens=26)
    # The prefill's token, then 5 a round.
    assert pair.stats.rounds == 5 and pair.stats.accepted_tokens == 20


@pytest.mark.parametrize("family", [*ALONE, *STEPS])
@batches
@samplings
def test_what_cannot_be_sooner_is_plain(family: str, batch: int, sampling: dict[str, Any]) -> None:
    pair = both(family, batch, return_dict_in_generate=True, **sampling)
    if family in ALONE and batch == 1:
        assert pair.stats.accepted_tokens > 0
    else:
        assert pair.stats.drafted_nodes == 0
        assert pair.stats.fallback_rounds == pair.stats.rounds == 23
    if family != "reformer":
        one, two = returned(pair.expected), returned(pair.actual)
        if one is not None:
            assert_same_state(one, two, prompt(batch)[1])


def test_plain_decoding_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_treespec._compat.warning._WARNED", set())
    ids, mask = prompt(1)
    call = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "tree_config": TreeConfig()}
    with pytest.warns(TreeSpecWarning, match="MambaForCausalLM reads one token a forward"):
        treed("mamba").generate(ids, **call)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TreeSpecWarning)
        treed("mamba").generate(ids, **call)


@pytest.mark.parametrize("family", ["lfm2_moe", "bamba", "qwen3_next"])
@batches
def test_a_passed_in_cache_goes_on(family: str, batch: int) -> None:
    goes_on_behind_a_cache((stock(family), treed(family)), *prompt(batch), assert_same_state, pad_token_id=0)


@pytest.mark.parametrize("family", ["lfm2_moe", "bamba", "xlstm"])
@batches
def test_ended_rows_and_their_state(family: str, batch: int) -> None:
    """A text that ends inside of a tree leaves tokens pending, which the returned state must have read."""
    ids, mask = prompt(batch)
    text = stock(family).generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)
    for place in (2, 6):
        eos = int(text[0, WIDTH + place])
        pair = both(family, batch, truth=text, eos_token_id=eos, return_dict_in_generate=True)
        assert_same_state(returned(pair.expected), returned(pair.actual), mask)


class Burst(Exception):
    pass


@pytest.mark.parametrize("family", ["lfm2_moe", "bamba"])
@batches
@pytest.mark.parametrize("at", [1, 7])
def test_an_exception_leaves_the_state_of_the_text(family: str, batch: int, at: int) -> None:
    """One from outside of the model: the cache holds all of the text but the last token, as after plain decoding."""
    ids, mask = prompt(batch)
    text = stock(family).generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)

    def burst(ids: Any, scores: Any) -> Any:
        if ids.shape[1] >= WIDTH + at:
            raise Burst
        return torch.zeros(batch, dtype=torch.bool)

    caches = []
    for model, config in ((stock(family), None), (treed(family), BUSHES)):
        cache = DynamicCache(config=stock(family).config)
        source = Source(MAKERS["half_right"], vocab=VOCAB, truth=real_texts(text, mask))
        more = {} if config is None else {"tree_config": config}
        with drafting(source), pytest.raises(Burst):
            model.generate(
                ids, attention_mask=mask, max_new_tokens=24, do_sample=False, stopping_criteria=[burst],
                pad_token_id=0, **more, **cache_argument(cache),
            )  # fmt: skip
        caches.append(cache)
    # Plain decoding has read up to the token before; a round gives all of its own back.
    assert caches[1].get_seq_length() <= caches[0].get_seq_length()
    length = caches[1].get_seq_length()
    assert length >= WIDTH
    whole = torch.cat([mask, mask.new_ones(batch, 24)], 1)
    again = DynamicCache(config=stock(family).config)
    stock(family).generate(
        text[:, :length], attention_mask=whole[:, :length], max_new_tokens=1, pad_token_id=0, **cache_argument(again)
    )
    assert_same_state(again, caches[1], mask)


def test_an_exception_in_a_forward_leaves_a_committed_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tokens stay pending, whatever the times of this machine say.
    monkeypatch.setattr(StemChoice, "pays", lambda *_, **__: False)
    model, cache = enable(build("lfm2_moe")), DynamicCache(config=stock("lfm2_moe").config)
    ids, mask = prompt(1)
    text = stock("lfm2_moe").generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    count = 0

    def burst(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > 4:
            raise Burst

    handle = model.model.layers[1].register_forward_pre_hook(burst)
    source = Source(MAKERS["half_right"], vocab=VOCAB, truth=real_texts(text, mask))
    with drafting(source), pytest.raises(Burst) as caught:
        model.generate(
            ids, attention_mask=mask, tree_config=BUSHES, max_new_tokens=24, do_sample=False, **cache_argument(cache)
        )
    handle.remove()
    length = cache.get_seq_length()
    again = DynamicCache(config=stock("lfm2_moe").config)
    stock("lfm2_moe").generate(text[:, :length], max_new_tokens=1, pad_token_id=0, **cache_argument(again))
    assert_same_state(again, cache, mask)
    assert WIDTH < length < text.shape[1] - 1
    # What had been accepted and not read yet could not be read afterwards either.
    assert "the cache lacks tokens that had been accepted: reading them raised Burst()" in caught.value.__notes__[0]


@pytest.mark.parametrize("family", ["xlstm", "recurrent_gemma", "rwkv", "lfm2_moe"])
def test_the_probe_leaves_the_model_alone(family: str) -> None:
    model = build(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = [dict(module.__dict__) for module in model.modules()]
    assert is_supported(model).ok
    if family != "rwkv":  # RWKV halves weights at its first forward, whoever makes it
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for module, attributes in zip(model.modules(), own, strict=True):
        changed = {key for key in module.__dict__ if module.__dict__[key] is not attributes.get(key)}
        assert not changed - {"layers_are_rescaled"}, (type(module), changed)
