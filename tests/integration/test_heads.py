"""Draft heads in whole calls: what they read of the target, the text of plain decoding, and who may use them."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel

import heads
import tiny
from calls import BUSHES, GREEDY, SAMPLED
from every_route import ROUTES, mask_inputs
from hf_treespec import TreeConfig, UnsupportedCallError, UnsupportedModelError, _compat, enable
from hf_treespec.api.heads import features_fault
from hf_treespec.draft import DraftRow, Features
from hf_treespec.engine import tapped
from hf_treespec.tree import TokenTree, TreeLimits
from sources import MAKERS, Source, drafting
from tiny import WIDTH, assert_same_text, cache_argument, new_cache, prompt, real_texts

batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])
kinds = pytest.mark.parametrize("kind", list(heads.MAKERS))
NEW = 16
# Wide enough that a random head is right now and then, and sometimes twice in a row.
WIDE = TreeConfig(max_nodes=40, max_depth=3, max_children=24, growth="static", fallback="off", seed=3)


# -- what is read --

THREE = Features((0, 1), True)


class Reading(Source):
    """A half-right source that keeps the hidden states it is given."""

    def __init__(self, features: Features, truth: Sequence[Sequence[int]], vocab: int, maker: str) -> None:
        super().__init__(MAKERS[maker], seed=1, vocab=vocab, truth=truth)
        self.features = features
        self.states: list[list[Tensor]] = []
        self.counts: list[list[int]] = []

    def read(self, states: Sequence[Tensor | None]) -> None:
        self.states = self.states or [[] for _ in states]
        for kept, state in zip(self.states, states, strict=True):
            if state is not None:
                kept.append(state.clone())

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[TokenTree]:
        self.counts.append([sum(map(len, kept)) for kept in self.states])
        return super().propose(rows, limits)


def states_of(
    model: PreTrainedModel, text: Sequence[int], features: Features, padding: int = 0, **inputs: Any
) -> Tensor:
    """`[tokens, F]` by a plain forward over one text, padded as it was: some models count padding as positions."""
    pair = model.config.is_encoder_decoder
    ids = torch.tensor([[0] * padding + list(text)])
    call = {"decoder_input_ids" if pair else "input_ids": ids, "output_hidden_states": True, **inputs}
    if padding:
        call["attention_mask"] = (torch.arange(ids.shape[1])[None] >= padding).long()
        if _compat.accepts_position_ids(model):
            call["position_ids"] = (call["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(**call)
    states = out.decoder_hidden_states if pair else out.hidden_states
    chosen = [states[layer][0] for layer in features.layers] + [states[-1][0]] * features.last
    return torch.cat(chosen, dim=-1)[padding:]


def read_and_compare(
    stock: PreTrainedModel,
    treed: PreTrainedModel,
    inputs: dict[str, Any],
    *,
    features: Features = THREE,
    maker: str = "half_right",
    skipped: int = 0,
    **call: Any,
) -> Reading:
    """Decode with a source that reads hidden states, and compare them with those of plain forwards."""
    pair = stock.config.is_encoder_decoder
    call = {"do_sample": False, "max_new_tokens": 24, **inputs, **call}
    fresh = {name: value for name, value in call.items() if not hasattr(value, "layers")}
    expected = stock.generate(**fresh)
    mask = torch.ones_like(expected[:, :1]) if pair else inputs["attention_mask"]
    truth = real_texts(expected, mask)
    source = Reading(features, truth, _compat.vocabulary_size(stock), maker)
    head = heads.Reader(stock, features.layers, features.last)
    with drafting(source):
        actual = treed.generate(assistant_model=head, tree_config=BUSHES, **call)
    assert_same_text(expected, actual, width=1)
    for row, text in enumerate(truth):
        more = {name: inputs[name][row : row + 1] for name in ("input_ids", "attention_mask")} if pair else {}
        # Nothing but the last token is unread, padding and rejected nodes are not among them.
        padding = int((mask[row] == 0).sum())
        wanted = states_of(stock, text, features, padding, **more)[skipped : len(text) - 1]
        got = torch.cat(source.states[row])[: len(wanted)]
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        tolerance = 1e-10 if wanted.dtype == torch.float64 else 1e-3
        assert float((got - wanted).abs().max()) < tolerance
    for counts, texts in zip(source.counts, source.texts, strict=True):
        assert all(have == len(text) - 1 - skipped for have, text in zip(counts, texts, strict=True))
    if maker == "half_right":
        accepted = [len(path) - 1 for paths in source.paths for path in paths]
        drafted = sum(tree.drafted for trees in source.rounds for tree in trees)
        assert max(accepted) > 1 and drafted > sum(accepted) + 10
    return source


@pytest.mark.parametrize("route", ROUTES)
@batches
def test_features_are_the_hidden_states_of_a_plain_forward(route: str, batch: int) -> None:
    stock, treed, inputs, family = ROUTES[route]
    read_and_compare(stock(family), treed(family), inputs(batch))


@pytest.mark.parametrize("route", ["paths", "ordered"])
@pytest.mark.parametrize("apart", [True, False], ids=["roots-before", "roots-in-paths"])
def test_features_wherever_roots_are_read(route: str, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_treespec.engine.stem.StemChoice.pays", lambda *_, **__: apart)
    stock, treed, inputs, family = ROUTES[route]
    read_and_compare(stock(family), treed(family), inputs(3))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_features_in_float64(family: str) -> None:
    double = tiny.build(family).double()
    treed = enable(tiny.build(family).double())
    read_and_compare(double, treed, mask_inputs(3, family))
    read_and_compare(double, treed, mask_inputs(1, family), maker="deep")


@pytest.mark.parametrize("features", [Features((1,)), Features((), True), Features((1, 0))])
def test_other_features(features: Features) -> None:
    read_and_compare(tiny.stock("llama"), tiny.treed("llama"), mask_inputs(3), features=features)


@batches
def test_features_of_a_prefill_in_chunks(batch: int) -> None:
    read_and_compare(tiny.stock("llama"), tiny.treed("llama"), mask_inputs(batch), prefill_chunk_size=4)


def test_features_behind_a_cache_that_is_passed_in() -> None:
    inputs = mask_inputs(1)
    cache = new_cache(tiny.stock("llama"))
    tiny.stock("llama")(inputs["input_ids"][:, :6], use_cache=True, **cache_argument(cache))
    read_and_compare(tiny.stock("llama"), tiny.treed("llama"), inputs, skipped=6, **cache_argument(cache))


def test_features_beside_guidance_are_those_of_the_prompted_stream() -> None:
    read_and_compare(tiny.stock("llama"), tiny.treed("llama"), mask_inputs(1), guidance_scale=1.5)


@pytest.mark.slow
def test_features_of_compiled_layers() -> None:
    """Code that was compiled before calls no hooks that come later."""
    model = enable(tiny.build("llama"))
    for layer in model.model.layers:
        layer.compile(backend="eager", dynamic=True)
    model.generate(**mask_inputs(1), max_new_tokens=3, do_sample=False)
    read_and_compare(tiny.stock("llama"), model, mask_inputs(1))


def test_calls_that_overlap_leave_compiled_code_on() -> None:
    model = tiny.build("llama")
    model.model.layers[0].compile(backend="eager")
    stance = torch._dynamo.eval_frame._stance
    one, two = tapped(model, THREE), tapped(model, THREE)
    for call in (one, two):
        call.__enter__()
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    one.__exit__(None, None, None)
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    two.__exit__(None, None, None)
    assert torch._dynamo.eval_frame._stance == stance


def test_want_of_memory_says_nothing_about_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable(tiny.build("llama"))
    head = heads.random_head("medusa", model)
    call = {**mask_inputs(1), "assistant_model": head, "tree_config": BUSHES, "max_new_tokens": 4}

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    handle = model.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        model.generate(**call)
    handle.remove()
    model.generate(**call)
    assert model.treespec_stats.draft == "medusa"


def hooks_of(model: PreTrainedModel) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_hooks_are_gone_after_the_call_and_after_exceptions() -> None:
    model, inputs = tiny.treed("llama"), mask_inputs(3)
    head = heads.random_head("eagle3", model)
    # transformers itself leaves hooks behind the first time that a model shows its hidden states.
    model(**inputs, output_hidden_states=True, output_attentions=True)
    before = hooks_of(model)
    model.generate(**inputs, assistant_model=head, tree_config=BUSHES, max_new_tokens=NEW, do_sample=False)
    assert hooks_of(model) == before

    class Broken(Exception):
        pass

    calls = []

    def fail(ids: Tensor, scores: Tensor) -> Tensor:
        calls.append(ids)
        if len(calls) > 3:
            raise Broken
        return scores

    with pytest.raises(Broken):
        model.generate(**inputs, assistant_model=head, tree_config=BUSHES, max_new_tokens=NEW, logits_processor=[fail])
    assert hooks_of(model) == before


# -- the text --


@kinds
@pytest.mark.parametrize(
    ("route", "batch", "sampling"),
    [
        *[("mask", batch, sampling) for batch in (1, 3) for sampling in (GREEDY, SAMPLED)],
        *[(route, 3, SAMPLED) for route in ("positions", "alibi", "paths", "ordered")],
        *[(route, 1, GREEDY) for route in ("positions", "alibi")],
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.filterwarnings("ignore::hf_treespec.TreeSpecWarning")
def test_any_head_equals_no_tree(kind: str, route: str, batch: int, sampling: dict[str, Any]) -> None:
    stock, treed, inputs, family = ROUTES[route]
    model = treed(family)
    head = heads.random_head(kind, stock(family))
    call = {"max_new_tokens": NEW, **inputs(batch), **sampling}
    expected = model.generate(tree_config=WIDE.replace(max_nodes=0), **call)
    if not sampling["do_sample"]:
        assert_same_text(stock(family).generate(**call), expected, width=1)
    actual = model.generate(assistant_model=head, tree_config=WIDE, **call)
    assert_same_text(expected, actual, width=1)
    stats = model.treespec_stats
    assert stats.draft == head.kind and stats.drafted_nodes > NEW and stats.draft_forward_seconds > 0
    # Under sampling the noise that it shares with the target makes up for what it does not know.
    # (Rows in step accept what all of them accept.)
    assert stats.accepted_tokens > 0 or not sampling["do_sample"] or route != "mask"


@pytest.mark.parametrize(
    ("kind", "growth", "batch"),
    [
        ("medusa", "dynamic", 1),
        ("mlp", "best_first", 3),
        ("eagle", "best_first", 1),
        ("eagle3", "dynamic", 3),
        ("dflash", "best_first", 3),
    ],
)
def test_ends_caches_and_the_fallback(kind: str, growth: str, batch: int) -> None:
    """Rows that end early, a cache that goes on, and rounds without trees in between."""
    model = tiny.treed("llama")
    head = heads.random_head(kind, model)
    config = WIDE.replace(growth=growth, max_children=12, fallback="auto")
    call = {**mask_inputs(batch), "max_new_tokens": NEW, "do_sample": True, "eos_token_id": [5, 6, 7, 9, 14, 23]}
    plain = model.generate(**call, tree_config=config.replace(max_nodes=0))
    assert_same_text(plain, model.generate(**call, assistant_model=head, tree_config=config))
    ids, mask = prompt("llama", batch)
    cache, call = new_cache(model), {"max_new_tokens": 8, "do_sample": False}
    config = config.replace(fallback="off")
    first = model.generate(
        ids, attention_mask=mask, assistant_model=head, tree_config=config, **cache_argument(cache), **call
    )
    whole = torch.cat([mask, mask.new_ones(batch, 8)], 1)
    plain = model.generate(first, attention_mask=whole, tree_config=config.replace(max_nodes=0), **call)
    again = model.generate(
        first, attention_mask=whole, assistant_model=head, tree_config=config, **cache_argument(cache), **call
    )
    assert_same_text(plain, again, width=first.shape[1])


@kinds
def test_prompts_that_nobody_has_ids_of(kind: str) -> None:
    ids, mask = prompt("llama", 3)
    embeds = tiny.stock("llama").get_input_embeddings()(ids).detach()
    call = {"inputs_embeds": embeds, "attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    plain = tiny.stock("llama").generate(**call)
    head = heads.random_head(kind, tiny.stock("llama"))
    assert_same_text(plain, tiny.treed("llama").generate(**call, assistant_model=head, tree_config=WIDE), width=0)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [("medusa", "hybrid"), ("mlp", "rrs"), ("eagle", "block"), ("eagle3", "traversal"), ("dflash", "rrsw")],
)
def test_independent_rules(kind: str, rule: str) -> None:
    model = tiny.treed("llama")
    head = heads.random_head(kind, model)
    config = WIDE.replace(verification=rule, max_nodes=12, max_children=4)
    call = {**mask_inputs(3), "do_sample": True, "max_new_tokens": NEW, "tree_config": config}
    one, two = (model.generate(**call, assistant_model=head) for _ in range(2))
    assert one.shape == (3, WIDTH + NEW) and torch.equal(one, two)
    assert model.treespec_stats.drafted_nodes > 0


@pytest.mark.parametrize(
    ("kind", "fallback"),
    [("medusa", "auto"), ("mlp", "off"), ("eagle", "off"), ("eagle3", "auto"), ("dflash", "auto")],
)
def test_beside_sources_of_the_text(kind: str, fallback: str) -> None:
    """One tree of a head and n-grams; the head is told of the rounds in which it is not asked."""
    model = tiny.treed("llama")
    head = heads.random_head(kind, model)
    config = WIDE.replace(draft=("model", "ngram"), fallback=fallback, growth="best_first")
    for sampling in (GREEDY, SAMPLED):
        call = {**mask_inputs(3), "max_new_tokens": NEW, **sampling}
        plain = model.generate(**call, tree_config=config.replace(max_nodes=0, draft="auto"))
        assert_same_text(plain, model.generate(**call, assistant_model=head, tree_config=config))
        assert model.treespec_stats.drafted_by_source[head.kind] > 0


# -- oracles --


@kinds
@batches
@samplings
def test_a_perfect_head_is_accepted_whole(kind: str, batch: int, sampling: dict[str, Any]) -> None:
    model = enable(heads.periodic())
    head = heads.perfect_head(kind, model)
    cycle = heads.CYCLE
    ids = torch.tensor([list(cycle) + list(cycle[:3])] * batch)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :4] = 0
        mask[2, :1] = 0
    config = TreeConfig(max_nodes=12, max_depth=6, max_children=2, fallback="off", seed=3)
    call = {"input_ids": ids * mask, "attention_mask": mask, "max_new_tokens": 1 + 7 * 4, **sampling}
    text = model.generate(**call, assistant_model=head, tree_config=config)
    whole = torch.tensor((list(cycle) * 9)[3 + len(cycle) :][: 1 + 7 * 4])
    assert torch.equal(text[:, ids.shape[1] :], whole.expand(batch, -1))
    stats = model.treespec_stats
    # The first token is the prefill's; a round of a whole path brings seven.
    assert stats.rounds == 4
    assert stats.accepted_by_depth[5] == batch * 4


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_cache_of_a_head_is_that_of_all_pairs_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After many rounds, most of them with rejections, the logits at the roots are those of training."""
    from hf_treespec.draft import Ranker
    from hf_treespec.draft.heads import Borrowed

    target = tiny.build("llama").double()
    head = heads.random_head(kind, target)
    model = enable(target)
    seen: dict[int, Tensor] = {}
    rank = Ranker.rank

    def spy(self: Ranker, logits: Tensor, noise: Any, count: int) -> Any:
        if len(logits) == 1 and roots:
            seen[roots.pop(0)] = logits[0].clone()
        return rank(self, logits, noise, count)

    roots: list[int] = []
    from hf_treespec.draft.heads.eagle_draft import EagleDraft

    propose = EagleDraft.propose

    def note(self: EagleDraft, rows: Any, limits: Any) -> Any:
        roots[:] = [len(rows[0].tokens)]
        return propose(self, rows, limits)

    monkeypatch.setattr(Ranker, "rank", spy)
    monkeypatch.setattr(EagleDraft, "propose", note)
    text = model.generate(
        **mask_inputs(1), assistant_model=head, tree_config=WIDE, max_new_tokens=NEW, do_sample=False
    )
    assert 5 < len(seen) < NEW - 1
    features = states_of(target, text[0].tolist(), head.features(2))
    with torch.no_grad():
        (logits,) = head(features[None, :-1], text[:, 1:], Borrowed.of(target))
    for length, got in seen.items():
        assert float((logits[0, length - 2] - got).abs().max()) < 1e-9


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_unrolled_steps_are_those_of_drafting(kind: str) -> None:
    """Step j at pair i is what the head says after it has read j of its own guesses behind pair i."""
    from hf_treespec.draft.heads import Borrowed

    target = tiny.build("llama").double()
    head = heads.random_head(kind, target)
    ids, _ = prompt("llama", 1)
    lent = Borrowed.of(target)
    features, tokens = states_of(target, ids[0].tolist(), head.features(2))[None, :-1], ids[:, 1:]
    with torch.no_grad():
        steps = head(features, tokens, lent, steps=3)
        for pair in (0, 4, 7):
            cache = _compat.make_cache(head.config)
            states = head.fuse(features[:, : pair + 1])
            place = torch.arange(pair + 1)[None]
            read = tokens[:, : pair + 1]
            for step in range(3):
                states = head.read(head.embed(read, lent), states, positions=place, mask=None, cache=cache)[:, -1:]
                logits = head.logits(states, lent)[0, 0]
                assert float((logits - steps[step][0, pair]).abs().max()) < 1e-9
                place, read = place[:, -1:] + 1, tokens[:, pair + step + 1 : pair + step + 2]


