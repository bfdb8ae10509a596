"""Classifier-free guidance: its second stream is read with the trees, once a round, and mixed as in plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, OPTConfig, OPTForCausalLM, PreTrainedModel

from calls import BUSHES, CHAINS_OF_4, GREEDY, SAMPLED, Pair, twice
from hf_treespec import TreeConfig, UnsupportedCallError, _compat, enable
from inputs import compare
from tiny import (
    WIDTH,
    assert_lively,
    assert_same_cache,
    build,
    draft,
    fingerprint,
    first_block,
    prompt,
    reference,
    stock,
    treed,
)

batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])
NEW = 16
WANTED: dict[str, Any] = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True}
NEGATIVES = ("last_token", "ids", "padded")


def negative(kind: str, batch: int, width: int = 6) -> dict[str, Any]:
    """Arguments for the unconditional prompt; `padded` rows begin with 3, 0 and 1 columns of padding."""
    if kind == "last_token":
        return {}
    ids = torch.randint(3, 60, (batch, width), generator=torch.Generator().manual_seed(8))
    if kind == "ids":
        return {"negative_prompt_ids": ids}
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[2:, :1] = 0
    return {"negative_prompt_ids": ids, "negative_prompt_attention_mask": mask}


def assert_same_scores(pair: Pair) -> None:
    assert len(pair.actual.scores) == len(pair.expected.scores)
    one, two = (torch.stack(out.scores).clamp(min=-30.0) for out in (pair.expected, pair.actual))
    torch.testing.assert_close(two, one, atol=2e-3, rtol=1e-3)


@contextmanager
def forwards(model: PreTrainedModel) -> Iterator[list[tuple[int, int]]]:
    """Rows and tokens of every forward of the model."""
    seen: list[tuple[int, int]] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: seen.append((int(out.shape[0]), int(out.shape[1])))
    )
    try:
        yield seen
    finally:
        hook.remove()


@batches
@samplings
@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("llama", kind) for kind in NEGATIVES), ("gpt2", "padded"), ("mistral", "padded"), ("gemma2", "ids")],
)
def test_guided_text_and_scores_are_those_of_plain(
    family: str, kind: str, batch: int, sampling: dict[str, Any]
) -> None:
    ids, mask = prompt(family, batch)
    call = {"guidance_scale": 1.7, **negative(kind, batch), **sampling}
    pair = twice(ids, mask, family=family, **call, **WANTED)
    assert_same_scores(pair)
    assert_same_cache(*(_compat.cache_from_outputs(out) for out in (pair.expected, pair.actual)), mask)
    if not sampling["do_sample"]:
        assert_lively(pair.actual.sequences)
    assert pair.stats.accepted_tokens > 0
    if family != "gemma2" or not sampling["do_sample"]:
        # Its capped logits weigh little beside the noise, which is the same.
        without = reference(stock(family), ids, mask, seed=3, max_new_tokens=NEW, **sampling)
        assert not torch.equal(pair.actual.sequences, without), "guidance must matter for this to test anything"


@batches
@samplings
@pytest.mark.parametrize("maker", ["wide", "random_tree", "chain"])
def test_guidance_with_every_kind_of_tree(maker: str, batch: int, sampling: dict[str, Any]) -> None:
    """Also rows that end apart, with the rest of them padded."""
    ids, mask = prompt("gpt2", batch)
    call = {"guidance_scale": 2.5, "eos_token_id": [5, 6, 9, 14], **negative("padded", batch), **sampling}
    twice(ids, mask, family="gpt2", maker=maker, max_new_tokens=NEW, **call)
    pair = twice(ids, mask, family="gpt2", maker=maker, config=CHAINS_OF_4, **call, **WANTED)
    assert_same_scores(pair)


@batches
@samplings
@pytest.mark.parametrize("kind", NEGATIVES)
def test_one_unconditional_forward_a_round(kind: str, batch: int, sampling: dict[str, Any]) -> None:
    ids, mask = prompt("llama", batch)
    call = {"guidance_scale": 1.7, **negative(kind, batch), **sampling}
    with forwards(treed("llama")) as seen:
        pair = twice(ids, mask, maker="deep", max_new_tokens=NEW, **call)
    assert pair.stats.rounds < NEW // 2
    # Padding: the prompt is read once more, to learn which positions the model takes.
    prefills = 3 if kind == "padded" else 2
    assert len(seen) == prefills + 2 * pair.stats.rounds
    rounds = seen[prefills:]
    assert rounds[::2] == rounds[1::2], "the same tree for both streams"
    with forwards(stock("llama")) as plain:
        reference(stock("llama"), ids, mask, seed=3, max_new_tokens=NEW, **call)
    assert len(plain) == 2 * NEW


@samplings
def test_guided_rows_run_apart(sampling: dict[str, Any]) -> None:
    """A row's trees do not wait for its neighbours, so a batch takes as many rounds as its slowest row."""
    ids, mask = prompt("llama", 3)
    call = {"guidance_scale": 1.7, **negative("ids", 3), **sampling}
    pair = twice(ids, mask, maker="half_right", max_new_tokens=NEW, **call)
    first = pair.source.texts[0]
    grown = [[len(row) - len(start) for row, start in zip(texts, first, strict=True)] for texts in pair.source.texts]
    assert any(len(set(row)) > 1 for row in grown)


