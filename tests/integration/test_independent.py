"""Verification by independent draws through generate(): the law of the text, and what else plain sampling promises."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import seq2seq
from exact.small import CONFIG, FEW, PROMPT, VOCAB, drawn, exact_law, few, goodness, law_of, pair, small
from hf_treespec import TreeSpecWarning, UnsupportedCallError, _compat, enable
from hf_treespec.rules import RULES
from tiny import (
    WIDTH,
    assert_same_cache,
    assert_same_text,
    cache_argument,
    draft,
    perturbed,
    prompt,
    reference,
    stock,
    treed,
)

LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]
every_rule = pytest.mark.parametrize("rule", LOSSLESS)


SHAPED = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.4}
MANY = [pytest.param(sampling, 8000, marks=pytest.mark.slow) for sampling in ({}, SHAPED)]


@pytest.mark.parametrize(("sampling", "rows"), [({}, 900), (SHAPED, 600), *MANY])
@pytest.mark.parametrize("rule", ["coupled", *LOSSLESS])
def test_three_tokens_follow_the_target(rule: str, sampling: dict[str, float], rows: int) -> None:
    cells, stats = drawn(CONFIG.replace(verification=rule), rows, **sampling)
    law = exact_law(tuple({"top_k": 0, **sampling}.items()))
    counts = torch.bincount(cells, minlength=VOCAB**3).double()
    assert goodness(counts, law.flatten()) > 1e-5
    assert stats.verification == rule and stats.lossless
    assert 0 < stats.accepted_tokens < 2 * rows
    if rule != "coupled":
        assert stats.expected_accepted == pytest.approx(stats.accepted_tokens, rel=4 / rows**0.5)


@pytest.mark.slow
@every_rule
def test_rows_in_step_follow_the_target(rule: str) -> None:
    """A criterion that wants whole steps cuts the paths of all rows to the shortest."""
    target, helper = pair()
    counts = torch.zeros(VOCAB**3, dtype=torch.float64)
    accepted = 0
    for seed in range(500):
        out = target.generate(
            PROMPT, do_sample=True, top_k=0, num_return_sequences=3, max_new_tokens=3, assistant_model=helper,
            tree_config=CONFIG.replace(verification=rule, seed=seed), stopping_criteria=[Never()],
        )  # fmt: skip
        text = out[:, PROMPT.shape[1] :]
        counts += torch.bincount((text[:, 0] * VOCAB + text[:, 1]) * VOCAB + text[:, 2], minlength=VOCAB**3)
        accepted += target.treespec_stats.accepted_tokens
    assert accepted >= 12  # 18 to 129 by rule: all three rows seldom agree on a path
    assert goodness(counts, exact_law((("top_k", 0),)).flatten()) > 1e-5


def test_typical_acceptance_says_that_it_is_lossy() -> None:
    config = CONFIG.replace(verification="typical-lossy")
    _compat.warning._WARNED.clear()
    with pytest.warns(TreeSpecWarning, match="typical-lossy.*does not follow the target's law"):
        cells, stats = drawn(config, 1500)
    assert not stats.lossless and stats.verification == "typical-lossy"
    counts = torch.bincount(cells, minlength=VOCAB**3).double()
    assert goodness(counts, exact_law((("top_k", 0),)).flatten()) < 1e-9


@every_rule
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_decoding_is_the_same_for_all(rule: str, batch: int) -> None:
    ids, mask = prompt("llama", batch)
    expected = reference(stock("llama"), ids, mask, max_new_tokens=14)
    config = CONFIG.replace(verification=rule)
    call = {"attention_mask": mask, "max_new_tokens": 14, "do_sample": False, "assistant_model": draft("llama")}
    assert_same_text(expected, treed("llama").generate(ids, tree_config=config, **call))
    assert treed("llama").treespec_stats.verification == "coupled"


@every_rule
def test_a_row_is_the_same_alone_and_in_a_batch(rule: str) -> None:
    ids, mask = prompt("llama", 3)
    call = {"max_new_tokens": 15, "do_sample": True, "assistant_model": draft("llama")}
    config = CONFIG.replace(verification=rule)
    together = treed("llama").generate(ids, attention_mask=mask, tree_config=config, **call)
    assert treed("llama").treespec_stats.accepted_tokens > 0
    for row in range(3):
        real = mask[row].bool()
        alone = treed("llama").generate(ids[row : row + 1, real], tree_config=config, **call)
        assert torch.equal(alone[0, int(real.sum()) :], together[row, WIDTH:])


# Behind the eos no token is left, which plain decoding never asks for.
NOTHING_BEHIND = {"eos_token_id": 2, "pad_token_id": 0, "bad_words_ids": [[2, token] for token in range(FEW)]}


def nothing_behind(model: PreTrainedModel, token: int) -> PreTrainedModel:
    """The model with NaN for logits behind a token, as an overflow gives them."""

    def hook(module: Any, args: Any, arguments: dict[str, Tensor], out: Any) -> Any:
        out.logits[(arguments["input_ids"] == token)[:, -out.logits.shape[1] :]] = torch.nan
        return out

    model.register_forward_hook(hook, with_kwargs=True)
    return model


@functools.cache
def law_of_four(ends: bool) -> Tensor:
    return law_of(few(), FOUR, 4, {"top_k": 0, **(NOTHING_BEHIND if ends else {})})


FOUR = torch.tensor([[3, 1, 2, 4]])


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        *((rule, "") for rule in LOSSLESS),
        *((rule, "ends") for rule in ("rrsw", "traversal", "hybrid-joint")),
        *((rule, "overflow of the draft") for rule in ("rrs-joint", "block")),
    ],
)
def test_trees_of_depth_two_follow_the_target(rule: str, what: str) -> None:
    """Four tokens: one of the prefill, and a tree with room for two levels."""
    rows, target, helper = 400, enable(perturbed(few(), 0.0)), perturbed(few(), 0.12)
    if what.startswith("overflow"):
        helper = nothing_behind(helper, 1)
    out = target.generate(
        FOUR, do_sample=True, top_k=0, num_return_sequences=rows, max_new_tokens=4, assistant_model=helper,
        tree_config=CONFIG.replace(verification=rule, max_children=2), **(NOTHING_BEHIND if what == "ends" else {}),
    )[:, FOUR.shape[1] :]  # fmt: skip
    stats = target.treespec_stats
    assert stats.accepted_by_depth[1] > 20
    cells = (out * FEW ** torch.arange(3, -1, -1)).sum(-1)
    counts = torch.bincount(cells, minlength=FEW**4).double()
    assert goodness(counts, law_of_four(what == "ends")) > 1e-4
    assert stats.expected_accepted == pytest.approx(stats.accepted_tokens, rel=4 / rows**0.5)


def test_what_is_expected_ends_with_the_text() -> None:
    target, helper = enable(perturbed(few(), 0.0)), perturbed(few(), 0.05)
    target.generate(
        FOUR.expand(200, -1), do_sample=True, top_k=0, eos_token_id=2, pad_token_id=0, max_new_tokens=12,
        assistant_model=helper, tree_config=CONFIG.replace(verification="traversal", max_children=2),
    )  # fmt: skip
    stats = target.treespec_stats
    assert stats.accepted_tokens > 60
    assert stats.expected_accepted == pytest.approx(stats.accepted_tokens, rel=0.2)


def test_a_text_comes_to_nothing_as_often_as_in_plain_decoding() -> None:
    """Where processors leave no token behind a 2, a text that has one fails, however much a draft may like others."""
    target, helper, calls = enable(perturbed(few(), 0.0)), perturbed(few(), 0.0), 80
    said = torch.tensor(list(itertools.product(range(FEW), repeat=4)))
    whole = float(law_of_four(False)[(said != 2).all(-1)].sum())
    through = 0
    for seed in range(calls):
        with contextlib.suppress(RuntimeError):
            target.generate(
                FOUR, do_sample=True, top_k=0, max_new_tokens=5, assistant_model=helper,
                bad_words_ids=NOTHING_BEHIND["bad_words_ids"],
                tree_config=CONFIG.replace(verification="block", seed=seed, max_children=1, max_depth=4),
            )  # fmt: skip
            through += 1
    assert 0.1 < whole < 0.5
    assert abs(through - calls * whole) < 2.5 * (calls * whole * (1 - whole)) ** 0.5


class Never:
    """A criterion that wants whole steps, and ends nothing."""

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.zeros(len(ids), dtype=torch.bool)


class Even(Never):
    """Ends a row whose text has a 4 in an even place: nothing that ids alone could tell."""

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return (ids[:, ::2] == 4).any(-1)


IN_STEP: dict[str, Any] = {
    "criterion": lambda model: {"stopping_criteria": [Never()]},
    "ended by a criterion": lambda model: {"stopping_criteria": [Even()]},
    "states": lambda model: {"output_hidden_states": True},
    "cache": lambda model: cache_argument(DynamicCache(config=model.config)),
}


@pytest.mark.parametrize(
    ("why", "rule"), [*(("criterion", rule) for rule in LOSSLESS), *((why, "traversal") for why in list(IN_STEP)[1:])]
)
def test_rows_in_step_are_padded_behind_their_end(why: str, rule: str) -> None:
    """A row that ends inside of a round drops what its tree has behind that."""
    target, helper = pair()
    call = {
        "do_sample": True, "top_k": 0, "eos_token_id": [2, 8], "pad_token_id": 0, "max_new_tokens": 9,
        "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
    }  # fmt: skip
    early = 0
    for seed in range(4):
        out = target.generate(
            PROMPT.expand(3, -1), assistant_model=helper, **call, **IN_STEP[why](target),
            tree_config=CONFIG.replace(verification=rule, seed=seed, max_children=1),
        )  # fmt: skip
        early += bool(target.treespec_stats.accepted_tokens)
        # Plain decoding, made to draw the same text: it pads by itself.
        text = iter(out.sequences[:, PROMPT.shape[1] :].unbind(1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "multinomial", lambda probs, num_samples=1, text=text, **_: next(text)[:, None])
            expected = small().generate(PROMPT.expand(3, -1), **call, **IN_STEP[why](target))
        assert torch.equal(expected.sequences, out.sequences), seed
        for name in ("scores", "logits"):
            for step, (a, b) in enumerate(zip(expected[name], out[name], strict=True)):
                assert torch.allclose(a, b, atol=1e-4), (seed, name, step)
    assert early


@pytest.mark.parametrize("rule", ["rrsw", "traversal"])
def test_a_batch_that_counts_by_slots_is_padded_behind_its_end(rule: str) -> None:
    model = enable(perturbed(seq2seq.stock("bloom"), 0.0))
    ends = [5, 6, 7, 8]
    accepted = 0
    for seed in range(3):
        out = model.generate(
            torch.tensor([[3, 4, 5, 6]]).expand(4, -1), do_sample=True, temperature=0.8, top_k=0, eos_token_id=ends,
            pad_token_id=0, max_new_tokens=10, assistant_model=perturbed(model, 0.02),
            tree_config=CONFIG.replace(verification=rule, seed=seed, max_children=2),
        )  # fmt: skip
        accepted += model.treespec_stats.accepted_tokens
        for row in out[:, 4:].tolist():
            first = next((place for place, token in enumerate(row) if token in ends), len(row))
            assert not any(row[first + 1 :])
    assert accepted


@every_rule
@pytest.mark.parametrize("batch", [1, 3])
def test_scores_logits_and_cache_belong_to_the_text(rule: str, batch: int) -> None:
    """What is returned equals a plain call that is made to draw the same text."""
    ids, mask = prompt("llama", batch)
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 20}
    sampling = {"do_sample": True, "temperature": 0.5, "repetition_penalty": 1.1, "eos_token_id": [5, 9, 14, 23]}
    out = treed("llama").generate(
        ids, attention_mask=mask, assistant_model=perturbed(stock("llama"), 0.01),
        tree_config=CONFIG.replace(verification=rule), **wanted, **sampling,
    )  # fmt: skip
    assert treed("llama").treespec_stats.accepted_tokens > 0
    text = iter(out.sequences[:, WIDTH:].unbind(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", lambda probs, num_samples=1, **_: next(text)[:, None])
        expected = stock("llama").generate(ids, attention_mask=mask, **wanted, **sampling)
    assert torch.equal(expected.sequences, out.sequences)
    for name in ("scores", "logits"):
        for step, (a, b) in enumerate(zip(expected[name], out[name], strict=True)):
            live = ~(out.sequences[:, WIDTH : WIDTH + step] == 0).any(-1)
            assert torch.allclose(a[live], b[live], atol=1e-4), (name, step)
    assert_same_cache(*(_compat.cache_from_outputs(o) for o in (expected, out)), mask)


@every_rule
def test_guided_text_has_the_guided_law(rule: str) -> None:
    target, helper = pair()
    rows, negative = 600, torch.tensor([[4, 8]])
    call = {"do_sample": True, "top_k": 0, "max_new_tokens": 3, "guidance_scale": 1.6}
    out = target.generate(
        PROMPT.expand(rows, -1), negative_prompt_ids=negative.expand(rows, -1), assistant_model=helper,
        tree_config=CONFIG.replace(verification=rule), **call,
    )  # fmt: skip
    assert target.treespec_stats.accepted_tokens > 0
    # Plain decoding, made to say every pair of tokens.
    said = torch.tensor(list(itertools.product(range(VOCAB), repeat=2)))
    columns = iter([*said.unbind(1), said[:, 0]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", lambda probs, num_samples=1, **_: next(columns)[:, None])
        scores = small().generate(
            PROMPT.expand(len(said), -1), negative_prompt_ids=negative.expand(len(said), -1), output_scores=True,
            return_dict_in_generate=True, **call,
        ).scores  # fmt: skip
    laws = [step.double().softmax(-1) for step in scores]
    law = laws[0].gather(1, said[:, :1]) * laws[1].gather(1, said[:, 1:]) * laws[2]
    cells = (out[:, 4] * VOCAB + out[:, 5]) * VOCAB + out[:, 6]
    assert goodness(torch.bincount(cells, minlength=VOCAB**3).double(), law.flatten()) > 1e-5


@every_rule
def test_processors_that_may_have_a_state_are_refused(rule: str) -> None:
    ids, mask = prompt("llama", 1)
    ran: list[int] = []
    hook = treed("llama").register_forward_pre_hook(lambda *_: ran.append(1))
    call = {"do_sample": True, "prefix_allowed_tokens_fn": lambda batch_id, text: [3, 4]}
    with pytest.raises(UnsupportedCallError, match=f"verification='{rule}'.*PrefixConstrained.*'coupled'"):
        treed("llama").generate(ids, attention_mask=mask, tree_config=CONFIG.replace(verification=rule), **call)
    hook.remove()
    assert not ran


def test_guidance_that_is_no_second_stream_is_refused_before_any_forward() -> None:
    """A model that counts by slots has none; its guidance must be called once a token, which no rule of draws does."""
    ids = torch.tensor([[3, 4, 5, 6]])
    ran: list[int] = []
    model = enable(perturbed(seq2seq.stock("bloom"), 0.0))
    hook = model.register_forward_pre_hook(lambda *_: ran.append(1))
    call = {"do_sample": True, "guidance_scale": 1.5, "max_new_tokens": 4}
    with pytest.raises(UnsupportedCallError, match="verification='rrsw'.*ClassifierFreeGuidance"):
        model.generate(ids, tree_config=CONFIG.replace(verification="rrsw"), **call)
    hook.remove()
    assert not ran


@every_rule
def test_a_draft_of_a_smaller_vocabulary(rule: str) -> None:
    """Ids that only the target knows are never drawn, and still written by the target."""
    target, _ = pair()
    torch.manual_seed(5)
    helper = LlamaForCausalLM(LlamaConfig(**{**small().config.to_dict(), "vocab_size": VOCAB - 3})).double().eval()
    config = CONFIG.replace(verification=rule)
    call = {"do_sample": True, "top_k": 0, "num_return_sequences": 40, "max_new_tokens": 8, "assistant_model": helper}
    out = target.generate(PROMPT % (VOCAB - 3), tree_config=config, **call)
    assert target.treespec_stats.accepted_tokens > 0
    assert int(out.max()) >= VOCAB - 3


@every_rule
def test_a_row_that_has_ended_may_be_left_without_a_token(rule: str) -> None:
    """Its text is scored beside the others' as filler: what its processors leave no token is nobody's fault."""
    target, helper = pair()
    out = target.generate(
        PROMPT, do_sample=True, top_k=0, num_return_sequences=8, no_repeat_ngram_size=1, max_new_tokens=VOCAB - 4,
        assistant_model=helper, tree_config=CONFIG.replace(verification=rule),
    )  # fmt: skip
    # Every token once, after which none is left; and rows that came there before others did.
    assert all(row == list(range(VOCAB)) for row in out.sort().values.tolist())
    assert target.treespec_stats.row_rounds < 8 * target.treespec_stats.rounds


@pytest.mark.parametrize("rule", ["traversal", "hybrid"])
def test_logits_of_nan_are_an_error_as_in_plain_sampling(rule: str) -> None:
    model = enable(perturbed(stock("llama"), 0.0))
    ids, mask = prompt("llama", 1)
    seen = []

    def poison(module: Any, args: Any, out: Any) -> Any:
        seen.append(1)
        return out * float("nan") if len(seen) > 2 else out

    model.lm_head.register_forward_hook(poison)
    with pytest.raises(RuntimeError, match="inf or nan"):
        model.generate(
            ids, attention_mask=mask, do_sample=True, assistant_model=draft("llama"),
            tree_config=CONFIG.replace(verification=rule),
        )  # fmt: skip


def test_ngram_trees_are_target_sampling_under_every_rule() -> None:
    """Nothing of them is random, so that rules differ by the order of their tests only."""
    ids = torch.tensor([[3, 4, 5, 6, 3, 4, 5, 6, 3, 4, 5, 6, 3, 4]])
    sampling = {"do_sample": True, "temperature": 0.3, "max_new_tokens": 20}
    texts: dict[bool, set[str]] = {False: set(), True: set()}
    for name in LOSSLESS:
        config = CONFIG.replace(verification=name, max_children=1)
        texts[RULES[name].joint].add(str(treed("llama").generate(ids, tree_config=config, **sampling).tolist()))
        assert treed("llama").treespec_stats.drafted_nodes > 0
    assert [len(found) for found in texts.values()] == [1, 1]