# -- refusals --


def refused(head: Any, match: str, error: type[Exception] = UnsupportedCallError, **call: Any) -> None:
    model = tiny.treed("llama")
    call = {**mask_inputs(1), "tree_config": BUSHES, "max_new_tokens": 4, **call}
    with pytest.raises(error, match=match):
        model.generate(assistant_model=head, **call)


@kinds
def test_a_head_of_another_size_is_refused(kind: str) -> None:
    refused(heads.MAKERS[kind](48, 97), "hidden states of 48 values, and .* has 32")
    refused(heads.MAKERS[kind](32, 71), "vocabulary of 71 ids, and .* has 97")


def test_what_a_head_cannot_serve_is_refused() -> None:
    head = heads.random_head("medusa", tiny.stock("llama"))
    refused(head, "draft='ngram'", tree_config=BUSHES.replace(draft="ngram"))
    refused(head, "synced_gpus=True", synced_gpus=True)
    refused(head, "draft='early_exit'", tree_config=BUSHES.replace(draft="early_exit"))
    size = {"hidden_size": 32, "vocab_size": 97}
    refused(heads.EagleHead(heads.layer_config(32), **size), r"\(2, 1, -1\).* has 2 layers")
    refused(heads.EagleHead(heads.layer_config(32), layers=(0, 2), feature_count=2, **size), r"\(0, 2\)")
    refused(heads.EagleHead(heads.layer_config(32), layers=(0, 1), **size), "reads 96 values")
    refused(heads.EagleHead(heads.layer_config(16), layers=(0, 1), feature_count=2, **size), "embed_tokens.weight")


