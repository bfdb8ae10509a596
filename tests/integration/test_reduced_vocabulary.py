"""Drafts whose LM head is evaluated for some ids: the text is plain's, the logits kept are the model's own."""

from __future__ import annotations

import functools
import gc
import json
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

import tiny
import vision
from calls import GREEDY, SAMPLED
from every_route import ROUTES, mask_inputs
from exact.small import CONFIG, VOCAB, drawn, exact_law, goodness
from hf_treespec import TreeConfig, UnsupportedCallError, UnsupportedModelError, _compat, enable
from hf_treespec.api.vocabulary import check_vocabulary
from hf_treespec.draft import ModelDraft, reduced_rows, with_rows
from hf_treespec.rules import RULES
from tiny import assert_same_text, build, fingerprint, perturbed
from tongues import TEXT, byte_level, ids_of, tiny_llama

OFF = TreeConfig(max_nodes=24, max_depth=6, max_children=4, fallback="off", seed=3)
NEW = 12
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])
batches = pytest.mark.parametrize("batch", [1, 3])


def reduced(vocabulary: Any, config: TreeConfig = OFF, **more: Any) -> TreeConfig:
    return config.replace(draft_options={"model": {"vocabulary": vocabulary, **more}})


def some(size: int) -> list[int]:
    """Two of three ids, in no order."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1)).tolist()
    return order[: 2 * size // 3]


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All trees that draft models propose."""
    trees: list[Any] = []
    plain = ModelDraft.propose

    def propose(self: ModelDraft, *args: Any) -> Any:
        made = plain(self, *args)
        trees.extend(made)
        return made

    monkeypatch.setattr(ModelDraft, "propose", propose)
    return trees


# --- the text --------------------------------------------------------------------------------------------------------


@samplings
@batches
@pytest.mark.parametrize("route", ["mask", "positions", "alibi"])
def test_any_vocabulary_equals_no_tree(route: str, batch: int, sampling: dict[str, Any], proposed: list[Any]) -> None:
    stock, treed, inputs, family = ROUTES[route]
    draft, call = perturbed(stock(family), 0.02), {"max_new_tokens": NEW, **inputs(batch), **sampling}
    expected = treed(family).generate(tree_config=OFF.replace(max_nodes=0), **call)
    if not sampling["do_sample"]:
        assert_same_text(stock(family).generate(**call), expected, width=1)
    ids = some(int(draft.config.vocab_size))
    actual = treed(family).generate(assistant_model=draft, tree_config=reduced(ids), **call)
    assert_same_text(expected, actual, width=1)
    assert treed(family).treespec_stats.accepted_tokens > 0 or route != "mask"
    drafted = {token for tree in proposed for token in tree.tokens[1:]}
    assert drafted <= set(ids) and len(drafted) > 5


@pytest.mark.parametrize(
    ("draft", "dtype", "sampling"),
    [(("model", "ngram"), torch.bfloat16, SAMPLED), (("model",), torch.bfloat16, GREEDY),
     (("model", "ngram"), torch.float64, GREEDY)],
)  # fmt: skip
def test_other_dtypes_and_other_sources_beside(draft: Any, dtype: torch.dtype, sampling: dict[str, Any]) -> None:
    model, call = tiny.treed("llama"), {**mask_inputs(3), "max_new_tokens": NEW, **sampling}
    config = reduced(some(97), OFF.replace(draft=draft))
    expected = model.generate(tree_config=TreeConfig(max_nodes=0, seed=3), **call)
    actual = model.generate(assistant_model=build("llama").to(dtype), tree_config=config, **call)
    assert_same_text(expected, actual)
    assert model.treespec_stats.tokens_per_round > 1.2


