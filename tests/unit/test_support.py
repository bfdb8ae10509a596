"""Who takes a tree: read off the class and config, proven by the probe, without a trace on the model."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MusicgenDecoderConfig,
    MusicgenForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers import LlamaForCausalLM as Llama

import tiny
from hf_treespec import Support, disable, enable, is_supported
from hf_treespec.api import support
from hf_treespec.api.probe import probe_masks
from hf_treespec.api.support import unwrap

SIZES: dict[str, Any] = {
    "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.5,
}  # fmt: skip


def llama(cls: type[Llama] = Llama, **changes: Any) -> Llama:
    torch.manual_seed(3)
    return cls(LlamaConfig(**{**SIZES, **changes})).eval()


def gpt2() -> GPT2LMHeadModel:
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=37, n_embd=16, n_layer=2, n_head=2, n_positions=32, **ids))


class ForgetfulLlama(Llama):
    """Builds its own causal mask over the cache, as some remote code does, and so overlooks the tree's."""

    @functools.wraps(Llama.forward)
    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        past = 0 if cache is None else cache.get_seq_length()
        causal = torch.ones(input_ids.shape[1], past + input_ids.shape[1]).tril(past).log()[None, None]
        return super().forward(input_ids=input_ids, attention_mask=causal, position_ids=position_ids, **kwargs)


class CountingPositionsLlama(Llama):
    """Takes positions and does not use them."""

    @functools.wraps(Llama.forward)
    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


class MixingLlama(ForgetfulLlama):
    """Overlooks the mask of a tree, and its rows look at one another."""

    @functools.wraps(Llama.forward)
    def forward(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        outputs.logits = outputs.logits + outputs.logits.sum(0, keepdim=True)
        return outputs


class RaisingLlama(Llama):
    @functools.wraps(Llama.forward)
    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        raise KeyError("needs pixels")


class AloneLlama(Llama):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._sample(*args, **kwargs)


class HandingOnLlama(Llama):
    """Runs the generation of transformers from another method, inside of a function of its own."""

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.parts(*args, **kwargs)

    def parts(self, *args: Any, **kwargs: Any) -> Any:
        outer = super()

        def one() -> Any:
            return outer.generate(*args, **kwargs)

        return one()


class AssertingLlama(Llama):
    @functools.wraps(Llama.forward)
    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        assert input_ids.shape[1] == 1, "one token a call"
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


class LoopingLlama(Llama):
    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        return super()._sample(*args, **kwargs)


class CachelessLlama(Llama):
    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False


def with_recurrent_layer() -> Llama:
    model = llama()
    model.config.layer_types = ["full_attention", "linear_attention"]
    return model


def under_flex() -> Llama:
    model = llama()
    model.set_attn_implementation("flex_attention")
    return model


SUPPORTED: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "eager": lambda: llama(attn_implementation="eager"),
    "bfloat16": lambda: llama().to(torch.bfloat16),
    "sliding": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)),
    "learned positions": gpt2,
    "generate that hands on": lambda: llama(HandingOnLlama),
    "five tokens": lambda: llama(vocab_size=5),
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_models_that_take_a_tree(name: str) -> None:
    assert is_supported(SUPPORTED[name]()) == Support(True, "mask", "a probe tree equals its paths")


BY_PATHS: dict[str, Callable[[], Any]] = {
    "encoder": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=37, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    ),
    "own mask": lambda: llama(ForgetfulLlama),
}


@pytest.mark.parametrize("name", BY_PATHS)
def test_models_that_read_a_tree_path_by_path(name: str) -> None:
    reason = "a probe tree equals its paths when each is a batch row"
    assert is_supported(BY_PATHS[name]()) == Support(True, "paths", reason)


BY_SLOTS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "alibi": (
        lambda: BloomForCausalLM(BloomConfig(vocab_size=37, hidden_size=16, n_layer=1, n_head=2)),
        "mask+alibi", "its bias by distance taken by depth",
    ),
    "alibi with positions": (
        lambda: FalconForCausalLM(
            FalconConfig(vocab_size=37, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, alibi=True)
        ),
        "mask+alibi", "its bias by distance taken by depth",
    ),
    "own positions": (
        lambda: llama(CountingPositionsLlama),
        "mask+positions", "the outputs of model.rotary_emb taken by depth",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_SLOTS)
def test_models_that_count_by_cache_slots(name: str) -> None:
    make, route, how = BY_SLOTS[name]
    assert is_supported(make()) == Support(True, route, f"a probe tree equals its paths with {how}")


def test_a_model_that_brings_its_own_cache_is_read_path_by_path() -> None:
    support = is_supported(llama(CachelessLlama))
    assert (support.ok, support.route) == (True, "paths") and "two rounds on its state" in support.reason


