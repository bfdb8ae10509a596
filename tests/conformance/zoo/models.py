"""Tiny models by type."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from conformance.zoo.overrides import DULL, KINDS, UNBUILT, VARIANTS
from conformance.zoo.weights import is_lively
from hf_treespec.twin import OVERRIDES, SCALES, enliven, tiny_config

# As the installed transformers lists them.
CAUSAL_TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
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
    own, read = CONFIG_MAPPING[base], model_class(name).config_class
    # The language model of some composite types reads one of the parts.
    config_class = own if issubclass(own, read) else read
    changes: dict[str, Any] = {}
    for table, key in ((OVERRIDES, config_class.model_type), (KINDS, base)):
        changes.update(table[key][0] if key in table else {})
    if name in VARIANTS:
        changes.update(VARIANTS[name][1])
    return tiny_config(config_class(), changes, all_on=True)


def model_class(name: str) -> type[PreTrainedModel]:
    """The causal-LM class of one of `types()`."""
    return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[base_type(name)]]  # type: ignore[no-any-return]


def attentions(name: str) -> list[str]:
    """The attention implementations that the class has, of those that take masks."""
    return ["eager", "sdpa"] if model_class(name)._supports_sdpa else ["eager"]


@functools.cache
def precision(name: str, attention: str) -> torch.dtype:
    """float64 where the modeling code runs in it; eager attention does not: it takes its softmax in float32."""
    if attention == "eager" or base_type(name) in DULL:
        return torch.float32
    model = _drawn(name, attention, torch.float64, 0, 0)
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
        dtype: default `precision(name, attention)`.

    Raises:
        AssertionError: if no seed makes lively text.
    """
    attention = attention or attentions(name)[-1]
    dtype = dtype or precision(name, attention)
    return _drawn(name, attention, dtype, *_lively_draw(name))


@functools.cache
def _lively_draw(name: str) -> tuple[int, int]:
    """The first seed and scale whose model is lively."""
    if base_type(name) in DULL:
        return 0, 0
    attention = attentions(name)[-1]
    tries = itertools.chain(_FIRST.get(name, ()), itertools.product(_SEEDS, range(len(SCALES))))
    for seed, scale in tries:
        if is_lively(_drawn(name, attention, precision(name, attention), seed, scale)):
            return seed, scale
    raise AssertionError(f"no seed makes lively text of a tiny {name}")


def _drawn(name: str, attention: str, dtype: torch.dtype, seed: int, scale: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(name)._from_config(config(name), attn_implementation=attention, dtype=dtype)
    model = model.to(dtype).eval()
    enliven(model, seed, scale)
    return model
