"""DFlash drafts: a block in one forward, beside assisted decoding of transformers with the same model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

import heads
import tiny
from calls import BUSHES, GREEDY, SAMPLED
from every_route import mask_inputs
from hf_treespec import TreeConfig, UnsupportedCallError, enable
from hf_treespec.draft import DFlashHead, DraftRow, Ranker, head_draft
from hf_treespec.draft.heads import Borrowed
from hf_treespec.draft.heads.dflash_draft import DFlashDraft
from hf_treespec.tree import TreeLimits
from tiny import assert_same_text

NEW = 16
WIDE = TreeConfig(max_nodes=40, max_depth=3, max_children=24, growth="static", fallback="off", seed=3)
CHAINS_OF_3 = TreeConfig(max_nodes=3, max_depth=3, max_children=1, fallback="off")


def block_model(target: PreTrainedModel, **changes: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = heads.block_model(target.config.get_text_config().hidden_size, **changes)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.3)
    return model.to(target.dtype)


class Seen:
    """Logits of each block of a call, by row and length of the text in front of it, the anchor included."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks: dict[tuple[int, int], Tensor] = {}
        make = DFlashDraft._block

        def noted(draft: DFlashDraft, rows: Any, limits: Any) -> Tensor:
            out = make(draft, rows, limits)
            for place, (row, limit) in enumerate(zip(rows, limits, strict=True)):
                if limit.max_nodes:
                    self.blocks[row.index, len(row.tokens)] = out[place]
            return out

        monkeypatch.setattr(DFlashDraft, "_block", noted)


# -- beside transformers --