@batches
@samplings
def test_guidance_and_other_processors_keep_their_order(batch: int, sampling: dict[str, Any]) -> None:
    ids, mask = prompt("llama", batch)
    more = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "bad_words_ids": [[7], [8, 9]], "min_new_tokens": 6}
    call = {"guidance_scale": 0.4, "eos_token_id": [5, 6, 9, 14], **more, **negative("ids", batch), **sampling}
    assert_same_scores(twice(ids, mask, **call, **WANTED))


@batches
@samplings
@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_guidance_with_the_own_drafts(kind: str, batch: int, sampling: dict[str, Any]) -> None:
    ids, mask = prompt("llama", batch)
    call: dict[str, Any] = {"assistant_model": draft("llama")} if kind == "model" else {}
    compare(
        (stock("llama"), treed("llama")),
        mask,
        maker=None,
        input_ids=ids,
        attention_mask=mask,
        guidance_scale=1.7,
        max_new_tokens=24,
        **negative("padded", batch),
        **call,
        **sampling,
    )


@batches
def test_the_longer_stream_ends_with_the_position_table(batch: int) -> None:
    ids, mask = prompt("gpt2", batch)
    call = {"guidance_scale": 1.7, **negative("ids", batch, width=96 - 5)}
    text = reference(stock("gpt2"), ids, mask, max_new_tokens=5, **call)
    with pytest.raises(IndexError):
        stock("gpt2").generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, **call)
    # The text ends just before; a tree that looks further ahead must not.
    call["eos_token_id"] = text[:, -1].tolist()
    twice(ids, mask, family="gpt2", maker="wrong_chain", max_new_tokens=20, **call)


# --- models that count positions by the mask -----------------------------------------------------------------------