def test_a_model_that_reads_one_token_a_forward_is_told_from_one_that_reads_more() -> None:
    # Its logits hardly hang on the state; that this is forgotten shows in the state alone.
    model = MambaForCausalLM(MambaConfig(vocab_size=37, hidden_size=8, state_size=2, num_hidden_layers=1))
    support = is_supported(model)
    assert (support.ok, support.route) == (True, "token-by-token") and "of its state was off" in support.reason


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no model": (lambda: nn.Linear(2, 2), "Linear is no transformers PreTrainedModel"),
    "none": (lambda: None, "NoneType is no transformers PreTrainedModel"),
    "no head": (lambda: LlamaModel(LlamaConfig(**SIZES)), "the model cannot generate"),
    "codebooks": (
        lambda: MusicgenForCausalLM(
            MusicgenDecoderConfig(
                vocab_size=37, hidden_size=8, ffn_dim=8, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
            )
        ),
        "each of its steps reads 4 tokens at once",
    ),
    "own generate": (lambda: llama(AloneLlama), "a generate() of its own, which does not run that of transformers"),
    "own loop": (lambda: llama(LoopingLlama), "decoding loop of its own"),
    "mixed layers": (with_recurrent_layer, "'LinearAttentionLayer' object has no attribute 'update'"),
    "mixed rows": (
        lambda: llama(MixingLlama),
        "it does not read the paths of a tree as batch rows alike",
    ),
    "four tokens": (lambda: llama(vocab_size=4), "its vocabulary of 4 ids is too small for the probe"),
    "asserts": (lambda: llama(AssertingLlama), "the probe forward raised AssertionError: one token a call"),
    "raises": (lambda: llama(RaisingLlama), "the probe forward raised KeyError: 'needs pixels'"),
}


def test_a_model_under_another_attention_is_told_how_to_call() -> None:
    support = is_supported(under_flex())
    assert support.ok and "runs 'flex_attention', so calls need TreeConfig(attention='sdpa')" in support.reason


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_do_not_and_why(name: str) -> None:
    build, reason = REFUSED[name]
    support = is_supported(build())
    assert (support.ok, support.route) == (False, "refuse")
    assert reason in support.reason


def test_the_wrong_models_above_are_right_on_a_plain_text() -> None:
    """Else the probe would refuse them for another reason than it should."""
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    wanted = llama()(input_ids=ids).logits
    for cls in (ForgetfulLlama, CountingPositionsLlama):
        found = llama(cls)(input_ids=ids, position_ids=torch.arange(5)[None]).logits
        torch.testing.assert_close(found, wanted)


def test_an_exception_under_masks_is_not_remembered_for_other_routes() -> None:
    class OnceRaisingLlama(MoodyLlama):
        """Fails in the first probe only."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().forward(*args, **kwargs)
            finally:
                self.error = None

    OnceRaisingLlama.forward = functools.wraps(Llama.forward)(OnceRaisingLlama.forward)
    model = llama(OnceRaisingLlama)
    model.error = RuntimeError("device busy")
    assert is_supported(model).route == "mask+positions"
    assert is_supported(model).route == "mask"


def test_parameters_on_the_meta_device_are_not_run() -> None:
    with torch.device("meta"):
        model = Llama(LlamaConfig(**SIZES))
    support = is_supported(model)
    assert support == Support(True, "mask", "a probe tree equals its paths, in a tiny twin of this config")
    with torch.device("meta"):
        assert not is_supported(LoopingLlama(LlamaConfig(**SIZES))).ok


# -- no trace --


def test_the_probe_leaves_no_trace() -> None:
    """In training, with dropout, parts of it frozen in evaluation, under an attention that takes no tree."""
    model = llama(attention_dropout=0.5).train()
    model.model.layers[1].eval()
    model.set_attn_implementation("flex_attention")
    model.lm_head.weight.requires_grad_(False)
    before_flags = [module.training for module in model.modules()]
    before_state = copy.deepcopy(model.state_dict())
    before_config = model.config.to_json_string(use_diff=False)
    before_vars = [set(vars(module)) for module in model.modules()]
    random_state = torch.get_rng_state()
    ran: list[bool] = []
    handle = model.register_forward_pre_hook(lambda module, args: ran.append(module.training))

    assert is_supported(model).ok

    handle.remove()
    assert ran and not any(ran)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in model.modules()] == before_flags
    assert model.config.to_json_string(use_diff=False) == before_config
    assert model.config._attn_implementation == "flex_attention"
    assert [set(vars(module)) for module in model.modules()] == before_vars
    assert all(torch.equal(tensor, before_state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_training_flags_come_back_when_the_probe_raises() -> None:
    model = llama(RaisingLlama, rms_norm_eps=1e-4).train()
    model.model.layers[0].eval()
    flags = [module.training for module in model.modules()]
    assert "needs pixels" in is_supported(model).reason
    assert [module.training for module in model.modules()] == flags


def test_an_answer_is_kept_per_class_config_dtype_and_attention() -> None:
    def probed(model: Any) -> bool:
        ran: list[int] = []
        with_hook = model.register_forward_pre_hook(lambda module, args: ran.append(1))
        is_supported(model)
        with_hook.remove()
        return bool(ran)

    class Fresh(Llama):
        """A class that no other test has asked about."""

    model = llama(Fresh)
    assert probed(model) and not probed(model)
    assert not probed(llama(Fresh)) and not probed(enable(llama(Fresh)))
    assert probed(llama(Fresh, rope_theta=500.0))
    assert probed(llama(Fresh).double())
    assert probed(llama(Fresh, attn_implementation="eager"))
    assert probed(llama(type("Fresh", (Llama,), {})))
    # Quantised layers in place of some, of which the config says nothing.
    model = llama(Fresh)
    model.lm_head.__class__ = type("OtherLinear", (torch.nn.Linear,), {})
    assert probed(model)


def test_under_autocast_rounding_is_no_error_and_the_answer_its_own() -> None:
    # Of this class and config nothing else is asked.
    model = llama(hidden_size=32, intermediate_size=40)
    with torch.autocast("cpu", torch.bfloat16):
        support = is_supported(model)
    assert support.ok and support.route == "mask", support
    with torch.device("meta"):
        empty = llama(hidden_size=48, intermediate_size=40)
    with torch.autocast("cpu", torch.bfloat16):
        assert "a probe tree equals its paths, in a tiny twin" in is_supported(empty).reason
    # What passes at low precision is judged again without it.
    forgetful = llama(ForgetfulLlama, hidden_size=32)
    with torch.autocast("cpu", torch.bfloat16):
        is_supported(forgetful)
    assert is_supported(forgetful).route == "paths"


class MoodyLlama(Llama):
    """Fails for as long as it is told to."""

    error: Exception | None = None

    @functools.wraps(Llama.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.error is not None:
            raise self.error
        return super().forward(*args, **kwargs)


class DoublingLlama(Llama):
    """Reads every row twice, so that it asks for masks of another batch than its input."""

    @functools.wraps(Llama.forward)
    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(input_ids=input_ids.repeat(2, 1), **kwargs)
        outputs.logits = outputs.logits[: len(input_ids)]
        return outputs


def test_a_mask_for_other_inputs_than_the_tokens_is_a_final_no() -> None:
    reason, final = probe_masks(llama(DoublingLlama))
    assert reason is not None and final
    assert re.search(r"the probe was refused: a mask for batch 2 and \d+ queries was asked for .* batch 1", reason)


def test_a_failure_that_may_pass_is_not_remembered() -> None:
    model = llama(MoodyLlama)
    model.error = RuntimeError("device busy")
    assert "RuntimeError: device busy" in is_supported(model).reason
    model.error = torch.OutOfMemoryError("no room")
    with pytest.raises(torch.OutOfMemoryError):
        is_supported(model)
    model.error = None
    assert is_supported(model).ok


# -- wrappers --


class Ddp(nn.Module):
    """As DistributedDataParallel keeps its model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model


