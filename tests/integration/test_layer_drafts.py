"""Drafts that are the target without some of its layers: same text and cache, no prefill, nothing left behind."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

import exact.small
import seq2seq
import slot_models
import tiny
from calls import GREEDY, SAMPLED, ids_of
from exact.small import VOCAB, goodness
from hf_treespec import TreeConfig, UnsupportedCallError, UnsupportedModelError, _compat, enable, find_layer_skip
from hf_treespec.api.layer_drafts import draft_layers, layers_of
from hf_treespec.attention import recorded_calls
from hf_treespec.draft import skippable, skipping
from tiny import (
    WIDTH,
    assert_lively,
    assert_same_cache,
    assert_same_text,
    cache_argument,
    fingerprint,
    new_cache,
    prompt,
    reference,
)

LAYERS, NEW = 4, 14
FAMILIES = (*tiny.FAMILIES, "mixtral")
OFF = TreeConfig(max_nodes=12, max_depth=4, max_children=3, fallback="off", seed=3)
CHAINS = OFF.replace(max_nodes=4, max_children=1)
batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])
# What a layer adds to the hidden states goes through these last.
_LAST = ("o_proj.weight", "down_proj", "c_proj.weight", "w2.weight", "dense.weight", "out_proj.weight", "fc2.weight")
_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")


def early(layer: int, config: TreeConfig = OFF) -> TreeConfig:
    return config.replace(draft="early_exit", draft_options={"early_exit": {"layer": layer}})


def without(*layers: int, config: TreeConfig = OFF) -> TreeConfig:
    return config.replace(draft="layer_skip", draft_options={"layer_skip": {"skip": list(layers)}})


def fainted(model: PreTrainedModel, numbers: tuple[int, ...] = (1, 2, 3), share: float = 0.25) -> PreTrainedModel:
    """Let some layers add little to the hidden states, so that a draft without them is right now and then."""
    layers = layers_of(model).layers(model, numbers)
    with torch.no_grad():
        for layer in layers:
            for name, parameter in layer.named_parameters():
                if type(model).__name__.startswith("Gemma2"):
                    # Its norms come last, and count from 1.
                    if name.endswith(_NORMS):
                        parameter.fill_(share - 1)
                elif any(last in name for last in _LAST):
                    parameter.mul_(share)
    return model


def build(family: str, **changes: Any) -> PreTrainedModel:
    if family == "mixtral":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            fields = {
                "vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4,
                "num_key_value_heads": 2, "num_local_experts": 4, "initializer_range": 0.6, "bos_token_id": 1,
                "eos_token_id": None, "pad_token_id": 0, "num_hidden_layers": LAYERS, **changes,
            }  # fmt: skip
            return fainted(MixtralForCausalLM(MixtralConfig(**fields)).eval())
    count = "n_layer" if family == "gpt2" else "num_hidden_layers"
    return fainted(tiny.build(family, **{count: LAYERS, **changes}))


stock, treed = tiny.shared(build)


def inputs(family: str, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return prompt("llama" if family == "mixtral" else family, batch, seed)


@functools.cache
def plain(family: str, batch: int, sampled: bool) -> Any:
    ids, mask = inputs(family, batch)
    sampling = SAMPLED if sampled else GREEDY
    out = reference(stock(family), ids, mask, seed=3, max_new_tokens=NEW, return_dict_in_generate=True, **sampling)
    assert_lively(out.sequences)
    return out


# --- the text and the cache of plain decoding ------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@batches
@samplings
def test_text_and_cache_are_those_of_plain_decoding(family: str, batch: int, sampling: dict[str, Any]) -> None:
    ids, mask = inputs(family, batch)
    expected, accepted, drafted = plain(family, batch, sampling["do_sample"]), 0, 0
    for config in (early(2), without(1, 3), without(0)):
        out = treed(family).generate(
            ids, attention_mask=mask, max_new_tokens=NEW, return_dict_in_generate=True, tree_config=config, **sampling
        )
        assert_same_text(expected.sequences, out.sequences)
        caches = [_compat.cache_from_outputs(one) for one in (expected, out)]
        assert_same_cache(*caches, mask)
        stats = treed(family).treespec_stats
        assert stats.draft == config.draft and set(stats.drafted_by_source) == {config.draft}
        accepted, drafted = accepted + stats.accepted_tokens, drafted + stats.row_rounds * config.max_depth
    # Right now and then.
    assert 0.05 * drafted < accepted < 0.95 * drafted


@pytest.mark.parametrize("family", FAMILIES)
@batches
@samplings
def test_all_layers_are_always_right(family: str, batch: int, sampling: dict[str, Any]) -> None:
    ids, mask = inputs(family, batch)
    out = treed(family).generate(
        ids, attention_mask=mask, max_new_tokens=NEW, tree_config=early(LAYERS, CHAINS), **sampling
    )
    assert_same_text(plain(family, batch, sampling["do_sample"]).sequences, out)
    stats = treed(family).treespec_stats
    assert stats.accepted_tokens == stats.drafted_nodes > 0
    assert stats.rounds == -(-(NEW - 1) // 5)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@batches
@samplings
def test_one_tree_with_sources_of_the_text(family: str, batch: int, sampling: dict[str, Any]) -> None:
    ids, mask = inputs(family, batch)
    expected = plain(family, batch, sampling["do_sample"])
    for config in (early(2), without(1, 3), early(2, OFF.replace(fallback="auto"))):
        own = str(config.draft)
        config = config.replace(draft=(own, "ngram", "recycle"))
        out = treed(family).generate(
            ids, attention_mask=mask, max_new_tokens=NEW, return_dict_in_generate=True, tree_config=config, **sampling
        )
        assert_same_text(expected.sequences, out.sequences)
        assert_same_cache(*[_compat.cache_from_outputs(one) for one in (expected, out)], mask)
        stats = treed(family).treespec_stats
        assert set(stats.drafted_by_source) <= {own, "ngram", "recycle"} and stats.drafted_by_source[own] > 0
        assert stats.draft_forward_seconds > 0


def test_a_joint_tree_of_what_is_always_right() -> None:
    ids, mask = inputs("llama", 1)
    config = early(LAYERS, CHAINS).replace(draft=("early_exit", "recycle"))
    treed("llama").generate(ids, attention_mask=mask, max_new_tokens=NEW, tree_config=config, **GREEDY)
    stats = treed("llama").treespec_stats
    assert stats.accepted_by_source["early_exit"] == stats.accepted_tokens > 0
    assert stats.rounds <= -(-(NEW - 1) // 5) + 2


@pytest.mark.parametrize("family", ["bart", "roformer", "bloom", "mpt"])
@batches
@samplings
def test_models_that_count_slots(family: str, batch: int, sampling: dict[str, Any]) -> None:
    model, bare = slot_pair(family)
    ids, mask = slot_models.prompt(batch)
    call = {"attention_mask": mask, "max_new_tokens": NEW, **sampling}
    expected = model.generate(ids, tree_config=OFF.replace(max_nodes=0), **call)
    if not sampling["do_sample"]:
        assert_same_text(bare.generate(ids, **call), expected)
    for config in (early(1), without(0), early(3, CHAINS)):
        assert_same_text(expected, model.generate(ids, tree_config=config, **call))
        stats = model.treespec_stats
        assert stats.drafted_nodes > 0
        if config == early(3, CHAINS) and batch == 1:
            assert stats.accepted_tokens == stats.drafted_nodes


@functools.cache
def slot_pair(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    names = {"roformer": ("num_hidden_layers",), "bloom": ("n_layer",), "mpt": ("n_layers",)}
    # The cache of a Bart decoder has as many layers as its config counts for an encoder.
    counts = dict.fromkeys(names.get(family, ("decoder_layers", "encoder_layers")), 3)
    made = [fainted(slot_models.build(family, **counts), (1, 2)) for _ in range(2)]
    return enable(made[0]), made[1]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@batches
def test_a_cache_that_goes_on(family: str, batch: int) -> None:
    """Two calls over a cache that was passed in, the second behind what the first has left."""
    ids, mask = inputs(family, batch)
    caches = [new_cache(stock(family)) for _ in range(2)]
    for config in (early(2), without(1, 3)):
        call = {"attention_mask": mask, "max_new_tokens": 7, "do_sample": False}
        expected = stock(family).generate(ids, **call, **cache_argument(caches[0]))
        out = treed(family).generate(ids, tree_config=config, **call, **cache_argument(caches[1]))
        assert_same_text(expected, out, width=ids.shape[1])
        assert_same_cache(*caches, mask)
        ids, mask = expected, torch.cat([mask, mask.new_ones(batch, 7)], 1)


@pytest.mark.parametrize("kind", ["static", "quantized"])
@batches
def test_caches_of_other_kinds(kind: str, batch: int) -> None:
    if kind == "quantized" and not (_compat.FP8_LAYERS or _has_quanto()):
        pytest.skip("no quantized cache in this environment")
    ids, mask = inputs("llama", batch)
    call: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": NEW, "return_dict_in_generate": True, **GREEDY}
    call["cache_implementation"] = kind
    if kind == "quantized":
        call["cache_config"] = {"backend": "fp8"} if _compat.FP8_LAYERS else {"backend": "quanto"}
    expected = stock("llama").generate(ids, **call)
    for config in (early(2), without(1, 3)):
        out = treed("llama").generate(ids, tree_config=config, **call)
        assert_same_text(expected.sequences, out.sequences)
        assert treed("llama").treespec_stats.accepted_tokens > 0
        if kind == "static":
            for one, two in zip(*(_compat.cache_from_outputs(o).layers for o in (expected, out)), strict=True):
                assert int(one.get_seq_length()) == int(two.get_seq_length())
                real = torch.cat([mask, mask.new_ones(batch, one.keys.shape[2] - WIDTH)], 1).bool()
                difference = (one.keys - two.keys).abs().amax((1, 3))[real]
                assert float(difference.max()) < 1e-4


def _has_quanto() -> bool:
    try:
        import optimum.quanto  # noqa: F401
    except ImportError:
        return False
    return True


@batches
@samplings
def test_ends_processors_and_the_fallback(batch: int, sampling: dict[str, Any]) -> None:
    ids, mask = inputs("llama", batch)
    call = {"attention_mask": mask, "max_new_tokens": 20, "eos_token_id": [5, 9, 14, 23, 40, 52], **sampling}
    for more in ({}, {"repetition_penalty": 1.3}):
        expected = treed("llama").generate(ids, tree_config=OFF.replace(max_nodes=0), **call, **more)
        for config in (early(2), without(1, 3).replace(fallback="auto"), early(1).replace(growth="dynamic")):
            assert_same_text(expected, treed("llama").generate(ids, tree_config=config, **call, **more))


def test_hidden_states_are_those_of_all_layers() -> None:
    ids, mask = inputs("llama", 3)
    call = {"attention_mask": mask, "max_new_tokens": 8, "return_dict_in_generate": True, "output_hidden_states": True}
    expected = stock("llama").generate(ids, do_sample=False, **call)
    out = treed("llama").generate(ids, do_sample=False, tree_config=without(1, 3), **call)
    assert_same_text(expected.sequences, out.sequences)
    assert len(out.hidden_states) == len(expected.hidden_states)
    real = mask.bool()
    for place, (one, two) in enumerate(zip(expected.hidden_states, out.hidden_states, strict=True)):
        assert len(one) == len(two) == LAYERS + 1
        for a, b in zip(one, two, strict=True):
            assert float((a - b)[real if not place else slice(None)].abs().max()) < 1e-3


def test_prompts_that_nobody_has_ids_of() -> None:
    ids, mask = inputs("llama", 3)
    embeds = stock("llama").get_input_embeddings()(ids).detach()
    call = {"inputs_embeds": embeds, "attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    expected = stock("llama").generate(**call)
    assert_same_text(expected, treed("llama").generate(tree_config=early(2), **call), width=0)
    assert treed("llama").treespec_stats.accepted_tokens > 0


# --- what the draft costs --------------------------------------------------------------------------------------------


@contextmanager
def widths(model: PreTrainedModel, number: int) -> Iterator[list[int]]:
    """Tokens that one layer's attention reads, forward by forward."""
    seen: list[int] = []
    inner = layers_of(model).layers(model, [number])[0].self_attn
    handle = inner.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(int((args[0] if args else kwargs["hidden_states"]).shape[1])),
        with_kwargs=True,
    )
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize(("config", "run", "skipped"), [(early(2), 0, 2), (without(1, 3), 2, 3), (without(0), 1, 0)])
def test_the_prompt_is_read_once_and_skipped_layers_do_not_run(config: TreeConfig, run: int, skipped: int) -> None:
    model = treed("llama")
    ids, _ = prompt("llama", 1, width=40)
    # The probes of model and layers come with a first call, and are none of the next.
    model.generate(ids, tree_config=config, max_new_tokens=2, do_sample=False)
    with widths(model, run) as kept, widths(model, skipped) as left_out:
        model.generate(ids, tree_config=config, max_new_tokens=NEW, do_sample=False)
    stats = model.treespec_stats
    # The target alone runs the skipped layer: the prefill and a tree a round.
    assert left_out[0] == 40 and len(left_out) == 1 + stats.rounds
    assert kept.count(40) == 1
    drafts = len(kept) - len(left_out)
    assert stats.rounds < drafts <= stats.rounds * config.max_depth
    # A round begins with the root alone, and the draft reads each node once.
    assert sum(kept) - sum(left_out) <= stats.rounds * (1 + config.max_nodes * config.max_depth)
    assert max(kept[1:]) <= 1 + config.max_nodes
    assert stats.draft_forward_seconds > 0


