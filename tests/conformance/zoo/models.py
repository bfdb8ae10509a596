"""Tiny models by type."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from conformance.zoo.overrides import DULL, OVERRIDES, UNBUILT, VARIANTS
from conformance.zoo.shrink import tiny_config
from conformance.zoo.weights import SCALES, enliven, is_lively

# Seeds that are tried until the text is lively, each with all of `weights.SCALES`.
_SEEDS = range(6)
# Those that need many tries.
_FIRST: dict[str, tuple[tuple[int, int], ...]] = {"roc_bert": ((10, 0),), "roformer": ((19, 3),)}


def types() -> list[str]:
    """Every causal-LM model type of the installed transformers that can be built, and variants of some."""
    names = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in UNBUILT]
    return sorted([*names, *(variant for variant, (base, _, _) in VARIANTS.items() if base in names)])


def unbuilt() -> dict[str, str]:
    """The model types that are left, and why no model of theirs is built."""
    return {name: why for name, why in UNBUILT.items() if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}


def base_type(name: str) -> str:
    """The model type of a name, which may be a variant's."""
    return VARIANTS[name][0] if name in VARIANTS else name


def config(name: str) -> PreTrainedConfig:
    """The tiny config of one of `types()`."""
    base = base_type(name)
    changes: dict[str, Any] = dict(OVERRIDES[base][0]) if base in OVERRIDES else {}
    if name in VARIANTS:
        changes.update(VARIANTS[name][1])
    made = tiny_config(base, changes)
    wanted = MODEL_FOR_CAUSAL_LM_MAPPING[type(made)].config_class
    if isinstance(made, wanted):
        return made
    # The language model of some composite types reads one of the parts.
    parts = [getattr(made, part) for part in type(made).sub_configs]
    return next((part for part in parts if isinstance(part, wanted)), made)


def attentions(name: str) -> list[str]:
    """The attention implementations that the class has, of those that take masks."""
    return ["eager", "sdpa"] if _class_of(config(name))._supports_sdpa else ["eager"]


@functools.cache
def precision(name: str) -> torch.dtype:
    """float64 where the modeling code runs in it."""
    if base_type(name) in DULL:
        return torch.float32
    model = _drawn(name, attentions(name)[-1], torch.float64, 0, 0)
    try:
        is_lively(model)
    except RuntimeError:
        # Some operators, and code that makes float32 by name, know no float64.
        return torch.float32
    return torch.float64


def build(name: str, *, attention: str | None = None, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A new tiny model, always the same, whose greedy text is lively and hangs on its context.

    Args:
        name: one of `types()`.
        attention: one of `attentions(name)`; default the last.
        dtype: default `precision(name)`.

    Raises:
        AssertionError: if no seed makes lively text.
    """
    attention = attention or attentions(name)[-1]
    dtype = dtype or precision(name)
    return _drawn(name, attention, dtype, *_lively_draw(name))


@functools.cache
def _lively_draw(name: str) -> tuple[int, int]:
    """The first seed and scale whose model is lively."""
    if base_type(name) in DULL:
        return 0, 0
    tries = itertools.chain(_FIRST.get(name, ()), itertools.product(_SEEDS, range(len(SCALES))))
    for seed, scale in tries:
        if is_lively(_drawn(name, attentions(name)[-1], precision(name), seed, scale)):
            return seed, scale
    raise AssertionError(f"no seed makes lively text of a tiny {name}")


def _class_of(made: PreTrainedConfig) -> type[PreTrainedModel]:
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
        if type(made) in (config_class, model_class.config_class):
            return model_class
    raise AssertionError(f"no causal LM for {type(made).__name__}")


def _drawn(name: str, attention: str, dtype: torch.dtype, seed: int, scale: int) -> PreTrainedModel:
    made = config(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if type(made) in MODEL_FOR_CAUSAL_LM_MAPPING:
            model = AutoModelForCausalLM.from_config(made, attn_implementation=attention, dtype=dtype)
        else:
            model = _class_of(made)._from_config(made, attn_implementation=attention, dtype=dtype)
    model = model.to(dtype).eval()
    enliven(model, seed, scale)
    return model
