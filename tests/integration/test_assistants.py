"""Assistants of every kind: the target itself, adapters, quantised models, other dtypes; what their configs say."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel

from calls import BUSHES, GREEDY
from hf_treespec import (
    TreeConfig,
    TreeSpecWarning,
    UnsupportedCallError,
    UnsupportedModelError,
    _compat,
    enable,
    is_supported,
)
from hf_treespec.api.outliers import has_shared_outliers, without_shared_outliers
from tiny import assert_same_text, build, draft, fingerprint, perturbed, prompt, reference, stock, treed

SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0}
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t1"])
batches = pytest.mark.parametrize("batch", [1, 3])
NEW = 16


@pytest.fixture(autouse=True)
def said_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat.warning, "_WARNED", set())


def compare(plain: Any, model: Any, batch: int, **call: Any) -> Any:
    """Plain generate() of the first model, the same with trees of the second; the statistics."""
    ids, mask = prompt("llama", batch)
    ours = {key: call.pop(key) for key in ("assistant_model", "tree_config") if key in call}
    call = {"max_new_tokens": NEW, "do_sample": False, **call}
    expected = reference(plain, ids, mask, seed=3, **call)
    actual = model.generate(input_ids=ids, attention_mask=mask, **{"tree_config": BUSHES, **ours, **call})
    assert_same_text(expected, actual)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner.treespec_stats


# --- the same model, other dtypes ------------------------------------------------------------------------------------


@batches
@samplings
def test_a_target_drafts_for_itself(batch: int, sampling: dict[str, Any]) -> None:
    stats = compare(stock("llama"), treed("llama"), batch, assistant_model=treed("llama"), **sampling)
    # With the same noise and the same weights every first choice is right.
    assert stats.tokens_per_round > 3.0


@samplings
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_draft_of_another_dtype(dtype: torch.dtype, sampling: dict[str, Any]) -> None:
    other = build("llama").to(dtype)
    stats = compare(stock("llama"), treed("llama"), 3, assistant_model=other, **sampling)
    assert stats.acceptance_rate > 0.05 and stats.tokens_per_round > 2.0


@samplings
def test_a_target_in_double_precision_with_a_small_draft(sampling: dict[str, Any]) -> None:
    plain, model = build("llama").double(), enable(build("llama").double())
    stats = compare(plain, model, 3, assistant_model=build("llama").bfloat16(), **sampling)
    assert stats.tokens_per_round > 2.0


@batches
def test_a_target_in_bfloat16_chooses_what_is_best_up_to_rounding(batch: int) -> None:
    # Equality is promised from float32 on: bfloat16 rounds otherwise in another batch shape.
    plain, model = build("llama").bfloat16(), enable(build("llama").bfloat16())
    ids, mask = prompt("llama", batch)
    out = model.generate(
        ids,
        attention_mask=mask,
        assistant_model=draft("llama"),
        tree_config=BUSHES,
        max_new_tokens=NEW,
        do_sample=False,
    )
    for row, sequence in enumerate(out):
        tokens = sequence[int(mask[row].argmax()) :]
        with torch.no_grad():
            logits = plain(tokens[None]).logits[0, -NEW - 1 : -1]
        best, chosen = logits.amax(-1), logits.gather(-1, tokens[-NEW:, None])[:, 0]
        assert float((best - chosen).max()) < 0.05 * float(logits.abs().max())
    assert model.treespec_stats.tokens_per_round > 1.5


def test_the_draft_is_read_where_the_processors_are() -> None:
    from hf_treespec.draft import ModelDraft

    places: list[Any] = []

    class Placed(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.to:
                places.append(args[1])
            return super().__torch_function__(func, types, args, kwargs or {})

    from transformers import LogitsProcessorList, TemperatureLogitsWarper

    processors = LogitsProcessorList([TemperatureLogitsWarper(2.0)])
    source = ModelDraft(
        draft("llama"), growth="best_first", vocab_size=97, processors=processors, device=torch.device("cpu", 0)
    )
    source.rank(torch.randn(2, 97).as_subclass(Placed), [None, None], 3)
    assert torch.device("cpu", 0) in places


# --- adapters --------------------------------------------------------------------------------------------------------


def with_lora(model: PreTrainedModel, seed: int = 2) -> Any:
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
        return peft.get_peft_model(model, config).eval()


@batches
@samplings
def test_a_lora_model_as_target(batch: int, sampling: dict[str, Any]) -> None:
    plain, model = with_lora(build("llama")), enable(with_lora(build("llama")))
    ids, mask = prompt("llama", batch)
    call = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    without = stock("llama").generate(ids, **call)
    assert not torch.equal(plain.get_base_model().generate(ids, **call), without), "the adapter must matter"
    own = plain.get_base_model()
    stats = compare(own, model, batch, assistant_model=perturbed(own), **sampling)
    assert stats.accepted_tokens > 0
    with model.disable_adapter():
        compare(stock("llama"), model, batch, **sampling)


@samplings
def test_a_lora_model_as_draft(sampling: dict[str, Any]) -> None:
    # The draft is the target's weights and an adapter: right now and then.
    adapter = with_lora(build("llama"))
    before = fingerprint(adapter.get_base_model())
    stats = compare(stock("llama"), treed("llama"), 3, assistant_model=adapter, **sampling)
    assert stats.draft == "model" and stats.drafted_nodes > 0
    assert fingerprint(adapter.get_base_model()) == before


def test_an_adapter_drafts_for_its_own_base() -> None:
    # After get_peft_model both names mean one module; the target is then the adapted model too.
    base = enable(build("llama"))
    adapter = with_lora(base)
    stats = compare(with_lora(build("llama")).get_base_model(), base, 1, assistant_model=adapter)
    assert stats.tokens_per_round > 3.0


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_are_refused_in_a_target_and_left_out_of_a_draft(kind: str) -> None:
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(build("llama"), config).eval()
    with pytest.warns(TreeSpecWarning, match="drafts without its virtual tokens"):
        compare(stock("llama"), treed("llama"), 1, assistant_model=model)
    enable(model)
    ids, mask = prompt("llama", 1)
    forwards: list[int] = []
    model.get_base_model().register_forward_pre_hook(lambda *_: forwards.append(1))
    with pytest.raises(UnsupportedCallError, match="PEFT model of type PR.*virtual tokens.*LoRA"):
        model.generate(input_ids=ids, attention_mask=mask, tree_config=BUSHES, max_new_tokens=4)
    assert forwards == []


# --- quantised weights -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    # Wide enough for the blocks of the quantiser.
    build("llama", hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    # bitsandbytes tells of the dtype of its inputs at every layer.
    loggers = [logging.getLogger(name) for name in ("bitsandbytes", "bitsandbytes.autograd._functions")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


QUANTISED: dict[str, dict[str, Any]] = {
    "4bit": {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    "8bit": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    "8bit_outliers": {"load_in_8bit": True},
}


def quantised(saved: Path, name: str) -> PreTrainedModel:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LlamaForCausalLM.from_pretrained(
            saved,
            quantization_config=BitsAndBytesConfig(**QUANTISED[name]),
            device_map={"": "cpu"},
            dtype=torch.float32,
        )


@samplings
@pytest.mark.parametrize("name", ["4bit", "nf4", "8bit"])
def test_a_quantised_target_is_its_own_plain(saved: Path, name: str, sampling: dict[str, Any]) -> None:
    plain, model = quantised(saved, name), enable(quantised(saved, name))
    full = LlamaForCausalLM.from_pretrained(saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TreeSpecWarning)
        for batch in (1, 3):
            stats = compare(plain, model, batch, assistant_model=full, **sampling)
            assert stats.accepted_tokens > 0


@pytest.mark.parametrize("name", list(QUANTISED))
def test_a_quantised_draft_of_the_same_weights(saved: Path, name: str) -> None:
    full = LlamaForCausalLM.from_pretrained(saved)
    model = enable(LlamaForCausalLM.from_pretrained(saved))
    with warnings.catch_warnings():
        warnings.simplefilter("error", TreeSpecWarning)
        stats = compare(full, model, 3, assistant_model=quantised(saved, name))
    assert stats.tokens_per_round > 1.3


class Coarse(torch.nn.Linear):
    """Rounds all tokens of a forward on one scale, as dynamic quantisation by tensors does."""

    def forward(self, input: Tensor) -> Tensor:
        scale = input.abs().max() / 20
        return super().forward((input / scale).round() * scale)


def coarse(model: PreTrainedModel) -> PreTrainedModel:
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = Coarse
    return model


@batches
@samplings
def test_a_draft_whose_tokens_disturb_each_other_drafts(batch: int, sampling: dict[str, Any]) -> None:
    target, other = treed("llama"), coarse(build("llama"))
    assert not is_supported(other).ok and is_supported(stock("llama")).ok
    with pytest.warns(TreeSpecWarning, match="gives other logits for a token when others share its forward") as said:
        stats = compare(stock("llama"), target, batch, assistant_model=other, **sampling)
    assert len(said) == 1 and stats.tokens_per_round > 1.5
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM.*cannot take a tree"):
        enable(other)


@samplings
def test_a_quantised_draft_with_a_reduced_vocabulary(saved: Path, sampling: dict[str, Any]) -> None:
    full, model = LlamaForCausalLM.from_pretrained(saved), enable(LlamaForCausalLM.from_pretrained(saved))
    config = BUSHES.replace(draft_options={"model": {"vocabulary": range(3, 80)}})
    for name in ("nf4", "8bit"):
        stats = compare(full, model, 3, assistant_model=quantised(saved, name), tree_config=config, **sampling)
        assert stats.tokens_per_round > 1.3


def test_outlier_columns_make_tokens_depend_on_each_other_and_that_is_said(saved: Path) -> None:
    model = quantised(saved, "8bit_outliers")
    ids, _ = prompt("llama", 1)
    with torch.no_grad():
        together = model(ids).logits[0, 4]
        alone = model(ids[:, :5]).logits[0, 4]
    # Plain decoding itself depends on what shares a forward: there is no text to be equal to.
    assert float((together - alone).abs().max()) > 1e-3
    with without_shared_outliers(model):
        assert not has_shared_outliers(model)
        torch.testing.assert_close(model(ids).logits[0, 4], model(ids[:, :5]).logits[0, 4], atol=1e-4, rtol=1e-4)
    assert is_supported(model).ok and has_shared_outliers(model)
    enable(model)
    with pytest.warns(TreeSpecWarning, match="llm_int8_threshold=0.0"):
        out = model.generate(ids, tree_config=BUSHES, max_new_tokens=NEW, do_sample=False)
    assert out.shape == (1, ids.shape[1] + NEW)
    layer = model.model.layers[0].mlp.up_proj
    assert layer.state.threshold == 6.0


# --- what configs say about drafting ---------------------------------------------------------------------------------


def depth_of(model: PreTrainedModel) -> int:
    return max((depth for depth, nodes in enumerate(model.treespec_stats.drafted_by_depth, 1) if nodes), default=0)


def fresh_pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    return enable(build("llama")), perturbed(stock("llama"))


WHERE = ["call", "config", "target", "assistant"]


def said(where: str, model: PreTrainedModel, assistant: PreTrainedModel, **settings: Any) -> dict[str, Any]:
    """Arguments of a call that says something about drafting in one of the places where one can."""
    if where == "call":
        return settings
    if where == "config":
        return {"generation_config": GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, **settings)}
    for name, value in settings.items():
        setattr((model if where == "target" else assistant).generation_config, name, value)
    return {}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("ahead", "deepest"), [(1, 1), (3, 3), (2.0, 2), (0, 0), (50, 6)])
def test_num_assistant_tokens_bounds_the_depth(where: str, ahead: Any, deepest: int) -> None:
    model, assistant = fresh_pair()
    extra = said(where, model, assistant, num_assistant_tokens=ahead)
    if "generation_config" not in extra:
        extra = {"max_new_tokens": NEW, "do_sample": False, **extra}
    ids, mask = prompt("llama", 1)
    expected = reference(stock("llama"), ids, mask, max_new_tokens=NEW)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TreeSpecWarning)
        actual = model.generate(ids, attention_mask=mask, assistant_model=assistant, tree_config=BUSHES, **extra)
    assert torch.equal(actual, expected)
    assert depth_of(model) == deepest


def test_the_call_goes_before_the_assistant() -> None:
    model, assistant = fresh_pair()
    assistant.generation_config.num_assistant_tokens = 4
    compare(stock("llama"), model, 1, assistant_model=assistant)
    assert depth_of(model) == 4
    ids, mask = prompt("llama", 1)
    call = {"attention_mask": mask, "assistant_model": assistant, "tree_config": BUSHES, "max_new_tokens": NEW}
    model.generate(ids, num_assistant_tokens=2, do_sample=False, **call)
    assert depth_of(model) == 2


@pytest.mark.parametrize("ahead", [-1, True, "3", float("inf"), float("nan")])
def test_what_is_no_number_of_tokens_is_refused(ahead: Any) -> None:
    model, assistant = fresh_pair()
    assistant.generation_config.num_assistant_tokens = ahead
    ids, _ = prompt("llama", 1)
    with pytest.raises(UnsupportedCallError, match=r"num_assistant_tokens=.*expected an integer of at least 0"):
        model.generate(ids, assistant_model=assistant, tree_config=BUSHES, max_new_tokens=4)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    "setting", [{"num_assistant_tokens_schedule": "heuristic"}, {"assistant_confidence_threshold": 0.7}], ids=str
)
def test_what_has_no_meaning_for_a_tree_is_said_once(where: str, setting: dict[str, Any]) -> None:
    model, assistant = fresh_pair()
    ids, mask = prompt("llama", 1)
    expected = reference(stock("llama"), ids, mask, max_new_tokens=NEW)
    extra = said(where, model, assistant, **setting)
    if "generation_config" not in extra:
        extra = {"max_new_tokens": NEW, "do_sample": False, **extra}
    call = {"attention_mask": mask, "assistant_model": assistant, "tree_config": BUSHES, **extra}
    name = next(iter(setting))
    with pytest.warns(TreeSpecWarning, match=f"{name}=.*no effect together with tree_config"):
        assert torch.equal(model.generate(ids, **call), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TreeSpecWarning)
        model.generate(ids, **call)


@pytest.mark.parametrize(
    "setting", [{"num_assistant_tokens_schedule": "constant"}, {"assistant_confidence_threshold": 0}]
)
def test_what_asks_for_nothing_is_not_mentioned(setting: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", TreeSpecWarning)
        model, assistant = fresh_pair()
        for name, value in setting.items():
            setattr(assistant.generation_config, name, value)
        compare(stock("llama"), model, 1, assistant_model=assistant)


@samplings
def test_no_config_is_changed(sampling: dict[str, Any]) -> None:
    model, assistant = fresh_pair()
    assistant.generation_config.update(
        num_assistant_tokens=3, num_assistant_tokens_schedule="heuristic", assistant_confidence_threshold=0.6
    )
    generation = GenerationConfig(max_new_tokens=NEW, pad_token_id=0, num_assistant_tokens=5, **sampling)
    tree = TreeConfig(max_nodes=9, seed=1)
    parts = (model.config, model.generation_config, assistant.config, assistant.generation_config, generation, tree)
    before = copy.deepcopy([part.to_dict() for part in parts])
    prints = fingerprint(model), fingerprint(assistant)
    ids, mask = prompt("llama", 3)
    with pytest.warns(TreeSpecWarning):
        for _ in range(2):
            model.generate(
                ids, attention_mask=mask, generation_config=generation, assistant_model=assistant, tree_config=tree
            )
    assert [part.to_dict() for part in parts] == before
    assert (fingerprint(model), fingerprint(assistant)) == prints


# --- other speculation -----------------------------------------------------------------------------------------------

RIVALS: dict[str, Any] = {
    "prompt_lookup_num_tokens": 3,
    "assistant_ensemble_weight": 0.5,
}


@pytest.mark.parametrize("name", list(RIVALS))
def test_other_speculation_is_refused_by_name(name: str) -> None:
    ids, _ = prompt("llama", 1)
    with pytest.raises(UnsupportedCallError, match=rf"{name}=.* with tree_config: .*leave {name} out"):
        treed("llama").generate(ids, tree_config=BUSHES, max_new_tokens=4, **{name: RIVALS[name]})