class Peft(nn.Module):
    """As PeftModel gives its base model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": model})

    def get_base_model(self) -> nn.Module:
        return self.base_model["model"]  # type: ignore[no-any-return]


class Passing(nn.Module):
    """As torch.compile could: it says that it is of the class of what it wraps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model

    @property
    def __class__(self) -> type:
        return type(self.__dict__["_modules"]["_orig_mod"])


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda model: model,
    "ddp": Ddp,
    "peft": Peft,
    "compile": torch.compile,
    "compile that passes for the model": Passing,
    "compiled ddp of peft": lambda model: torch.compile(Ddp(Peft(model))),
    "peft of a compiled model": lambda model: Peft(torch.compile(model)),
    "ddp of a compiled model": lambda model: Ddp(torch.compile(model)),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_are_looked_through(name: str) -> None:
    model = llama()
    wrapper = WRAPPERS[name](model)
    outer = type(wrapper)
    assert unwrap(wrapper) is model
    assert is_supported(wrapper).ok
    assert enable(wrapper) is wrapper
    assert type(model) is not Llama and isinstance(model, Llama)
    assert wrapper is model or type(wrapper) is outer
    assert disable(wrapper) is wrapper and type(model) is Llama


@pytest.mark.parametrize("name", ["ddp", "peft", "compile"])
def test_a_wrapped_model_that_is_refused_is_named_itself(name: str) -> None:
    wrapper = WRAPPERS[name](llama(LoopingLlama))
    with pytest.raises(NotImplementedError, match=r"the model \(LoopingLlama\) cannot take a tree"):
        enable(wrapper)


def test_a_wrapper_of_something_else_is_refused() -> None:
    assert is_supported(Ddp(nn.Linear(1, 1))).reason.startswith("Linear is no transformers PreTrainedModel; expected")
    loop = Ddp(nn.Linear(1, 1))
    loop.__dict__["module"] = loop
    assert not is_supported(loop).ok  # and it returns


def test_answers_in_use_are_kept_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_ANSWERS", type(support._ANSWERS)())
    monkeypatch.setattr(support, "_REMEMBERED", 2)
    first, second, third = (tiny.build(family) for family in ("llama", "qwen3", "mistral"))
    for model in (first, second, first, third):
        assert is_supported(model).ok
    for model, forwards in ((first, False), (second, True)):
        ran: list[int] = []
        handle = model.register_forward_pre_hook(lambda *_, ran=ran: ran.append(1))
        is_supported(model)
        handle.remove()
        assert bool(ran) == forwards
