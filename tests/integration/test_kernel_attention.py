"""`TreeConfig(attention="treespec")`: the target's trees by the kernel's function, the text of plain decoding."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import special
import tiny
import treespec_kernels
from calls import BUSHES, CHAINS_OF_4, GREEDY, SAMPLED, twice
from hf_treespec import TreeSpecError, UnsupportedModelError, _compat
from kernel_scripts import child_environment, skip_without_interpreter

KERNEL = dataclasses.replace(BUSHES, attention="treespec")
SPECIAL = special.known(("gemma2", "gpt_oss", "llama4_text", "modernbert-decoder"))
batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Keyword arguments of the calls of the kernel."""
    seen: list[dict[str, Any]] = []
    right = treespec_kernels.tree_attention

    def counted(*tensors: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return right(*tensors, **kwargs)

    monkeypatch.setattr(treespec_kernels, "tree_attention", counted)
    names = set(ALL_ATTENTION_FUNCTIONS), set(AttentionMaskInterface())
    yield seen
    assert (set(ALL_ATTENTION_FUNCTIONS), set(AttentionMaskInterface())) == names


@pytest.mark.parametrize("family", tiny.FAMILIES)
@batches
@samplings
def test_equals_plain(family: str, batch: int, sampling: dict[str, Any], calls: list[dict[str, Any]]) -> None:
    ids, mask = tiny.prompt(family, batch)
    pair = twice(ids, mask, family=family, config=KERNEL, max_new_tokens=20, **sampling)
    assert pair.stats.accepted_tokens > 0
    # Every layer of every round that read more than a root.
    layers = len(_compat.make_cache(tiny.stock(family).config).layers)
    assert calls and len(calls) % layers == 0
    assert any(call["window"] for call in calls) == (family in tiny.SLIDING)
    assert _compat.attention_implementation(tiny.treed(family)) == _compat.attention_implementation(tiny.stock(family))


@pytest.mark.parametrize("maker", ["deep", "wide"])
@pytest.mark.parametrize("family", ["llama", *tiny.SLIDING])
def test_hostile_trees(family: str, maker: str, calls: list[dict[str, Any]]) -> None:
    ids, mask = tiny.prompt(family, 3)
    twice(ids, mask, family=family, config=KERNEL, maker=maker, max_new_tokens=20, **SAMPLED)
    assert calls


@pytest.mark.parametrize("name", SPECIAL)
@batches
def test_sinks_chunks_and_soft_caps(name: str, batch: int, calls: list[dict[str, Any]]) -> None:
    ids, mask = tiny.prompt("qwen3", batch)
    models = special.stock(name), special.treed(name)
    twice(ids, mask, models=models, config=KERNEL, max_new_tokens=20, **SAMPLED)
    assert calls
    assert any(call["sinks"] is not None for call in calls) == (name == "gpt_oss")


def test_static_cache(calls: list[dict[str, Any]]) -> None:
    ids, mask = tiny.prompt("llama", 1)
    pair = twice(ids, mask, config=KERNEL, max_new_tokens=20, cache_implementation="static")
    assert calls and pair.stats.accepted_tokens > 0


@pytest.mark.parametrize("family", ["llama", *tiny.SLIDING])
def test_rows_that_part_in_a_tree_cache(family: str, calls: list[dict[str, Any]]) -> None:
    ids, mask = tiny.prompt(family, 3)
    config = dataclasses.replace(KERNEL, kv_cache="dense")
    pair = twice(ids, mask, family=family, config=config, max_new_tokens=20, **SAMPLED)
    assert calls and pair.stats.accepted_tokens > 0


@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_quantized_storage_gives_the_text_of_the_masks(storage: str, calls: list[dict[str, Any]]) -> None:
    ids, mask = tiny.prompt("llama", 3)
    texts, model = [], tiny.treed("llama")
    for attention in ("auto", "treespec"):
        config = dataclasses.replace(KERNEL, kv_cache=storage, attention=attention)
        call = {"attention_mask": mask, "tree_config": config, "max_new_tokens": 20, "do_sample": False}
        texts.append(model.generate(ids, assistant_model=tiny.stock("llama"), **call))
        assert model.treespec_stats.accepted_tokens > 10
    assert calls
    assert torch.equal(*texts)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.long])