@pytest.mark.parametrize(
    ("route", "sampling"), [("mask", GREEDY), ("mask", SAMPLED), ("positions", SAMPLED), ("alibi", SAMPLED)]
)
def test_all_ids_in_another_order_draft_as_none_named(route: str, sampling: dict[str, Any]) -> None:
    stock, treed, inputs, family = ROUTES[route]
    model, draft = treed(family), perturbed(stock(family), 0.02)
    call = {"max_new_tokens": NEW, "assistant_model": draft, **inputs(3), **sampling}
    size = int(draft.config.vocab_size)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(2))
    model.generate(tree_config=OFF, **call)
    expected = model.treespec_stats
    assert expected.accepted_tokens > 0
    model.generate(tree_config=reduced(order), **call)
    assert model.treespec_stats.accepted_by_depth == expected.accepted_by_depth
    assert model.treespec_stats.drafted_by_depth == expected.drafted_by_depth


@batches
def test_a_vocabulary_that_has_the_text_is_accepted_whole(batch: int) -> None:
    """The target drafts for itself: what it says it has guessed, if the ids are there."""
    model, call = tiny.treed("llama"), {**mask_inputs(batch), "max_new_tokens": NEW, "do_sample": False}
    text = tiny.stock("llama").generate(**call)
    said = Counter(text[:, tiny.WIDTH :].flatten().tolist())
    assert len(said) > 8
    model.generate(assistant_model=tiny.stock("llama"), tree_config=reduced(said), **call)
    assert model.treespec_stats.tokens_per_round >= 4
    model.generate(assistant_model=tiny.stock("llama"), tree_config=reduced(said, vocabulary_size=3), **call)
    assert model.treespec_stats.tokens_per_round < 2.5


def test_a_draft_with_a_tokenizer_of_its_own_names_its_own_ids(proposed: list[Any]) -> None:
    one, two = byte_level(400), byte_level(290)
    target, draft = tiny_llama(400), tiny_llama(290)
    ids, call = ids_of(one, TEXT)[:, :12], {"max_new_tokens": NEW, "do_sample": False}
    expected = target.generate(ids, **call)
    known = some(290)
    both = {"tokenizer": one, "assistant_tokenizer": two, "assistant_model": draft}
    actual = enable(target).generate(ids, tree_config=reduced(known), **both, **call)
    assert torch.equal(expected, actual)
    assert target.treespec_stats.drafted_nodes > 0
    drafted = {token for tree in proposed for token in tree.tokens[1:]}
    assert drafted <= set(known) and len(drafted) > 5
    with pytest.raises(UnsupportedCallError, match=r"id 290, and assistant_model has 290: expected ids below 290"):
        target.generate(ids, tree_config=reduced([290]), **both, **call)


# --- the law ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["coupled", *(name for name, rule in RULES.items() if rule.lossless)])
def test_three_tokens_follow_the_target(rule: str) -> None:
    """The draft's law is zero at the ids left out, two of which the target likes."""
    cells, stats = drawn(reduced([8, 2, 5, 0, 6, 3], CONFIG.replace(verification=rule)), 600)
    law = exact_law((("top_k", 0),))
    assert goodness(torch.bincount(cells, minlength=VOCAB**3).double(), law.flatten()) > 1e-5
    assert float(law.sum((1, 2))[[1, 4, 7]].max()) > 0.05
    assert 0 < stats.accepted_tokens < 2 * 600
    if rule != "coupled":
        assert stats.expected_accepted == pytest.approx(stats.accepted_tokens, rel=4 / 600**0.5)


# --- how ids are named -----------------------------------------------------------------------------------------------


def test_every_way_to_name_ids_is_the_same(tmp_path: Path, proposed: list[Any]) -> None:
    ids = some(97)[:30]
    counts = {token: 100 - place for place, token in enumerate(ids)}
    many = {**counts, **{token: 1 for token in range(97) if token not in counts}}
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    (tmp_path / "counts.json").write_text(json.dumps({str(token): count for token, count in many.items()}))
    forms = [
        reduced(ids),
        reduced(torch.tensor(ids)),
        reduced(Counter(counts)),
        reduced(tmp_path / "ids.json"),
        reduced(str(tmp_path / "counts.json"), vocabulary_size=30),
        reduced(ids + [token for token in range(97) if token not in ids], vocabulary_size=30),
        TreeConfig.from_dict(json.loads(reduced(ids).to_json_string())),
    ]
    seen = []
    for config in forms:
        proposed.clear()
        tiny.treed("llama").generate(
            **mask_inputs(1),
            assistant_model=tiny.draft("llama"),
            tree_config=config,
            max_new_tokens=8,
            do_sample=False,
        )
        seen.append([(tree.tokens, tree.parents) for tree in proposed])
    assert len(seen[0]) > 1 and all(one == seen[0] for one in seen)


