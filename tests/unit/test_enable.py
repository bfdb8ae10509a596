"""Switching trees on and off: what an enabled model is, is not, and gives back."""

from __future__ import annotations

import copy
import inspect
import io
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationMixin,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)
from transformers import LlamaForCausalLM as Llama

from hf_treespec import (
    AutoTreeSpecModelForCausalLM,
    TreeConfig,
    TreeStats,
    UnsupportedModelError,
    disable,
    enable,
    install,
    uninstall,
)

HOOKED = ("_extract_generation_mode_kwargs", "_validate_generation_mode", "_assisted_decoding", "_sample")
PROMPT = torch.tensor([[5, 6, 7, 5, 6]])
CONFIG = LlamaConfig(
    vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip


def llama() -> Llama:
    torch.manual_seed(3)
    return Llama(copy.deepcopy(CONFIG)).eval()


def say(model: Any, **options: Any) -> list[int]:
    found: Tensor = model.generate(PROMPT, **{"max_new_tokens": 12, "do_sample": False, **options})
    return found[0].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def stock_text() -> list[int]:
    return say(llama())


@pytest.fixture
def model() -> Llama:
    return enable(llama())


@pytest.fixture(autouse=True)
def _hooks_are_gone_afterwards() -> Iterator[None]:
    before = {name: getattr(GenerationMixin, name) for name in HOOKED}
    yield
    found = {name: getattr(GenerationMixin, name) for name in HOOKED}
    for name, function in before.items():
        setattr(GenerationMixin, name, function)
    assert found == before


def test_enabled_models_take_a_tree_and_others_do_not(model: Llama, stock_text: list[int]) -> None:
    assert say(model, tree_config=TreeConfig(fallback="off")) == stock_text
    assert isinstance(model.treespec_stats, TreeStats) and model.treespec_stats.rounds > 0
    with pytest.raises(ValueError, match="tree_config"):
        say(llama(), tree_config=TreeConfig())


def test_without_tree_config_nothing_is_different(model: Llama, stock_text: list[int]) -> None:
    assert say(model) == stock_text
    assert say(model, prompt_lookup_num_tokens=2) == stock_text
    assert model.treespec_stats is None


def test_the_class_looks_like_its_base(model: Llama) -> None:
    cls = type(model)
    assert cls is not Llama and isinstance(model, Llama)
    for name in ("__name__", "__qualname__", "__module__"):
        assert getattr(cls, name) == getattr(Llama, name)
    # `generate` compares parameters of these.
    for name in HOOKED:
        assert inspect.signature(getattr(cls, name)) == inspect.signature(getattr(Llama, name))
    assert cls.generate is Llama.generate
    inner = type("Inner", (Llama,), {"__qualname__": "Outer.Inner", "__module__": "somewhere"})
    enabled = type(enable(inner(copy.deepcopy(CONFIG))))
    assert (enabled.__qualname__, enabled.__module__) == ("Outer.Inner", "somewhere")


def test_enabling_is_per_instance_and_once(model: Llama) -> None:
    cls = type(model)
    assert enable(model) is model and type(model) is cls and cls.__mro__.count(Llama) == 1
    assert len([base for base in cls.__mro__ if base.__name__ == "TreeSpecMixin"]) == 1
    assert type(enable(llama())) is cls
    assert type(llama()) is Llama
    other = GPT2LMHeadModel(GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=2, n_positions=32))
    assert isinstance(enable(other), GPT2LMHeadModel) and not isinstance(other, cls)


def test_disabling_gives_everything_back(model: Llama, stock_text: list[int]) -> None:
    say(model, tree_config=TreeConfig())
    assert disable(model) is model and type(model) is Llama
    assert not hasattr(model, "treespec_stats")
    assert vars(model).keys() == vars(llama()).keys()
    assert say(model) == stock_text
    with pytest.raises(ValueError, match="tree_config"):
        say(model, tree_config=TreeConfig())
    assert disable(model) is model and type(model) is Llama
    assert say(enable(model), tree_config=TreeConfig()) == stock_text


def test_enabling_leaves_weights_and_config_alone() -> None:
    plain, model = llama(), llama()
    before = {name: (tensor, tensor.clone()) for name, tensor in model.named_parameters()}
    enable(model)
    for name, tensor in model.named_parameters():
        assert tensor is before[name][0] and torch.equal(tensor, before[name][1])
    assert model.config.to_dict() == plain.config.to_dict()
    assert model.generation_config.to_dict() == plain.generation_config.to_dict()


