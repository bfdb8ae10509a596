"""A draft model and sources of the text in one tree, in whole calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from calls import GREEDY, SAMPLED
from hf_treespec import TreeConfig, UnsupportedCallError, enable
from hf_treespec.draft import ModelDraft
from tiny import assert_same_text, build, prompt
from tongues import TEXT, byte_level, encode, tiny_llama

batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])
OFF = TreeConfig(
    max_nodes=16, max_depth=6, max_children=3, fallback="off", seed=3, draft=("model", "ngram", "recycle")
)
NEW = 24


def inputs(batch: int, family: str = "llama") -> dict[str, Tensor]:
    ids, mask = prompt(family, batch)
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("fallback", ["off", "auto"])
@batches
@samplings
def test_the_text_is_that_of_no_tree(family: str, fallback: str, batch: int, sampling: dict[str, Any]) -> None:
    model, config = tiny.treed(family), OFF.replace(fallback=fallback)
    call = {**inputs(batch, family), "max_new_tokens": NEW, "eos_token_id": [5, 9, 31], "pad_token_id": 0, **sampling}
    plain = model.generate(**call, tree_config=config.replace(max_nodes=0), assistant_model=tiny.draft(family))
    if not sampling["do_sample"]:
        assert_same_text(tiny.stock(family).generate(**call), plain)
    for draft in (OFF.draft, ("ngram", "model")):
        one = model.generate(**call, tree_config=config.replace(draft=draft), assistant_model=tiny.draft(family))
        assert_same_text(plain, one)
        stats = model.treespec_stats
        assert stats.draft == "+".join(("model", *[name for name in draft if name != "model"]))
        assert set(stats.drafted_by_source) <= set(draft) and stats.drafted_by_source["model"] > 0


@batches
@samplings
def test_a_model_that_is_always_right_is_accepted_whole(batch: int, sampling: dict[str, Any]) -> None:
    """Its cache must follow the joint tree's paths, or it would soon be wrong."""
    model = enable(build("llama"))
    with torch.no_grad():
        # Sure of itself, so that the nodes of the others do not take the place of its own.
        model.lm_head.weight *= 40
    call = {**inputs(batch), "max_new_tokens": 31, **sampling, "tree_config": OFF.replace(max_depth=4)}
    model.generate(**call, assistant_model=model)
    stats = model.treespec_stats
    assert stats.rounds == 6 and stats.accepted_by_source["model"] == stats.accepted_tokens == 24 * batch
    assert stats.draft_forward_seconds > 0


@samplings
def test_a_costly_model_is_left_out(sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    propose = ModelDraft.propose

    def counted(self: ModelDraft, *args: Any) -> Any:
        nonlocal asked
        asked += 1
        return propose(self, *args)

    monkeypatch.setattr(ModelDraft, "propose", counted)
    target, noise = enable(build("llama")), build("llama")
    with torch.no_grad():
        # What it says has nothing to do with the target.
        noise.lm_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    call = {**inputs(1), "max_new_tokens": 120, **sampling}
    config = OFF.replace(fallback="auto", draft=("model", "ngram"))
    plain = target.generate(**call, tree_config=config.replace(max_nodes=0), assistant_model=noise)
    assert_same_text(plain, target.generate(**call, tree_config=config, assistant_model=noise))
    assert 0 < asked < target.treespec_stats.rounds / 2


@samplings
def test_a_draft_of_another_tokenizer_joins(sampling: dict[str, Any]) -> None:
    ours, theirs = byte_level(400), byte_level(290)
    model = enable(tiny_llama(len(ours), seed=1))
    call = {
        "input_ids": torch.tensor([encode(ours, TEXT[:40])]), "max_new_tokens": NEW, **sampling, "tokenizer": ours,
        "assistant_model": tiny_llama(len(theirs), seed=2), "assistant_tokenizer": theirs,
    }  # fmt: skip
    plain = model.generate(**call, tree_config=OFF.replace(max_nodes=0))
    assert_same_text(plain, model.generate(**call, tree_config=OFF))
    assert model.treespec_stats.drafted_by_source["retokenized"] > 0


def test_what_cannot_be_joined_is_refused() -> None:
    model, other = tiny.treed("llama"), tiny.draft("llama")
    call: dict[str, Any] = {**inputs(1), "max_new_tokens": 4}
    with pytest.raises(UnsupportedCallError, match=r"draft=\('model', 'ngram'\)\) without assistant_model"):
        model.generate(**call, tree_config=OFF.replace(draft=("model", "ngram")))
    with pytest.raises(UnsupportedCallError, match=r"or \('model', 'ngram', 'recycle'\) for one tree of all"):
        model.generate(**call, tree_config=OFF.replace(draft=("ngram", "recycle")), assistant_model=other)
    rule = OFF.replace(draft=("model", "ngram"), verification="rrsw")
    with pytest.raises(UnsupportedCallError, match="nodes of a joint tree are not drawn from one law"):
        model.generate(**call, do_sample=True, tree_config=rule, assistant_model=other)
    plain = tiny.stock("llama").generate(**call, do_sample=False)
    assert_same_text(plain, model.generate(**call, do_sample=False, tree_config=rule, assistant_model=other))
