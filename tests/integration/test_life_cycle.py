"""Threads, copies, wrappers and hooks: an enabled model is used like any other."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor
from transformers import GenerationMixin, LlamaForCausalLM, PreTrainedModel, TextGenerationPipeline

from hf_treespec import TreeConfig, _compat, disable, enable, install, uninstall
from letters import letters
from tiny import assert_same_text, build, draft, fingerprint, perturbed, prompt, reference, stock, treed, vocabulary

OFF = TreeConfig(fallback="off", seed=3)
NEW = 16
HOOKED = ("_extract_generation_mode_kwargs", "_validate_generation_mode", "_assisted_decoding", "_sample")


def together(*jobs: Callable[[], None]) -> None:
    """Run jobs at once, each in a thread of its own; the first of their errors is raised here."""
    barrier, errors = threading.Barrier(len(jobs)), []

    def run(job: Callable[[], None]) -> None:
        try:
            barrier.wait(60)
            job()
        # A thread has nobody else to tell.
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def say(model: Any, family: str = "llama", batch: int = 1, **call: Any) -> Tensor:
    ids, mask = prompt(family, batch)
    call = {
        "attention_mask": mask,
        "tree_config": OFF,
        "assistant_model": draft(family),
        "max_new_tokens": NEW,
        "do_sample": False,
        **call,
    }
    return model.generate(ids, **{name: value for name, value in call.items() if value is not None})


def plain(family: str = "llama", batch: int = 1, **call: Any) -> Tensor:
    return reference(stock(family), *prompt(family, batch), seed=3, max_new_tokens=NEW, **call)


# --- threads -------------------------------------------------------------------------------------------------------


def test_two_threads_that_enable_one_model_wrap_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    # The package holds the function under the name of its module.
    switch = sys.modules["hf_treespec.api.enable"]
    probe, calls = switch.require_support, []

    def slow(inner: Any, name: str) -> None:
        probe(inner, name)
        calls.append(name)
        if len(calls) == 1:
            # A second thread comes and goes while the first one probes.
            together(lambda: enable(model) and None)

    monkeypatch.setattr(switch, "require_support", slow)
    enable(model)
    assert len(calls) == 2
    assert [cls.__name__ for cls in type(model).__mro__].count("TreeSpecMixin") == 1
    assert type(disable(model)) is LlamaForCausalLM


def test_switches_are_thrown_from_many_threads() -> None:
    model, before = build("llama"), {name: GenerationMixin.__dict__[name] for name in HOOKED}
    enable(build("llama"))

    def flick() -> None:
        for _ in range(40):
            enable(model)
            install()
            disable(model)
            uninstall()

    together(*[flick] * 4)
    disable(model)
    uninstall()
    assert type(model) is LlamaForCausalLM
    assert {name: GenerationMixin.__dict__[name] for name in HOOKED} == before
    assert torch.equal(say(enable(model)), plain())


@pytest.mark.parametrize("sampled", [False, True], ids=["t0", "t0.9"])
def test_models_generate_at_once(sampled: bool) -> None:
    """Two enabled models and one that never was: the mask registry serves all three, each its own way."""
    call = {"do_sample": True, "temperature": 0.9} if sampled else {}
    expected = {family: plain(family, 3, **call) for family in ("llama", "mistral")}
    # Made here: random weights come from a generator that all threads share.
    models = {family: (copy.deepcopy(treed(family)), copy.deepcopy(draft(family))) for family in expected}
    third = plain("gpt2", 3)
    masks = {name: _compat.mask_function_of(name) for name in _compat.MASK_IMPLEMENTATIONS}
    rounds = {}

    def tree(family: str) -> None:
        model, helper = models[family]
        for _ in range(4):
            assert_same_text(expected[family], say(model, family, 3, assistant_model=helper, **call))
        rounds[family] = model.treespec_stats.rounds
        assert model.treespec_stats.drafted_nodes > 0

    def none() -> None:
        for _ in range(6):
            assert_same_text(third, say(stock("gpt2"), "gpt2", 3, tree_config=None, assistant_model=None))

    together(lambda: tree("llama"), lambda: tree("mistral"), none)
    assert set(rounds) == {"llama", "mistral"}
    assert {name: _compat.mask_function_of(name) for name in _compat.MASK_IMPLEMENTATIONS} == masks


def test_one_model_serves_two_threads() -> None:
    """Statistics are of whichever call ended last; the texts are right."""
    model = enable(build("llama"))
    expected = {batch: plain(batch=batch) for batch in (1, 3)}
    helpers = {batch: copy.deepcopy(draft("llama")) for batch in expected}

    def serve(batch: int) -> None:
        for _ in range(4):
            assert_same_text(expected[batch], say(model, batch=batch, assistant_model=helpers[batch]))

    together(lambda: serve(1), lambda: serve(3))
    assert model.treespec_stats.batch_size in (1, 3)


def test_an_error_in_one_thread_leaves_the_other_alone() -> None:
    expected = plain(batch=3)
    model, other = enable(build("llama")), enable(build("llama"))
    draft("llama")

    def fails() -> None:
        for _ in range(4):
            with pytest.raises(LookupError):
                say(model, stopping_criteria=[raising])

    def serves() -> None:
        for _ in range(4):
            assert_same_text(expected, say(other, batch=3))

    def raising(ids: Tensor, scores: Any) -> Tensor:
        if ids.shape[1] > 14:
            raise LookupError("of the caller")
        return torch.zeros(len(ids), dtype=torch.bool)

    together(fails, serves)


# --- copies --------------------------------------------------------------------------------------------------------


def test_a_pickle_of_an_enabled_model_is_enabled_in_another_process_too() -> None:
    # Nothing of the making of the class may be left in the pickle but its base.
    model = enable(build("llama"))
    data = pickle.dumps(model)
    assert b"TreeSpecMixin" not in data
    assert_same_text(plain(), say(pickle.loads(data)))


def test_from_pretrained_of_an_enabled_class_is_enabled(tmp_path: Path) -> None:
    model = enable(build("llama"))
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert type(again) is type(model)
    assert_same_text(plain(), say(again))
    assert type(disable(again)) is LlamaForCausalLM


# --- wrappers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def _fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled_wrapper(model: PreTrainedModel) -> Any:
    return torch.compile(model, backend="eager")


def compiled_forward(model: PreTrainedModel) -> Any:
    model.forward = torch.compile(model.forward, backend="eager", dynamic=True)  # type: ignore[method-assign]
    return model


# Compiling takes half a minute; the wrapper leaves generate() to the model and compiles nothing.
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("before", [True, False], ids=["enabled_first", "compiled_first"])
@pytest.mark.parametrize("wrap", [compiled_wrapper, pytest.param(compiled_forward, marks=pytest.mark.slow)])
def test_compiled_model(wrap: Callable[[PreTrainedModel], Any], before: bool) -> None:
    model = build("llama")
    if before:
        enable(model)
    wrapped = wrap(model)
    if not before:
        assert enable(wrapped) is wrapped
    assert_same_text(plain(), say(wrapped))
    assert model.treespec_stats.accepted_tokens > 0
    assert_same_text(plain(), say(wrapped, tree_config=None, assistant_model=None))


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_draft() -> None:
    helper = compiled_forward(perturbed(stock("llama")))
    model = enable(build("llama"))
    assert_same_text(plain(), say(model, assistant_model=helper))
    assert model.treespec_stats.accepted_tokens > 0


# --- accelerate ----------------------------------------------------------------------------------------------------


def offloaded(model: PreTrainedModel) -> PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.device.type == "meta"
    return model


def dispatched(model: PreTrainedModel) -> PreTrainedModel:
    accelerate.dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, main_device="cpu", force_hooks=True)
    return model


@pytest.mark.parametrize("before", [True, False], ids=["enabled_first", "hooked_first"])
@pytest.mark.parametrize("hook", [offloaded, dispatched])
@pytest.mark.parametrize("which", ["target", "draft", "both"])
def test_accelerate_hooks(hook: Callable[[PreTrainedModel], PreTrainedModel], which: str, before: bool) -> None:
    model, helper = build("llama"), perturbed(stock("llama"))
    if before:
        enable(model)
    if which != "draft":
        hook(model)
    if which != "target":
        hook(helper)
    enable(model)
    for batch in (1, 3):
        assert_same_text(plain(batch=batch), say(model, batch=batch, assistant_model=helper))
        assert model.treespec_stats.accepted_tokens > 0


def test_guidance_over_offloaded_weights() -> None:
    """The device of the model is "meta" then, where no prompt of the second stream may go."""
    model = enable(offloaded(build("llama")))
    call = {"guidance_scale": 1.7, "negative_prompt_ids": torch.tensor([[3, 9, 4]])}
    assert_same_text(plain(**call), say(model, assistant_model=perturbed(stock("llama")), **call))
    assert model.treespec_stats.accepted_tokens > 0


def test_hooks_of_the_user_see_every_forward() -> None:
    model = enable(build("llama"))
    seen = []
    handle = model.register_forward_hook(lambda *_: seen.append(1))
    say(model)
    handle.remove()
    assert len(seen) == model.treespec_stats.rounds + 1


# --- elsewhere -----------------------------------------------------------------------------------------------------


def test_pipeline_of_an_enabled_model() -> None:
    tokenizer = letters(vocabulary("llama"))
    call: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "return_full_text": False}
    expected = TextGenerationPipeline(model=build("llama"), tokenizer=tokenizer)("abcdefgh", **call)
    model = enable(build("llama"))
    actual = TextGenerationPipeline(model=model, tokenizer=tokenizer)("abcdefgh", tree_config=OFF, **call)
    assert actual == expected and model.treespec_stats.draft == "ngram"


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_training_mode_and_gradients_are_left_as_they_are(mode: bool) -> None:
    model, helper = enable(build("llama")), perturbed(stock("llama"))
    model.train(mode)
    helper.train(mode)
    model.lm_head.weight.requires_grad_(False)
    model.model.layers[0].eval()
    before = fingerprint(model), fingerprint(helper), [p.requires_grad for p in model.parameters()]
    with torch.enable_grad():
        out = say(model, assistant_model=helper)
        assert torch.is_grad_enabled()
    assert not out.requires_grad
    assert (fingerprint(model), fingerprint(helper), [p.requires_grad for p in model.parameters()]) == before
    assert all(p.grad is None for p in model.parameters())


def test_switching_back_and_forth_between_calls() -> None:
    model = build("llama")
    for _ in range(3):
        assert_same_text(plain(), say(enable(model)))
        with pytest.raises(ValueError, match="tree_config"):
            say(disable(model))
        assert_same_text(plain(), say(model, tree_config=None, assistant_model=None))