def test_an_unsupported_model_is_named_with_the_reason_and_stays() -> None:
    class Looping(Llama):
        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            return super()._sample(*args, **kwargs)

    model = Looping(CONFIG)
    with pytest.raises(UnsupportedModelError, match=r"the model \(Looping\) cannot take a tree: .*loop of its own"):
        enable(model)
    assert type(model) is Looping


def through_torch_save(model: Llama) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_torch_save,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_enabled_models_of_their_own(how: str, model: Llama, stock_text: list[int]) -> None:
    say(model, tree_config=TreeConfig())
    twin = COPIES[how](model)
    assert twin is not model and type(twin) is type(model)
    assert all(a is not b for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    assert say(twin, tree_config=TreeConfig(), assistant_model=model) == stock_text
    assert twin.treespec_stats is not model.treespec_stats
    assert type(disable(twin)) is Llama and type(model) is not Llama


def test_a_shallow_copy_shares_the_weights_and_is_enabled(model: Llama, stock_text: list[int]) -> None:
    twin = copy.copy(model)
    assert type(twin) is type(model) and twin.lm_head.weight is model.lm_head.weight
    assert say(twin, tree_config=TreeConfig()) == stock_text


def test_saving_writes_the_architecture_of_the_base(model: Llama, tmp_path: Path, stock_text: list[int]) -> None:
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architectures"] == ["LlamaForCausalLM"]
    assert "treespec" not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is Llama and say(again) == stock_text
    both_in_one = AutoTreeSpecModelForCausalLM.from_pretrained(tmp_path)
    assert type(both_in_one) is type(model) and say(both_in_one, tree_config=TreeConfig()) == stock_text


def test_the_auto_class_is_for_its_two_constructors() -> None:
    assert isinstance(AutoTreeSpecModelForCausalLM.from_config(CONFIG), type(enable(llama())))
    with pytest.raises(OSError, match=r"AutoTreeSpecModelForCausalLM is used through `from_pretrained"):
        AutoTreeSpecModelForCausalLM()


# -- install --


def test_installing_reaches_every_model_until_uninstalled(stock_text: list[int]) -> None:
    before = {name: GenerationMixin.__dict__[name] for name in HOOKED}
    model = llama()
    install()
    try:
        for name in HOOKED:
            assert GenerationMixin.__dict__[name] is not before[name]
            assert inspect.signature(getattr(GenerationMixin, name)) == inspect.signature(before[name])
        assert say(model) == stock_text and not hasattr(model, "treespec_stats")
        assert say(model, tree_config=TreeConfig()) == stock_text
        assert model.treespec_stats.rounds > 0 and type(model) is Llama
        # Both ways at once are one tree, not two.
        both = enable(llama())
        assert say(both, tree_config=TreeConfig()) == stock_text and both.treespec_stats.rounds > 0
        assert say(both) == stock_text
    finally:
        uninstall()
    assert {name: GenerationMixin.__dict__[name] for name in HOOKED} == before
    with pytest.raises(ValueError, match="tree_config"):
        say(model, tree_config=TreeConfig())


def test_an_installed_tree_is_refused_by_models_that_cannot_take_one() -> None:
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=31, n_embd=8, n_layer=1, n_head=2, n_positions=64))
    install()
    try:
        with pytest.raises(UnsupportedModelError, match=r"the model \(OpenAIGPTLMHeadModel\) cannot take a tree: "):
            say(model, tree_config=TreeConfig())
    finally:
        uninstall()


def test_installing_twice_is_undone_once_and_uninstalling_twice_is_harmless() -> None:
    before = {name: GenerationMixin.__dict__[name] for name in HOOKED}
    uninstall()
    for _ in range(2):
        install()
        first = {name: GenerationMixin.__dict__[name] for name in HOOKED}
        assert all(first[name] is not before[name] for name in HOOKED)
        install()
        assert {name: GenerationMixin.__dict__[name] for name in HOOKED} == first
        for _ in range(2):
            uninstall()
            assert {name: GenerationMixin.__dict__[name] for name in HOOKED} == before