def opt() -> PreTrainedModel:
    config = OPTConfig(
        vocab_size=97, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, init_std=0.5,
        word_embed_proj_dim=32, max_position_embeddings=64, do_layer_norm_before=True, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(4)
    return OPTForCausalLM(config).eval()


@batches
@samplings
@pytest.mark.parametrize("kind", NEGATIVES)
def test_guidance_of_a_model_that_counts_by_the_mask(kind: str, batch: int, sampling: dict[str, Any]) -> None:
    ids, mask = prompt("llama", batch)
    tree_model = enable(opt())
    with forwards(tree_model) as seen:
        pair = twice(
            ids, mask, models=(opt(), tree_model), guidance_scale=1.7, **negative(kind, batch), **sampling, **WANTED
        )
    assert_same_scores(pair)
    assert len(seen) == (4 if kind == "padded" else 2) + 2 * pair.stats.rounds


# --- processors of the caller --------------------------------------------------------------------------------------


class Subclass(_compat.GuidanceProcessor):  # type: ignore[misc]
    """Might do anything; this one counts its forwards."""

    calls = 0

    def get_unconditional_logits(self, input_ids: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = super().get_unconditional_logits(input_ids)
        return logits


def given(cls: type, model: PreTrainedModel, batch: int, **more: Any) -> Any:
    parts = negative("ids", batch)
    return cls(1.7, model, unconditional_ids=parts["negative_prompt_ids"], **more)


@batches
@samplings
def test_a_subclass_is_called_as_it_is(batch: int, sampling: dict[str, Any]) -> None:
    ids, mask = prompt("llama", batch)
    mine = iter([stock("llama"), treed("llama")])
    pair = twice(
        ids,
        mask,
        fresh=lambda: {"logits_processor": LogitsProcessorList([given(Subclass, next(mine), batch)])},
        **sampling,
        **WANTED,
    )
    assert_same_scores(pair)
    assert pair.plain["logits_processor"][0].calls == pair.tree["logits_processor"][0].calls == NEW


@batches
@pytest.mark.parametrize("case", ["fresh", "no_cache", "other_model", "used", "twice"])
def test_processors_made_by_the_caller(case: str, batch: int) -> None:
    ids, mask = prompt("llama", batch)
    models = iter([stock("llama"), treed("llama")])

    def fresh() -> dict[str, Any]:
        model = draft("llama") if case == "other_model" else next(models)
        made = [given(_compat.GuidanceProcessor, model, batch, use_cache=case != "no_cache")]
        if case == "used":
            made[0](ids, torch.zeros(batch, 97))
        if case == "twice":
            made.append(given(_compat.GuidanceProcessor, model, batch))
        return {"logits_processor": LogitsProcessorList(made), "repetition_penalty": 1.3}

    pair = twice(ids, mask, fresh=fresh, **WANTED)
    assert_same_scores(pair)
    assert len(pair.tree["logits_processor"]) == len(pair.plain["logits_processor"])
    if case == "fresh":
        processor = pair.tree["logits_processor"][0]
        assert type(processor) is _compat.GuidanceProcessor
        assert processor.unconditional_context["first_pass"], "a processor that was not called may be used again"
        again = treed("llama").generate(
            ids, attention_mask=mask, tree_config=BUSHES, do_sample=False, max_new_tokens=NEW, **pair.tree
        )
        assert torch.equal(again, pair.actual.sequences)


# --- refusals and errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            {"negative_prompt_ids": torch.ones(1, 4).long()},
            r"negative_prompt_ids of shape \(1, 4\): expected \[3, n\]",
        ),
        ({"negative_prompt_ids": torch.ones(3, 0).long()}, r"negative_prompt_ids of shape \(3, 0\)"),
        (
            {"negative_prompt_ids": torch.ones(3, 4).long(), "negative_prompt_attention_mask": torch.ones(3, 5)},
            r"negative_prompt_attention_mask has shape \(3, 5\): expected \(3, 4\)",
        ),
        ({"negative_prompt_attention_mask": torch.ones(3, 5)}, r"has shape \(3, 5\): expected \(3, 1\)"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(3, WIDTH, 32)}, r"last column of input_ids .* \(3, 0\)"),
    ],
)
def test_unconditional_prompts_that_do_not_fit(call: dict[str, Any], message: str) -> None:
    ids, mask = prompt("llama", 3)
    before = fingerprint(treed("llama"))
    with forwards(treed("llama")) as seen, pytest.raises(UnsupportedCallError, match=message):
        treed("llama").generate(
            **{"input_ids": ids, **call}, attention_mask=mask, guidance_scale=1.7, tree_config=BUSHES
        )
    assert not seen and fingerprint(treed("llama")) == before


@pytest.mark.parametrize("after", range(2, 7))
def test_an_exception_in_either_stream_leaves_the_model_as_it_was(after: int) -> None:
    ids, mask = prompt("llama", 3)
    model = enable(build("llama"))
    before = fingerprint(model)
    count = 0

    def fail(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == after:
            raise RuntimeError("out of patience")

    hook = first_block(model).register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of patience"):
        model.generate(ids, attention_mask=mask, guidance_scale=1.7, do_sample=False, tree_config=TreeConfig())
    hook.remove()
    assert fingerprint(model) == before
    out = model.generate(
        ids, attention_mask=mask, guidance_scale=1.7, do_sample=False, max_new_tokens=NEW, tree_config=BUSHES
    )
    assert torch.equal(out, reference(stock("llama"), ids, mask, guidance_scale=1.7, max_new_tokens=NEW))