# --- nothing is left behind ------------------------------------------------------------------------------------------


class Fault(Exception):
    pass


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("number", [0, 2])
def test_after_an_exception_in_a_draft_forward(family: str, number: int) -> None:
    """Whichever forward fails: the model is as it was, and the cache holds a committed prefix to go on from."""
    model, (ids, mask) = enable(build(family)), inputs(family, 1)
    config = without(1, 3)
    model.generate(ids, tree_config=config, max_new_tokens=2, do_sample=False)
    layer = layers_of(model).layers(model, [number])[0]
    expected = stock(family).generate(ids, max_new_tokens=NEW, do_sample=False)
    before = fingerprint(model)
    for fatal in range(2, 9):
        calls = 0

        def fail(*_: Any, fatal: int = fatal) -> None:
            nonlocal calls
            calls += 1
            if calls == fatal:
                raise Fault

        cache = new_cache(model)
        handle = layer.mlp.register_forward_pre_hook(fail)
        try:
            with pytest.raises(Fault):
                model.generate(ids, tree_config=config, max_new_tokens=NEW, do_sample=False, **cache_argument(cache))
        finally:
            handle.remove()
        assert fingerprint(model) == before
        assert not any("forward" in vars(module) for module in model.modules())
        length = _compat.cache_length(cache)
        assert length >= WIDTH and len(set(map(id, cache.layers))) == LAYERS
        prefix = tiny.plain_cache(stock(family), expected, mask, length)
        cache._is_user_defined = True
        assert_same_cache(prefix, cache, mask)