@pytest.mark.parametrize("layers", [[0], [0, 1]], ids=["layer", "with-the-last"])
@pytest.mark.parametrize("kinds", [["full_attention"], ["sliding_attention"]], ids=["full", "sliding"])
def test_blocks_are_those_of_transformers(
    layers: list[int], kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token the same text, and at every length that both draft at the same logits."""
    stock, treed = tiny.build("llama").double(), enable(tiny.build("llama").double())
    window = {"sliding_window": 200}
    draft = block_model(stock, target_layer_ids=layers, layer_types=kinds * 2, **window)
    theirs: dict[int, Tensor] = {}
    get = DFlashTokenCandidateGenerator.get_candidates

    def noted(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        ids, logits = get(self, input_ids, *args, **kwargs)
        if logits is not None:
            theirs[input_ids.shape[1]] = logits[0]
        return ids, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", noted)
    call = {**mask_inputs(1), "assistant_model": draft, "speculation_type": "dflash", **GREEDY, "max_new_tokens": 24}
    plain = stock.generate(**mask_inputs(1), **GREEDY, max_new_tokens=24)
    assert_same_text(plain, stock.generate(**call), width=1)
    ours = Seen(monkeypatch)
    assert_same_text(plain, treed.generate(**call, tree_config=CHAINS_OF_3), width=1)
    both = [length for row, length in ours.blocks if length in theirs]
    assert len(both) > 8 and treed.treespec_stats.draft == "dflash"
    for length in both:
        # (Near the end of the text transformers asks for less.)
        count = len(theirs[length])
        assert float((ours.blocks[0, length][:count].float() - theirs[length].float()).abs().max()) < 1e-4


def test_as_many_tokens_a_round_as_transformers() -> None:
    """With the draft that is never wrong, and chains."""
    target = heads.periodic()
    draft = heads.perfect_block_model(target.get_input_embeddings().weight.detach())
    calls = []
    hook = target.model.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.tensor([[*heads.CYCLE, *heads.CYCLE[:3]]])
    call = {"input_ids": ids, "assistant_model": draft, "max_new_tokens": 1 + 7 * 4, "do_sample": False}
    call["attention_mask"] = torch.ones_like(ids)
    text = target.generate(**call, speculation_type="dflash")
    hook.remove()
    model = enable(target)
    config = TreeConfig(max_nodes=6, max_depth=6, max_children=1, fallback="off")
    assert torch.equal(text, model.generate(**call, tree_config=config))
    # One more for the prompt.
    assert model.treespec_stats.rounds == 4 <= len(calls) - 1


# -- the context --


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_context_is_that_of_the_whole_text(batch: int, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After many rounds with rejections, in rows of unequal length, blocks are those of training."""
    target = tiny.build("llama").double()
    draft = block_model(target, layer_types=["full_attention", "sliding_attention"], target_layer_ids=[0, 1])
    draft.set_attn_implementation(attention)
    model = enable(target)
    seen = Seen(monkeypatch)
    inputs = mask_inputs(batch)
    text = model.generate(**inputs, assistant_model=draft, tree_config=WIDE, max_new_tokens=NEW, **SAMPLED)
    stats = model.treespec_stats
    assert stats.rounds < NEW - 1 and stats.drafted_nodes > 10 * stats.accepted_tokens
    assert draft.config._attn_implementation == attention
    head = DFlashHead.around(draft)
    for row in range(batch):
        tokens = text[row, int((inputs["attention_mask"][row] == 0).sum()) :][None]
        lengths = [length for which, length in seen.blocks if which == row]
        assert len(lengths) > 5
        with torch.no_grad():
            states = target(tokens, output_hidden_states=True).hidden_states
            logits = head(torch.cat(states[1:], -1), tokens, Borrowed.of(target), [n - 1 for n in lengths])
        for place, length in enumerate(lengths):
            assert float((logits[0, place] - seen.blocks[row, length]).abs().max()) < 1e-5


def test_rounds_that_do_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not read waits; an id that no table has, and a forward that fails, change nothing that is kept."""
    target = tiny.build("llama").double()
    head = heads.random_head("dflash", target)
    width = head.features(2).count * head.hidden_size
    draft, twin = (head_draft(head, target, Ranker(97), growth="best_first") for _ in range(2))
    limits = TreeLimits(max_nodes=8, max_depth=3, max_children=3)
    rows = [DraftRow(0, [5, 6, 7]), DraftRow(1, [9, 500, -7, 3])]
    first = [torch.randn(len(row.tokens) - 1, width).double() for row in rows]
    more = [torch.randn(2, width).double(), None]
    with torch.no_grad():
        for source in (draft, twin):
            source.read(first)
        draft.propose(rows, [limits, limits.capped(max_nodes=0)])
        assert draft._kept.lengths == [2, 0]
        rows[0].tokens += [8, 4]
        for source in (draft, twin):
            source.read(more)
        with monkeypatch.context() as patch:
            patch.setattr(head.decoder.norm, "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                draft.propose(rows, [limits] * 2)
        assert draft.propose(rows, [limits] * 2) == twin.propose(rows, [limits] * 2)
        assert draft._kept.lengths == twin._kept.lengths == [4, 3]
        rows[1].tokens[-1] = 500
        assert all(tree.drafted for tree in draft.propose(rows, [limits] * 2))


# -- laws --


def test_the_law_of_a_child_is_the_marginal_of_its_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable(tiny.build("llama").double())
    seen = Seen(monkeypatch)
    kept = []
    propose = DFlashDraft.propose

    def noted(draft: DFlashDraft, rows: Any, limits: Any) -> Any:
        trees = propose(draft, rows, limits)
        kept.append(([len(row.tokens) for row in rows], trees, draft.laws(len(rows))))
        return trees

    monkeypatch.setattr(DFlashDraft, "propose", noted)
    config = WIDE.replace(verification="rrs", max_nodes=14, max_children=3)
    call = {**mask_inputs(3), "assistant_model": block_model(model), "tree_config": config, "max_new_tokens": NEW}
    model.generate(**call, do_sample=True, temperature=0.7, top_k=9)
    checked = 0
    for lengths, trees, laws in kept:
        for row, tree in enumerate(trees):
            for node, place in (laws.rows[row] if laws else {}).items():
                logits = seen.blocks[row, lengths[row]][tree.depths[node]].float() / 0.7
                expected = logits.masked_fill(logits < logits.topk(9).values[-1], float("-inf")).softmax(-1)
                torch.testing.assert_close(laws.laws_RV[place], expected, atol=1e-6, rtol=1e-5)
                checked += tree.depths[node] > 0
    assert checked > 20


# -- whole calls --


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_model_as_assistant_equals_no_tree(sampling: dict[str, Any], batch: int) -> None:
    model = tiny.treed("llama")
    draft = block_model(model)
    before, kept = copy.deepcopy(draft.config.to_dict()), {n: p.clone() for n, p in draft.named_parameters()}
    call = {**mask_inputs(batch), "max_new_tokens": NEW, **sampling}
    plain = model.generate(**call, tree_config=BUSHES.replace(max_nodes=0))
    for more in ({}, {"speculation_type": "dflash"}):
        assert_same_text(plain, model.generate(**call, assistant_model=draft, tree_config=BUSHES, **more))
        assert model.treespec_stats.draft == "dflash"
    joint = BUSHES.replace(draft=("model", "ngram", "recycle"))
    assert_same_text(plain, model.generate(**call, assistant_model=draft, tree_config=joint))
    assert set(model.treespec_stats.drafted_by_source) == {"dflash", "ngram", "recycle"}
    assert draft.config.to_dict() == before
    assert all(torch.equal(p, kept[name]) for name, p in draft.named_parameters())


def muse(**changes: Any) -> PreTrainedModel:
    """The target that transformers made these drafts for, which norms its embeddings and bounds its logits."""
    from transformers import MuseGlimmerConfig, MuseGlimmerForConditionalGeneration

    text = {
        "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.6,
        "sliding_window": 64, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "output_multiplier": 0.5,
    }  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MuseGlimmerConfig(
        text_config=text, vision_config=vision, image_token_id=65, video_token_id=66, out_hidden_size=16,
        projector_hidden_size=16, **changes,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = MuseGlimmerForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    return model.double()


def test_the_target_that_it_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, model = muse(), enable(muse())
    draft = block_model(stock, target_layer_ids=[0, 1], layer_types=["sliding_attention"] * 2, sliding_window=64)
    inputs = {"input_ids": torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(0))}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    theirs: dict[int, Tensor] = {}
    get = DFlashTokenCandidateGenerator.get_candidates

    def noted(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        ids, logits = get(self, input_ids, *args, **kwargs)
        if logits is not None:
            theirs[input_ids.shape[1]] = logits[0]
        return ids, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", noted)
    call = {**inputs, **GREEDY, "max_new_tokens": NEW}
    plain = stock.generate(**call)
    assert_same_text(plain, stock.generate(**call, assistant_model=draft, speculation_type="dflash"), width=1)
    ours = Seen(monkeypatch)
    assert_same_text(plain, model.generate(**call, assistant_model=draft, tree_config=CHAINS_OF_3), width=1)
    both = [length for row, length in ours.blocks if length in theirs]
    assert len(both) > 5
    for length in both:
        count = len(theirs[length])
        # transformers ranks by the raw output of the LM head.
        expected = 20.0 * torch.tanh(theirs[length] * 0.5 / 20.0)
        assert float((ours.blocks[0, length][:count] - expected).abs().max()) < 1e-4


# -- refusals --


def refused(assistant: Any, match: str, target: PreTrainedModel | None = None, **call: Any) -> None:
    model = tiny.treed("llama") if target is None else target
    call = {**mask_inputs(1), "tree_config": BUSHES, "max_new_tokens": 4, **call}
    with pytest.raises(UnsupportedCallError, match=match):
        model.generate(assistant_model=assistant, **call)


def test_what_it_cannot_serve_is_refused() -> None:
    model = tiny.treed("llama")
    draft = block_model(model)
    refused(draft, "speculation_type='other'", speculation_type="other")
    refused(tiny.draft("llama"), "speculation_type='dflash'", speculation_type="dflash")
    refused(heads.random_head("medusa", model), "speculation_type='dflash'", speculation_type="dflash")
    refused(draft, "draft='ngram'", tree_config=BUSHES.replace(draft="ngram"))
    refused(draft, "synced_gpus=True", synced_gpus=True)
    refused(heads.block_model(48), "hidden states of 48 values, and .* has 32")
    refused(heads.block_model(32, target_layer_ids=[2]), r"\(3,\) of its target, and .* has 2 layers")
    # What layer 1, the last one, gives: behind the final norm it could be had.
    unnormed = heads.dflash(32, 97, normed_last=False, model={"target_layer_ids": [1]})
    refused(unnormed, r"\(2,\) of its target, and .* has 2 layers")
    refused(heads.block_model(32, mask_token_id=97), "mask_token_id=97, and the embeddings have 97 rows")
    refused(heads.dflash(16, 97, hidden_size=32), "of width 16 without embeddings of its own")
    refused(heads.dflash(16, 97, hidden_size=32, embeddings=True), "of width 16 without an LM head of its own")
    refused(block_model(model).to("meta"), "whose weights are offloaded, or nowhere")
    flex = block_model(model)
    flex.set_attn_implementation("flex_attention")
    refused(flex, "attn_implementation='flex_attention'")


def test_a_draft_under_another_attention_is_switched_and_given_it_back() -> None:
    model = tiny.treed("llama")
    draft = block_model(model)
    draft.set_attn_implementation("flex_attention")
    call = {**mask_inputs(1), "max_new_tokens": 6, **GREEDY}
    plain = model.generate(**call, tree_config=BUSHES.replace(max_nodes=0))
    config = BUSHES.replace(attention="eager")
    assert_same_text(plain, model.generate(**call, assistant_model=draft, tree_config=config))
    assert draft.config._attn_implementation == "flex_attention"