def opt(width: int) -> PreTrainedModel:
    """As OPT-350m: what the embeddings give and the LM head reads is narrower than what goes from layer to layer."""
    config = OPTConfig(
        vocab_size=97, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, init_std=0.5,
        word_embed_proj_dim=width, max_position_embeddings=64, do_layer_norm_before=False, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return OPTForCausalLM(config).eval()


def test_states_of_another_width_than_the_config_says_are_refused() -> None:
    model = enable(opt(16))
    call = {**mask_inputs(1), "tree_config": BUSHES, "max_new_tokens": 4}
    own = {"hidden_size": 32, "vocab_size": 97, "layers": (0, 1), "feature_count": 2}
    for head, error, said in (
        (heads.medusa(32, 97), UnsupportedModelError, "behind its last layer have 16 values, the head reads 32"),
        (heads.medusa(24, 97), UnsupportedCallError, "hidden states of 24 values, and .* has 32"),
        (heads.EagleHead(heads.layer_config(32), **own), UnsupportedCallError, "the target's have 16 values: .*embed"),
        (
            heads.EagleHead(heads.layer_config(32), **own, embeddings=True, lm_head=False),
            UnsupportedCallError, "the target's reads 16 values: .*lm_head",
        ),
    ):  # fmt: skip
        features_fault(model, head.features(2))
        handle = model.register_forward_pre_hook(lambda *_: pytest.fail("no forward may come before the refusal"))
        with pytest.raises(error, match=said):
            model.generate(assistant_model=head, **call)
        handle.remove()


@pytest.mark.parametrize(("kind", "size"), [("medusa", 16), ("mlp", 16), ("eagle", 16), ("eagle3", 32)])
@batches
def test_heads_for_states_of_another_width(kind: str, size: int, batch: int) -> None:
    plain, model = opt(16), enable(opt(16))
    head = heads.MAKERS[kind](size, 97)
    for sampling in (GREEDY, SAMPLED):
        call = {"max_new_tokens": NEW, **mask_inputs(batch), **sampling}
        expected = model.generate(tree_config=WIDE.replace(max_nodes=0), **call)
        if not sampling["do_sample"]:
            assert_same_text(plain.generate(**call), expected, width=1)
        assert_same_text(expected, model.generate(assistant_model=head.eval(), tree_config=WIDE, **call), width=1)
        assert model.treespec_stats.drafted_nodes > NEW


def test_layers_whose_states_are_not_those_that_the_model_names(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable(tiny.build("llama"))
    layers = list(model.model.layers)
    monkeypatch.setattr("hf_treespec._compat.taps.decoder_layers", lambda _: layers[::-1])
    head = heads.random_head("eagle3", model)
    with pytest.raises(UnsupportedModelError, match="hooks on its layers do not show"):
        model.generate(**mask_inputs(1), assistant_model=head, tree_config=BUSHES, max_new_tokens=4)
    gc.collect()


def test_running_out_of_memory_says_nothing_about_a_model() -> None:
    model = tiny.build("llama")

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    hook = model.model.layers[0].register_forward_pre_hook(full)
    with pytest.raises(torch.OutOfMemoryError):
        features_fault(model, THREE)
    hook.remove()
    assert features_fault(model, THREE) is None


def test_hidden_states_are_compared_under_the_attention_of_trees() -> None:
    """One that takes no tree masks is not run: it may not run here at all, and calls with trees replace it."""

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not on this device")

    model = tiny.build("llama")
    with _compat.custom_attention(model, "hf_treespec_broken", broken, "sdpa"):
        assert features_fault(model, THREE) is None
        assert _compat.attention_implementation(model) == "hf_treespec_broken"
