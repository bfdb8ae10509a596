"""Caches other than the default one, and caches that outlive the call: text and cache are those of plain decoding."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteria, cache_utils
from transformers.cache_utils import Cache, QuantizedCache, StaticCache

from hf_treespec import TreeConfig, UnsupportedCallError, _compat, enable
from hf_treespec.cache import layers as cache_layers
from sources import MAKERS, Source, drafting
from tiny import (
    WIDTH,
    assert_lively,
    assert_same_cache,
    build,
    cache_argument,
    draft,
    first_block,
    new_cache,
    perturbed,
    prompt,
    real_texts,
    reference,
    stock,
    treed,
    vocabulary,
)

SEED = 4
CONFIG = TreeConfig(max_nodes=16, max_depth=6, max_children=3, seed=SEED, fallback="off")
NEW = 20
ENDS = [5, 6, 7, 9, 14, 23, 31, 40, 52]
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 20}
# Windows longer than any text here: static layers of these never wrap.
ROOMY = {
    "mistral": (build("mistral", sliding_window=128), enable(build("mistral", sliding_window=128))),
    "gemma2": (build("gemma2", sliding_window=40), enable(build("gemma2", sliding_window=40))),
}
needs_fp8 = pytest.mark.skipif(not _compat.FP8_LAYERS, reason="this transformers has no fp8 cache")
batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])


def models(family: str) -> tuple[Any, Any]:
    """Plain and enabled model with equal weights."""
    return ROOMY[family] if family in ROOMY else (stock(family), treed(family))


def ours(
    family: str, ids: Tensor, mask: Tensor, truth: list[list[int]], maker: str, **call: Any
) -> tuple[Any, Source]:
    """The call with trees that partly know the text, and their source."""
    with drafting(Source(MAKERS[maker], seed=6, vocab=vocabulary(family), truth=truth)) as source:
        call = {"do_sample": False, "max_new_tokens": NEW, "tree_config": CONFIG, **call}
        return models(family)[1].generate(ids, attention_mask=mask, **call), source


def make(kind: str, family: str, size: int) -> Cache:
    """An empty cache as a user makes one."""
    config = models(family)[0].config
    if kind == "dynamic":
        return new_cache(models(family)[0])
    return StaticCache(config=config, max_cache_len=size) if kind == "static" else QuantizedCache("fp8", config)


def assert_same(expected: Cache, actual: Cache, mask: Tensor) -> None:
    """Same classes, attributes, lengths and contents; of a static layer what lies behind its length as well."""
    if type(expected) is not StaticCache and type(expected) is not QuantizedCache:
        assert_same_cache(expected, actual, mask)
        return
    assert type(actual) is type(expected) and len(actual.layers) == len(expected.layers)
    length = _compat.cache_length(expected)
    assert _compat.cache_length(actual) == length
    whole = torch.cat([mask, mask.new_ones(len(mask), max(0, length - mask.shape[1]))], 1)[:, :length].bool()
    for one, two in zip(expected.layers, actual.layers, strict=True):
        assert type(two) is type(one) and vars(two).keys() == vars(one).keys()
        for name, value in vars(one).items():
            if isinstance(value, int):
                assert getattr(two, name) == value, name
        if type(one) in _compat.FP8_LAYERS:
            for (k1, s1), (k2, s2) in (
                (one._quantized_keys, two._quantized_keys),
                (one._quantized_values, two._quantized_values),
            ):
                assert torch.equal(s1, s2) and k1.shape == k2.shape and k1.dtype == k2.dtype
                first, second = (k.float().transpose(1, 2)[whole] for k in (k1, k2))
                # A state on the edge between two steps of the format may fall to either side.
                assert (first != second).float().mean() < 1e-3
            continue
        assert int(two.cumulative_length) == int(one.cumulative_length)
        for name in ("keys", "values"):
            first, second = getattr(one, name).transpose(1, 2), getattr(two, name).transpose(1, 2)
            assert first.shape == second.shape
            assert (first[:, :length] - second[:, :length])[whole].abs().max() < 1e-4
            assert torch.equal(first[:, length:], second[:, length:]), "plain leaves nothing there"


# --- caches that generate() makes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "maker"),
    [("llama", "random_tree"), *((name, "half_right") for name in ("llama", "gpt2", "qwen3", "mistral", "gemma2"))],
)
@batches
@samplings
def test_static_cache_of_generate(family: str, batch: int, sampling: dict[str, Any], maker: str) -> None:
    plain, _ = models(family)
    ids, mask = prompt(family, batch, seed=5)
    call = {"cache_implementation": "static", "return_dict_in_generate": True, "eos_token_id": ENDS, **sampling}
    call["max_new_tokens"] = NEW
    expected = reference(plain, ids, mask, seed=SEED, **call)
    actual, _ = ours(family, ids, mask, real_texts(expected.sequences, mask), maker, **call)
    assert torch.equal(actual.sequences, expected.sequences)
    cache = _compat.cache_from_outputs(actual)
    assert type(cache) is StaticCache
    assert_same(_compat.cache_from_outputs(expected), cache, mask)
    # Another cache, the same text.
    call["cache_implementation"] = None
    assert torch.equal(reference(plain, ids, mask, seed=SEED, **call).sequences, actual.sequences)


@needs_fp8
@pytest.mark.parametrize(
    ("family", "maker"), [("llama", "random_tree"), ("llama", "half_right"), ("gpt2", "half_right")]
)
@batches
@samplings
def test_fp8_cache_of_generate(family: str, batch: int, sampling: dict[str, Any], maker: str) -> None:
    plain, _ = models(family)
    ids, mask = prompt(family, batch, seed=5)
    call = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}, "return_dict_in_generate": True}
    call |= {"eos_token_id": ENDS, "max_new_tokens": NEW, **sampling}
    expected = reference(plain, ids, mask, seed=SEED, **call)
    actual, _ = ours(family, ids, mask, real_texts(expected.sequences, mask), maker, **call)
    assert torch.equal(actual.sequences, expected.sequences)
    assert_same(_compat.cache_from_outputs(expected), _compat.cache_from_outputs(actual), mask)


@needs_fp8
def test_fp8_states_are_seen_rounded() -> None:
    """Else the test above would pass with a tree that attends to exact states."""
    ids, mask = prompt("llama", 1, seed=5)
    call: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    call |= {"output_logits": True}
    exact = reference(stock("llama"), ids, mask, **call)
    call |= {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    rounded = reference(stock("llama"), ids, mask, **call)
    actual, source = ours("llama", ids, mask, real_texts(rounded.sequences, mask), "chain", **call)
    assert max(len(paths[0]) for paths in source.paths) > 3
    far = max(float((one - two).abs().max()) for one, two in zip(exact.logits, rounded.logits, strict=True))
    near = max(float((one - two).abs().max()) for one, two in zip(actual.logits, rounded.logits, strict=True))
    assert near < 0.01 * far


@batches
@pytest.mark.parametrize("implementation", ["static", "quantized"])
def test_draft_model_beside_another_cache(batch: int, implementation: str) -> None:
    if implementation == "quantized" and not _compat.FP8_LAYERS:
        pytest.skip("this transformers has no fp8 cache")
    ids, mask = prompt("llama", batch, seed=5)
    call: dict[str, Any] = {"max_new_tokens": NEW, "cache_implementation": implementation, **SAMPLED}
    if implementation == "quantized":
        call["cache_config"] = {"backend": "fp8"}
    expected = reference(stock("llama"), ids, mask, seed=SEED, **call)
    for assistant in (draft("llama"), treed("llama")):
        actual = treed("llama").generate(
            ids, attention_mask=mask, assistant_model=assistant, tree_config=CONFIG, **call
        )
        assert torch.equal(actual, expected)
        assert treed("llama").treespec_stats.rounds < NEW - 1


def test_eager_attention_over_a_static_cache() -> None:
    plain, treed_model = build("llama", attention="eager"), enable(build("llama", attention="eager"))
    ids, mask = prompt("llama", 3, seed=5)
    call: dict[str, Any] = {"max_new_tokens": NEW, "cache_implementation": "static"}
    expected = reference(plain, ids, mask, **call)
    actual = treed_model.generate(
        ids, attention_mask=mask, assistant_model=perturbed(plain), tree_config=CONFIG, do_sample=False, **call
    )
    assert torch.equal(actual, expected)


class RoundingLayer(cache_utils.QuantizedLayer):
    """Quantizes as the layers of quanto and hqq do, by a rule of its own: steps of an eighth of the largest state."""

    def _quantize(self, tensor: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        step = tensor.abs().amax((0, 1, 3) if axis else -1, keepdim=True).clamp(min=1e-6) / 8
        return (tensor / step).round(), step

    def _dequantize(self, qtensor: tuple[Tensor, Tensor]) -> Tensor:
        return qtensor[0] * qtensor[1]


@pytest.mark.parametrize("residual", [1, 2, 5, 128])
@batches
@pytest.mark.parametrize("maker", ["half_right", "chain"])
def test_layers_that_quantize_in_groups(
    residual: int, batch: int, maker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cache_layers._KINDS, RoundingLayer, cache_layers.QUANTIZED)
    ids, mask = prompt("llama", batch, seed=5)
    call = {"max_new_tokens": NEW, "eos_token_id": ENDS, **(SAMPLED if batch > 1 else {})}
    exact = reference(stock("llama"), ids, mask, seed=SEED, **call)
    plain, cache = (
        Cache(layers=[RoundingLayer(axis_key=0, axis_value=1, residual_length=residual) for _ in range(2)])
        for _ in range(2)
    )
    expected = reference(stock("llama"), ids, mask, seed=SEED, **call, **cache_argument(plain))
    truth = real_texts(expected, mask)
    actual, source = ours("llama", ids, mask, truth, maker, **call, **cache_argument(cache))
    assert torch.equal(actual, expected)
    assert not torch.equal(expected, exact), "rounding must matter"
    assert _compat.cache_length(cache) == expected.shape[1] - 1
    for one, two in zip(plain.layers, cache.layers, strict=True):
        assert vars(two).keys() == vars(one).keys()
        assert two.keys.shape == one.keys.shape
        assert all(a.shape == b.shape for a, b in zip(one._quantized_keys, two._quantized_keys, strict=True))
        for name, states in zip(("keys", "values"), _compat.dequantized(two), strict=True):
            right = dict(zip(("keys", "values"), _compat.dequantized(one), strict=True))[name]
            real = torch.cat([mask, mask.new_ones(batch, states.shape[2] - WIDTH)], 1).bool()
            assert ((states - right).abs().amax((1, 3))[real] < 1e-4).float().mean() > 0.99
    if residual > 5 and maker == "chain" and batch == 1:
        assert max(len(paths[0]) for paths in source.paths) > 3
    assert max(tree.max_depth for trees in source.rounds for tree in trees) < residual


@pytest.mark.parametrize(
    ("package", "config"),
    [
        ("optimum.quanto", {"backend": "quanto", "q_group_size": 8, "residual_length": 6}),
        ("hqq", {"backend": "hqq", "q_group_size": 8, "residual_length": 6, "axis_key": 1, "axis_value": 1}),
    ],
)
@batches
def test_quantized_cache_of_another_package(package: str, config: dict[str, Any], batch: int) -> None:
    pytest.importorskip(package)
    ids, mask = prompt("llama", batch, seed=5)
    call = {"max_new_tokens": NEW, "cache_implementation": "quantized", "return_dict_in_generate": True}
    # Older versions take what they need out of the dict.
    expected = reference(stock("llama"), ids, mask, cache_config=dict(config), **call)
    truth = real_texts(expected.sequences, mask)
    actual, _ = ours("llama", ids, mask, truth, "half_right", cache_config=dict(config), **call)
    assert torch.equal(actual.sequences, expected.sequences)
    cache = _compat.cache_from_outputs(actual)
    assert {type(layer) for layer in cache.layers} <= set(_compat.GROUPED_LAYERS)
    assert _compat.cache_length(cache) == expected.sequences.shape[1] - 1


# --- room of a static cache ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", [0, 1, 5, 40])
@pytest.mark.parametrize("maker", ["chain", "wide"])
@batches
def test_trees_stay_within_a_static_cache(spare: int, maker: str, batch: int) -> None:
    ids, mask = prompt("llama", batch, seed=5)
    expected = reference(stock("llama"), ids, mask, max_new_tokens=NEW)
    size = WIDTH + NEW - 1 + spare
    cache = make("static", "llama", size)
    actual, source = ours(
        "llama", ids, mask, real_texts(expected, mask), maker, max_new_tokens=NEW, **cache_argument(cache)
    )
    assert torch.equal(actual, expected)
    length = WIDTH
    for trees, paths in zip(source.rounds, source.paths, strict=True):
        assert length + max(map(len, trees)) <= size
        length += len(paths[0])
    assert max(len(paths[0]) for paths in source.paths) > (3 if maker == "chain" else 1)
    assert max(map(len, source.rounds[0])) > 5, "a tree must be as large as the room allows"


def test_static_cache_that_is_smaller_than_the_limit_serves_until_it_is_full() -> None:
    ids, mask = prompt("llama", 1, seed=5)
    expected = reference(stock("llama"), ids, mask, max_new_tokens=NEW)
    assert_lively(expected)
    size = WIDTH + 7
    truth = real_texts(expected, mask)
    # Ends before the cache is full, as in plain decoding.
    end = int(expected[0, size])
    assert end not in expected[0, WIDTH:size]
    cache = make("static", "llama", size)
    actual, _ = ours("llama", ids, mask, truth, "half_right", eos_token_id=end, **cache_argument(cache))
    assert actual[0].tolist() == expected[0, : size + 1].tolist()
    # Does not end: fails as in plain decoding, behind what it had committed.
    for attempt in (stock("llama"), None):
        cache = make("static", "llama", size)
        with pytest.raises(IndexError, match="index_copy_"):
            if attempt is None:
                ours("llama", ids, mask, truth, "half_right", **cache_argument(cache))
            else:
                reference(attempt, ids, mask, max_new_tokens=NEW, **cache_argument(cache))
    assert _compat.cache_length(cache) == size
    right = make("static", "llama", size)
    reference(stock("llama"), expected[:, :size], torch.ones(1, size), max_new_tokens=1, **cache_argument(right))
    assert_same(right, cache, mask)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
@pytest.mark.parametrize("passed", [False, True], ids=["made", "passed"])
def test_static_window_that_would_wrap_is_refused(family: str, passed: bool) -> None:
    plain, model = ROOMY[family]
    size = int(plain.config.sliding_window)
    ids, mask = prompt(family, 1, width=24)
    fits = size + 1 - 24
    call: dict[str, Any] = {"attention_mask": mask, "tree_config": CONFIG, "do_sample": False}
    forwards: list[int] = []
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(1))

    def cache() -> dict[str, Any]:
        made = StaticCache(config=plain.config, max_cache_len=size + 20)
        return cache_argument(made) if passed else {"cache_implementation": "static"}

    try:
        message = rf"StaticSlidingWindowLayer hold {size} tokens and the call may write {size + 1}"
        with pytest.raises(UnsupportedCallError, match=message):
            model.generate(ids, max_new_tokens=fits + 1, **cache(), **call)
        assert not forwards
        actual = model.generate(ids, max_new_tokens=fits, **cache(), **call)
    finally:
        hook.remove()
    assert torch.equal(actual, reference(plain, ids, mask, max_new_tokens=fits))


def test_window_and_room_count_the_embeddings_of_a_prompt() -> None:
    plain, model = ROOMY["gemma2"]
    size, width = int(plain.config.sliding_window), 24
    ids, mask = prompt("gemma2", 1, width=width)
    embeds = plain.get_input_embeddings()(ids).detach()
    call: dict[str, Any] = {"inputs_embeds": embeds, "attention_mask": mask, "cache_implementation": "static"}
    call["do_sample"] = False
    fits = size + 1 - width
    with pytest.raises(UnsupportedCallError, match=f"the call may write {size + 1}"):
        model.generate(max_new_tokens=fits + 1, tree_config=CONFIG, **call)
    expected = plain.generate(max_new_tokens=fits, **call)
    truth = [[*ids[0].tolist(), *expected[0].tolist()]]
    with drafting(Source(MAKERS["chain"], vocab=vocabulary("gemma2"), truth=truth)):
        assert torch.equal(model.generate(max_new_tokens=fits, tree_config=CONFIG, **call), expected)


# --- a chat on one cache -------------------------------------------------------------------------------------------

KINDS = [
    ("dynamic", "llama"),
    ("static", "llama"),
    ("static", "gemma2"),
    pytest.param("fp8", "llama", marks=needs_fp8),
]
chats = pytest.mark.parametrize(("kind", "family"), KINDS)


@chats
@batches
@samplings
@pytest.mark.parametrize("whole", [True, False], ids=["whole_text", "new_tokens"])
def test_chat_goes_on(kind: str, family: str, batch: int, sampling: dict[str, Any], whole: bool) -> None:
    ids, mask = prompt(family, batch, seed=5, width=8)
    caches = [make(kind, family, 40) for _ in range(2)]
    for turn in range(3):
        past = _compat.cache_length(caches[0])
        passed = ids if whole else ids[:, past:]
        call = {"max_new_tokens": 7, "return_dict_in_generate": True, **sampling}
        expected = reference(models(family)[0], passed, mask, seed=SEED, **call, **cache_argument(caches[0]))
        text = expected.sequences if whole else torch.cat([ids[:, :past], expected.sequences], 1)
        truth = real_texts(text, mask)
        layers = list(caches[1].layers)
        actual, _ = ours(family, passed, mask, truth, "half_right", **call, **cache_argument(caches[1]))
        assert torch.equal(actual.sequences, expected.sequences)
        assert _compat.cache_from_outputs(actual) is caches[1]
        assert all(one is two for one, two in zip(layers, caches[1].layers, strict=True))
        assert _compat.cache_length(caches[1]) == text.shape[1] - 1
        assert_same(caches[0], caches[1], mask)
        says = torch.randint(3, 60, (batch, 3), generator=torch.Generator().manual_seed(turn))
        ids = torch.cat([text, says], 1)
        mask = torch.cat([mask, mask.new_ones(batch, ids.shape[1] - mask.shape[1])], 1)


@chats
@pytest.mark.parametrize("read", [8, 11])
def test_cache_that_holds_the_whole_prompt_is_refused(kind: str, family: str, read: int) -> None:
    plain, model = models(family)
    ids, mask = prompt(family, 1, seed=5)
    cache = make(kind, family, 40)
    out = reference(plain, ids, mask, max_new_tokens=1, **cache_argument(cache))
    before = _compat.cache_length(cache)
    # Plain decoding reads the last tokens once more and appends them: it is wrong without a word.
    with pytest.raises(UnsupportedCallError, match=rf"cache holds {before} tokens.*crop the cache"):
        model.generate(
            out[:, :read], attention_mask=mask[:, :read], max_new_tokens=4, tree_config=CONFIG, **cache_argument(cache)
        )
    assert _compat.cache_length(cache) == before


@chats
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.filterwarnings("ignore:.*past_key_values.*deprecated:FutureWarning")
def test_both_names_of_the_cache(kind: str, family: str, name: str) -> None:
    if name == "cache" and "cache" not in cache_argument(None):
        pytest.skip("this transformers knows the old name only")
    ids, mask = prompt(family, 1, seed=5)
    expected = reference(models(family)[0], ids, mask, max_new_tokens=NEW, **cache_argument(make(kind, family, 40)))
    cache = make(kind, family, 40)
    call = {"return_dict_in_generate": True, name: cache}
    actual, _ = ours(family, ids, mask, real_texts(expected, mask), "deep", **call)
    assert torch.equal(actual.sequences, expected)
    assert _compat.cache_from_outputs(actual) is cache
    assert _compat.cache_length(cache) == WIDTH + NEW - 1


# --- exceptions ----------------------------------------------------------------------------------------------------


class Burst(Exception):
    """Nothing else may come out of the call."""


class Fuse(StoppingCriteria):
    """Raises at its call number `at`."""

    def __init__(self, at: int) -> None:
        self.at = at

    def burn(self, *_: Any) -> None:
        self.at -= 1
        if self.at < 0:
            raise Burst

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.burn()
        return torch.zeros(len(input_ids), dtype=torch.bool)


@contextmanager
def fused(model: Any, where: str, at: int) -> Iterator[dict[str, Any]]:
    """Arguments and hooks with which a call bursts in a criterion, or in a forward when one layer has been updated."""
    if where == "criterion":
        yield {"stopping_criteria": [Fuse(at)]}
        return
    hook = first_block(model).register_forward_pre_hook(Fuse(at).burn)
    try:
        yield {}
    finally:
        hook.remove()


@chats
@batches
@pytest.mark.parametrize(("where", "at"), [("criterion", 5), ("forward", 0), ("forward", 2)])
@pytest.mark.parametrize("read", [0, 6])
def test_exception_leaves_a_prefix_to_go_on_from(
    kind: str, family: str, batch: int, where: str, at: int, read: int
) -> None:
    plain, model = models(family)
    ids, mask = prompt(family, batch, seed=5)
    right, cache = make(kind, family, 40), make(kind, family, 40)
    for started in (right, cache) if read else ():
        reference(plain, ids[:, :read], mask[:, :read], max_new_tokens=1, **cache_argument(started))
    text = reference(plain, ids, mask, max_new_tokens=NEW, **cache_argument(right))
    truth = real_texts(text, mask)
    with fused(model, where, at) as arguments, pytest.raises(Burst):
        ours(family, ids, mask, truth, "half_right", **arguments, **cache_argument(cache))
    length = _compat.cache_length(cache)
    assert length == read if (where, at) == ("forward", 0) else WIDTH <= length < text.shape[1]
    assert not any(callable(value) for layer in cache.layers for value in vars(layer).values())
    if kind == "static" and length:
        for layer in cache.layers:
            assert not layer.keys[:, :, length:].any() and not layer.values[:, :, length:].any()
    # The same call again, on what is left.
    known = text[:, : max(WIDTH, length + 1)]
    wide = torch.cat([mask, mask.new_ones(batch, known.shape[1] - WIDTH)], 1)
    rest = {"max_new_tokens": text.shape[1] - known.shape[1]}
    actual, _ = ours(family, known, wide, truth, "half_right", **rest, **cache_argument(cache))
    assert torch.equal(actual, text)
    assert_same(right, cache, mask)


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"cache_implementation": "offloaded"}, r"cache_implementation='offloaded'.*move between devices"),
        ({"cache_implementation": "offloaded_static"}, r"'offloaded_static'.*move between devices"),
        (
            lambda: cache_argument(Cache(layer_class_to_replicate=_compat.StaticSlidingWindowLayer)),
            "class StaticSlidingWindowLayer cannot take a tree",
        ),
    ],
)
def test_caches_that_are_refused(call: Any, message: str) -> None:
    ids, mask = prompt("llama", 1)
    forwards: list[int] = []
    hook = treed("llama").register_forward_pre_hook(lambda *_: forwards.append(1))
    before = sorted(vars(treed("llama")))
    try:
        with pytest.raises(UnsupportedCallError, match=f"(?s){message}"):
            treed("llama").generate(
                ids,
                attention_mask=mask,
                tree_config=CONFIG,
                max_new_tokens=4,
                **(call() if callable(call) else call),
            )
    finally:
        hook.remove()
    assert not forwards
    assert [name for name in sorted(vars(treed("llama"))) if name not in before] == []


def test_static_layers_that_the_model_never_fills() -> None:
    model = stock("llama")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers += 1
    config.layer_types = None
    ids, mask = prompt("llama", 1)
    call: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    texts = []
    for side, own in ((model, {}), (treed("llama"), {"tree_config": CONFIG})):
        cache = StaticCache(config=config, max_cache_len=64)
        texts.append(side.generate(ids, attention_mask=mask, **cache_argument(cache), **call, **own))
    assert torch.equal(*texts)