def test_a_file_that_has_changed_is_read_again(tmp_path: Path, proposed: list[Any]) -> None:
    file = tmp_path / "ids.json"
    for ids in ([5, 9, 30], [40, 41, 42, 43]):
        proposed.clear()
        file.write_text(json.dumps(ids))
        tiny.treed("llama").generate(
            **mask_inputs(1), assistant_model=tiny.draft("llama"), tree_config=reduced(file), max_new_tokens=4,
            do_sample=False,
        )  # fmt: skip
        assert {token for tree in proposed for token in tree.tokens[1:]} <= set(ids)


# --- the LM head -----------------------------------------------------------------------------------------------------

_SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
HEADS: dict[str, Callable[[], PreTrainedModel]] = {
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=True)),
    "untied": lambda: build("llama"),
    "bias": lambda: PhiForCausalLM(PhiConfig(**{**_SIZES, "num_key_value_heads": 4})),
    "softcap": lambda: build("gemma2"),
    "scale": lambda: CohereForCausalLM(CohereConfig(**_SIZES, logit_scale=0.25)),
    "scaling": lambda: GraniteForCausalLM(GraniteConfig(**_SIZES, logits_scaling=7.0)),
    "inside": lambda: vision.build_reader("llava"),
}


@pytest.mark.parametrize("kind", HEADS)
def test_logits_are_the_models_own(kind: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = HEADS[kind]().eval()
    head = model.get_output_embeddings()
    if head.bias is not None:
        nn.init.normal_(head.bias)
    before, tokens = fingerprint(model), torch.tensor([[5, 9, 2, 30], [7, 7, 1, 11]])
    ids = some(_compat.vocabulary_size(model))
    assert _compat.lm_head_fault(model) is None
    view = with_rows(model, ids)
    with torch.no_grad():
        whole, found = model(tokens).logits, view(tokens).logits
    assert found.shape[-1] == len(ids) < whole.shape[-1] == _compat.vocabulary_size(model)
    torch.testing.assert_close(found, whole[..., ids])
    assert model.get_output_embeddings() is head and view.get_output_embeddings() is not head
    assert fingerprint(model) == before and view.config is model.config
    # What the rows cost is all that is not shared.
    own = {id(parameter) for parameter in model.parameters()}
    extra = sum(parameter.numel() for parameter in view.parameters() if id(parameter) not in own)
    assert extra == len(ids) * (32 + (head.bias is not None)) or kind == "inside"


def test_rows_are_gathered_once_and_go_with_the_model() -> None:
    model, ids = build("llama"), [3, 9, 20]
    rows = reduced_rows(model, ids)
    assert reduced_rows(model, ids) is rows and reduced_rows(model, [9, 3, 20]) is not rows
    rows = reduced_rows(model, ids)
    with torch.no_grad():
        model.lm_head.weight[9] += 1
    changed = reduced_rows(model, ids)
    torch.testing.assert_close(changed.weight, rows.weight + torch.tensor([[0.0], [1.0], [0.0]]))
    assert reduced_rows(model.double(), ids).weight.dtype == torch.float64
    with torch.inference_mode():
        assert not reduced_rows(model, [4, 5]).weight.is_inference()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_methods_that_accelerate_has_replaced_are_the_views_own() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model, draft = tiny.treed("llama"), perturbed(tiny.stock("llama"))
    call = {**mask_inputs(1), "max_new_tokens": NEW, "do_sample": False, "assistant_model": draft}
    model.generate(tree_config=reduced(some(97)), **call)
    expected = model.treespec_stats.accepted_by_depth
    for module in (draft, draft.lm_head, draft.model.layers[0]):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    model.generate(tree_config=reduced(some(97)), **call)
    assert model.treespec_stats.accepted_by_depth == expected


def test_the_whole_head_does_not_run() -> None:
    draft = perturbed(tiny.stock("llama"))
    call = {**mask_inputs(1), "max_new_tokens": 8, "do_sample": False, "assistant_model": draft}
    tiny.treed("llama").generate(tree_config=reduced(some(97)), **call)
    handle = draft.lm_head.register_forward_hook(lambda *_: pytest.fail("all rows were evaluated"))
    tiny.treed("llama").generate(tree_config=reduced(some(97)), **call)
    handle.remove()
    tiny.treed("llama").generate(tree_config=OFF, **call)


# --- refusals --------------------------------------------------------------------------------------------------------


def refused(error: type[Exception], match: str, config: TreeConfig, **call: Any) -> None:
    model = tiny.treed("llama")
    handle = model.register_forward_pre_hook(lambda *_: pytest.fail("no forward may come before the refusal"))
    call = {"assistant_model": tiny.draft("llama"), **mask_inputs(1), "max_new_tokens": 4, "do_sample": False, **call}
    try:
        with pytest.raises(error, match=match):
            model.generate(tree_config=config, **call)
    finally:
        handle.remove()


def test_ids_that_are_not_the_drafts_are_refused(tmp_path: Path) -> None:
    where = r"draft_options=...\): model\['vocabulary'\]: "
    refused(UnsupportedCallError, where + ".*none.json: cannot be read", reduced(tmp_path / "none.json"))
    for text, said in (("[1, 2", "cannot be parsed"), ("[1, 1]", "different token ids"), ('{"a": 1}', "token ids")):
        (tmp_path / "bad.json").write_text(text)
        refused(UnsupportedCallError, where + f".*bad.json: .*{said}", reduced(tmp_path / "bad.json"))
    sizes = r"id 97, and assistant_model has 97 and the target has 97: expected ids below 97"
    refused(UnsupportedCallError, where + "it names the " + sizes, reduced([3, 97]))
    with pytest.raises(UnsupportedCallError, match="synced_gpus=True with .*vocabulary"):
        models = tiny.treed("llama"), reduced([3, 9]), tiny.draft("llama")
        check_vocabulary(*models, {"synced_gpus": True}, translated=False)


class Unread(LlamaForCausalLM):
    """Computes its logits past the module that it names."""

    # `generate` reads the signature.
    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        hidden = self.model.seen[:, -out.logits.shape[1] :]
        out.logits = hidden @ self.model.embed_tokens.weight.T
        return out


class Table(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.rows.T


def test_a_draft_whose_head_cannot_be_reduced_is_refused() -> None:
    def made(kind: str) -> PreTrainedModel:
        draft = build("llama")
        if kind == "unread":
            draft.__class__ = Unread
            draft.model.register_forward_hook(lambda module, _, out: setattr(module, "seen", out.last_hidden_state))
        elif kind == "table":
            draft.lm_head = Table(draft.lm_head.weight.detach())
        elif kind == "unnamed":
            draft.get_output_embeddings = lambda: None  # type: ignore[method-assign]
        elif kind == "compiled":
            draft.compile(backend="eager")
        else:
            draft.register_forward_hook(lambda module, args, out: setattr(out, "logits", out.logits.cumsum(-1)))
        return draft

    for kind, said in {
        "unread": "it gives 97 logits a token", "table": "Table, whose weights are no plain matrix",
        "unnamed": "names no LM head", "compiled": "it is compiled", "mixed": "it gives other logits",
    }.items():  # fmt: skip
        message = rf"cannot draft with a reduced vocabulary: .*{said}.*; leave draft_options"
        refused(UnsupportedModelError, message, reduced(some(97)), assistant_model=made(kind))


def test_weights_that_lie_elsewhere_are_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    draft = accelerate.cpu_offload(build("llama"), execution_device="cpu")
    refused(UnsupportedModelError, "LM head lie elsewhere between forwards", reduced(some(97)), assistant_model=draft)