def test_other_threads_and_the_target_run_all_layers() -> None:
    model, (ids, _) = stock("llama"), inputs("llama", 1)
    plan = layers_of(model)
    right = model(ids).logits
    seen: dict[str, Tensor] = {}
    with skippable(model, plan, [1, 3]):
        assert torch.equal(model(ids).logits, right)
        with skipping(plan.layers(model, [1, 3])):
            thread = threading.Thread(target=lambda: seen.update(there=model(ids).logits))
            thread.start()
            thread.join()
            seen["here"] = model(ids).logits
            with skippable(model, plan, [1]):
                assert torch.equal(model(ids).logits, seen["here"])
        assert torch.equal(model(ids).logits, right)
    assert torch.equal(seen["there"], right) and not torch.allclose(seen["here"], right)
    assert not any("forward" in vars(module) for module in model.modules())


def test_first_probes_do_not_touch_forwards_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour decodes on the same model while a call finds out about its layers."""
    model, (ids, _) = copy.deepcopy(stock("llama")), inputs("llama", 1)
    right = model(ids).logits
    wrong = []

    def neighbour() -> None:
        wrong.append(not torch.equal(model(ids).logits, right))

    layer = type(model.model.layers[2])
    own, here = layer.forward, threading.get_ident()

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here:
            thread = threading.Thread(target=neighbour)
            thread.start()
            thread.join()
        return own(self, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", forward)
    plan = layers_of(model)
    config = TreeConfig(draft="early_exit", draft_options={"early_exit": {"layer": 1}})
    assert draft_layers(model, config) == (plan, tuple(range(1, len(model.model.layers))))
    assert len(wrong) > 20 and not any(wrong)


def test_calls_of_modules_are_recorded_for_the_thread_that_asked() -> None:
    model, (ids, _) = stock("llama"), inputs("llama", 1)
    with recorded_calls(model, ids.shape[1]) as record:
        thread = threading.Thread(target=lambda: model(ids))
        thread.start()
        thread.join()
        assert not record.calls
        model(ids)
    assert [name for name, _, _ in record.calls].count("model.layers.0.mlp") == 1


def test_a_forward_on_the_instance_comes_back() -> None:
    """As accelerate puts one there."""
    model = build("llama")
    plan = layers_of(model)
    layer = plan.layers(model, [1])[0]
    calls: list[int] = []
    original = layer.forward

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    layer.forward = own  # type: ignore[method-assign]
    with skippable(model, plan, [1]):
        model(torch.tensor([[3, 4]]))
        assert calls == [1]
        with skipping([layer]):
            model(torch.tensor([[3, 4]]))
        assert calls == [1]
    assert vars(layer)["forward"] is own


# --- the law of sampled text -----------------------------------------------------------------------------------------


_SMALL = exact.small.small


@functools.cache
def lawful() -> PreTrainedModel:
    torch.manual_seed(4)
    config = copy.deepcopy(_SMALL().config)
    config.num_hidden_layers = 2
    return exact.small.LlamaForCausalLM(config).double().eval()


@pytest.mark.parametrize("rule", ["coupled", "rrs", "traversal", "block", "hybrid-joint"])
def test_three_tokens_follow_the_target(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact.small, "small", lawful)
    law = exact.small.exact_law.__wrapped__((("top_k", 0),))
    target = enable(lawful())
    config = without(0, config=exact.small.CONFIG.replace(verification=rule))
    out = target.generate(
        exact.small.PROMPT, do_sample=True, num_return_sequences=600, max_new_tokens=3, top_k=0, tree_config=config
    )
    text = out[:, exact.small.PROMPT.shape[1] :]
    cells = (text[:, 0] * VOCAB + text[:, 1]) * VOCAB + text[:, 2]
    assert goodness(torch.bincount(cells, minlength=VOCAB**3).double(), law.flatten()) > 1e-5
    stats = target.treespec_stats
    assert stats.verification == rule and stats.lossless and 0 < stats.accepted_tokens < 2 * 600
    if rule != "coupled":
        assert stats.expected_accepted == pytest.approx(stats.accepted_tokens, rel=4 / 600**0.5)


# --- what a call may ask for -----------------------------------------------------------------------------------------


def test_early_exit_as_transformers_spells_it() -> None:
    ids, mask = inputs("llama", 1)
    call = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    joint = OFF.replace(draft=("early_exit", "ngram"))
    out = treed("llama").generate(ids, assistant_early_exit=2, tree_config=joint, **call)
    assert_same_text(plain("llama", 1, False).sequences, ids_of(out))
    assert treed("llama").treespec_stats.drafted_by_source["early_exit"] > 0
    for config in (OFF, early(2), OFF.replace(draft="early_exit")):
        out = treed("llama").generate(ids, assistant_early_exit=2, tree_config=config, **call)
        assert_same_text(plain("llama", 1, False).sequences, ids_of(out))
        stats = treed("llama").treespec_stats
        assert stats.draft == "early_exit"
        treed("llama").generate(ids, tree_config=early(2), **call)
        assert treed("llama").treespec_stats.accepted_by_depth == stats.accepted_by_depth


CALLS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "no layer": (lambda: {"tree_config": OFF.replace(draft="early_exit")}, r"names no layers: set draft_options"),
    "no set": (lambda: {"tree_config": OFF.replace(draft="layer_skip")}, r"names no layers.*treespec skips"),
    "too late": (lambda: {"tree_config": early(5)}, r"'layer': 5.*has 4 layers; expected 1 to 4"),
    "too far": (lambda: {"tree_config": without(1, 4)}, r"'skip': \[1, 4\].*of the numbers 0 to 3"),
    "all": (lambda: {"tree_config": without(0, 1, 2, 3)}, r"expected some, not all, of the numbers 0 to 3"),
    "an assistant too": (
        lambda: {"tree_config": early(2), "assistant_model": tiny.draft("llama")},
        r"draft='early_exit'\) with an assistant_model",
    ),
    "an assistant and an exit": (
        lambda: {"assistant_early_exit": 2, "assistant_model": tiny.draft("llama")},
        r"draft='early_exit'\) with an assistant_model",
    ),
    "two layers": (lambda: {"tree_config": early(2), "assistant_early_exit": 3}, r"assistant_early_exit=3 with.*2"),
    "two drafts": (
        lambda: {"tree_config": OFF.replace(draft="ngram"), "assistant_early_exit": 2},
        r"assistant_early_exit=2 with TreeConfig\(draft='ngram'\)",
    ),
    "no layer of two": (
        lambda: {"tree_config": OFF.replace(draft=("layer_skip", "ngram"))},
        r"draft=\('layer_skip', 'ngram'\)\) names no layers: set draft_options=\{'layer_skip'",
    ),
    "independent draws": (
        lambda: {
            "tree_config": early(2).replace(draft=("early_exit", "ngram"), verification="rrs"),
            "do_sample": True,
        },
        r"nodes of a joint tree are not drawn from one law",
    ),
    "no number": (lambda: {"assistant_early_exit": 0}, r"assistant_early_exit=0: expected"),
    "ranks": (lambda: {"tree_config": early(2), "synced_gpus": True}, r"synced_gpus=True"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_refused(name: str) -> None:
    arguments, message = CALLS[name]
    model, (ids, mask) = treed("llama"), inputs("llama", 1)
    # Its probes have their forwards before.
    draft_layers(model, early(2))
    calls: list[int] = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    call = {"tree_config": OFF, "max_new_tokens": 3, **arguments()}
    try:
        with pytest.raises(UnsupportedCallError, match=message):
            model.generate(ids, attention_mask=mask, **call)
    finally:
        handle.remove()
    assert not calls


def test_ranks_are_refused_by_what_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "has_process_group", lambda: True)
    with pytest.raises(UnsupportedCallError, match=r"synced_gpus=True with TreeConfig\(draft='early_exit'\)"):
        treed("llama").generate(inputs("llama", 1)[0], tree_config=early(2), synced_gpus=True, max_new_tokens=3)


def test_models_that_take_no_mask_are_refused() -> None:
    with pytest.raises(UnsupportedCallError, match=r"draft='early_exit'\): Bart.* takes no tree mask"):
        seq2seq.treed("bart").generate(**seq2seq.source_text(1), tree_config=early(1), max_new_tokens=3)


def linked(writer: int, reader: int) -> PreTrainedModel:
    """A model in which a layer reads what an earlier one has left beside the hidden states."""
    model = build("llama")
    layers: Any = layers_of(model).layers(model, range(LAYERS))
    note: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        note["last"] = output

    def use(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + note["last"] if note["last"].shape == output.shape else output

    layers[writer].mlp.register_forward_hook(keep)
    layers[reader].mlp.register_forward_hook(use)
    return enable(model)


def test_layers_that_others_rely_on_cannot_be_skipped() -> None:
    model, (ids, mask) = linked(1, 2), inputs("llama", 1)
    call = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    with pytest.raises(UnsupportedModelError, match="something else than hidden states goes from one layer"):
        model.generate(ids, tree_config=without(1), **call)
    # A prefix holds both or none.
    expected = model.generate(ids, tree_config=OFF.replace(max_nodes=0), **call)
    for layer in (1, 3):
        assert_same_text(expected, model.generate(ids, tree_config=early(layer), **call))


def test_layers_that_form_no_chain() -> None:
    model = enable(tiny.build("llama"))
    layers: Any = model.model.layers
    layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 1.0, *args[1:]))
    with pytest.raises(UnsupportedModelError, match="given something else than what the layer before it returned"):
        model.generate(inputs("llama", 1)[0], tree_config=early(1), max_new_tokens=3)


def test_compiled_parts_are_refused() -> None:
    model = enable(build("llama"))
    call = {"max_new_tokens": 3, "do_sample": False, "tree_config": early(2)}
    model.generate(inputs("llama", 1)[0], **call)
    model.model.layers[1].compile(backend="eager")
    with pytest.raises(UnsupportedModelError, match="parts of it are compiled"):
        model.generate(inputs("llama", 1)[0], **call)


# --- a set that is found ---------------------------------------------------------------------------------------------


def test_the_search_finds_the_layers_that_say_nothing() -> None:
    """Of six layers two add hardly anything: a draft without them is right, and costs a third less."""
    model = fainted(tiny.build("llama", num_hidden_layers=6), (1, 4), 1e-4)
    prompts = [dict(zip(("input_ids", "attention_mask"), prompt("llama", 1), strict=True))]
    tried: list[Any] = []
    search = {"max_new_tokens": 10, "tree_config": OFF, "seed": 1}
    found = find_layer_skip(model, prompts, report=tried.append, trials=30, **search)
    assert {1, 4} <= set(found.skip) and found.layers == 6
    assert found.gain == max(one.gain for one in tried) > 1.15
    # It ends early if all sets near the best one have been tried.
    assert 8 < len(tried) == len({one.skip for one in tried}) <= 30
    assert not hasattr(model, "treespec_stats") and type(model) is type(tiny.stock("llama"))
    again: list[Any] = []
    find_layer_skip(model, prompts, report=again.append, trials=4, **search)
    assert again == tried[:4]
    text = enable(model).generate(**prompts[0], tree_config=found.config, max_new_tokens=12, do_sample=False)
    assert model.treespec_stats.draft == "layer_skip"
    assert_same_text(model.generate(**prompts[0], max_new_tokens=12, do_sample=False), text)


@pytest.mark.parametrize("bad", [{"trials": 0}, {"prompts": []}])
def test_searches_that_cannot_begin(bad: dict[str, Any]) -> None:
    ids, mask = inputs("llama", 1)
    arguments = {"prompts": [{"input_ids": ids, "attention_mask": mask}], "trials": 1, **bad}
    with pytest.raises(ValueError, match="expected at least one of each"):
        find_layer_skip(treed("llama"), **arguments)
