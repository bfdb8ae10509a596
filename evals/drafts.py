"""Targets and drafts of the evals. A draft that comes with no weights of its own is made from the target's.

| draft | what it is |
|---|---|
| `ngram` | n-grams of the text, no model |
| `layers:20` | the target's first 20 layers under its own norm and head |
| `drop:16-22` | the target without layers 16 to 21 |
| `noise:0.1` | the target with noise of that share of each weight's deviation |
| anything else | a folder or name for `from_pretrained` |
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from expected import SettingsError
from hf_treespec import TreeSpecError
from hf_treespec.train import cut_model
from real_model import RealModelError, load_smollm2

__all__ = ["is_made", "load_target", "make_draft"]

_FORMS = {"noise": r"\d*\.?\d+(e-?\d+)?", "layers": r"\d+", "drop": r"\d+-\d+"}


def load_target(name: str, dtype: str) -> tuple[PreTrainedModel, Any]:
    """The target in evaluation mode, and its tokenizer or None.

    Raises:
        SettingsError: if there is no such model.
    """
    if name == "smollm2":
        try:
            return load_smollm2(dtype=getattr(torch, dtype))
        except RealModelError:
            raise
        except Exception as error:
            raise _broken("model", name, error) from error
    model = _loaded("model", name, getattr(torch, dtype))
    try:
        return model, AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        # Prompts of ids need none; others say so.
        return model, None


def is_made(spec: str) -> bool:
    """Whether a draft follows from the target's weights and the seed, with no weights of its own."""
    return spec in ("ngram", "none") or spec.partition(":")[0] in _FORMS


def make_draft(spec: str, target: PreTrainedModel, seed: int) -> PreTrainedModel | None:
    """The assistant that `spec` describes; None for n-grams.

    Raises:
        SettingsError: if it cannot be read, there is no such model, or it does not fit the target.
    """
    kind, _, value = spec.partition(":")
    if spec in ("ngram", "none"):
        return None
    form = _FORMS.get(kind)
    if form is not None and re.fullmatch(form, value) is None:
        raise SettingsError(f"drafts: {spec!r}: expected a form such as layers:20, drop:16-22 or noise:0.1")
    if kind == "noise":
        return _noisy(target, float(value), seed)
    if kind in ("layers", "drop"):
        count = int(target.config.num_hidden_layers)
        first, _, last = value.partition("-")
        kept = [n for n in range(count) if (n < int(first) if kind == "layers" else not int(first) <= n < int(last))]
        if not 0 < len(kept) < count:
            raise SettingsError(f"drafts: {spec!r}: keeps {len(kept)} of {count} layers")
        try:
            return cut_model(target, kept)
        except TreeSpecError as error:
            raise SettingsError(f"drafts: {spec!r}: {error}") from error
    return _loaded("drafts", spec, target.dtype)


def _loaded(setting: str, name: str, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except Exception as error:
        # Damaged weights raise errors of the formats' own packages, which have no class in common.
        raise _broken(setting, name, error) from error
    return model.eval()


def _broken(setting: str, name: str, error: Exception) -> SettingsError:
    return SettingsError(f"{setting}: {name!r} cannot be loaded: {type(error).__name__}: {error}")


def _noisy(target: PreTrainedModel, share: float, seed: int) -> PreTrainedModel:
    draft = copy.deepcopy(target)
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() > 1:
                weight += share * weight.std() * torch.randn(weight.shape, generator=dice).to(weight)
    return draft