def test_a_model_that_casts_what_comes_as_its_mask_is_refused(dtype: torch.dtype) -> None:
    ids, mask = tiny.prompt("llama", 3)
    model = tiny.treed("llama")
    config = dataclasses.replace(KERNEL, draft="ngram")

    def cast(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs["attention_mask"] is not None and kwargs["attention_mask"].dtype == torch.int32:
            kwargs["attention_mask"] = kwargs["attention_mask"].to(dtype)
        return args, kwargs

    call = {"attention_mask": mask, "tree_config": config, "max_new_tokens": 20, "do_sample": False}
    model.generate(ids, **call)  # the probe is over
    hooks = [layer.self_attn.register_forward_pre_hook(cast, with_kwargs=True) for layer in model.model.layers]
    try:
        with pytest.raises(TreeSpecError, match=f"a mask of {dtype} and shape"):
            model.generate(ids, **call)
    finally:
        for hook in hooks:
            hook.remove()


def test_a_prompt_with_holes_takes_the_masks(calls: list[dict[str, Any]]) -> None:
    ids, mask = tiny.prompt("llama", 1)
    mask[:, 4:6] = 0
    twice(ids, mask, config=KERNEL, max_new_tokens=20)
    assert not calls


def test_a_draft_model_reads_its_levels_under_masks(calls: list[dict[str, Any]]) -> None:
    ids, mask = tiny.prompt("llama", 3)
    expected = tiny.reference(tiny.stock("llama"), ids, mask, max_new_tokens=20)
    draft, model = tiny.draft("llama"), tiny.treed("llama")
    config = dataclasses.replace(CHAINS_OF_4, attention="treespec")
    model.generate(ids, attention_mask=mask, assistant_model=draft, tree_config=config, max_new_tokens=1)
    calls.clear()
    actual = model.generate(
        ids,
        attention_mask=mask,
        assistant_model=draft,
        tree_config=config,
        max_new_tokens=20,
        do_sample=False,
    )
    assert torch.equal(actual, expected)
    stats, layers = model.treespec_stats, len(_compat.make_cache(model.config).layers)
    assert stats.rounds > stats.plain_rounds
    assert len(calls) == layers * (stats.rounds - stats.plain_rounds)


@pytest.mark.parametrize("name", special.known(("doge", "gpt_neo")))
def test_others_are_refused_by_name_before_any_forward(name: str) -> None:
    ids, mask = tiny.prompt("qwen3", 1)
    model = special.treed(name)
    ran: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(UnsupportedModelError, match=r"TreeConfig\(attention='treespec'\) with .* Leave attention at"):
        model.generate(ids, attention_mask=mask, tree_config=KERNEL, max_new_tokens=4)
    handle.remove()
    assert not ran


INTERPRETED = """
import dataclasses
import torch
import treespec_kernels
from treespec_kernels import _attention_launch
import tiny
from calls import BUSHES, twice

launches = []
launch = _attention_launch.launch
_attention_launch.launch = lambda *args, **kwargs: launches.append(1) or launch(*args, **kwargs)
ids, mask = tiny.prompt("mistral", 3)
config = dataclasses.replace(BUSHES, attention="treespec", max_nodes=6)
pair = twice(ids, mask, family="mistral", config=config, max_new_tokens=6)
print(len(launches), pair.stats.accepted_tokens)
"""


def test_the_kernel_itself_gives_the_text_in_the_interpreter() -> None:
    skip_without_interpreter()
    environment = child_environment(TRITON_INTERPRET="1")
    environment["PYTHONPATH"] += ":" + ":".join(sys.path)
    child = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=600
    )
    assert child.returncode == 0, child.stderr
    launches, accepted = child.stdout.split()
    assert int(launches) > 0
    assert int(accepted) > 0
