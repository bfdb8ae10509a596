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

from real_model import load_smollm2
from settings import SettingsError

__all__ = ["load_target", "make_draft"]


def load_target(name: str, dtype: str) -> tuple[PreTrainedModel, Any]:
    """The target in evaluation mode, and its tokenizer or None."""
    if name == "smollm2":
        return load_smollm2(dtype=getattr(torch, dtype))
    model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype)).eval()
    try:
        return model, AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        # Prompts of ids need none; others say so.
        return model, None


def make_draft(spec: str, target: PreTrainedModel, seed: int) -> PreTrainedModel | None:
    """The assistant that `spec` describes; None for n-grams.

    Raises:
        SettingsError: if it does not fit the target.
    """
    kind, _, value = spec.partition(":")
    if spec in ("ngram", "none"):
        return None
    if kind == "noise":
        return _noisy(target, float(value), seed)
    if kind in ("layers", "drop"):
        count = int(target.config.num_hidden_layers)
        first, _, last = value.partition("-")
        kept = [n for n in range(count) if (n < int(first) if kind == "layers" else not int(first) <= n < int(last))]
        if not 0 < len(kept) < count:
            raise SettingsError(f"drafts: {spec!r}: keeps {len(kept)} of {count} layers")
        return _of_layers(target, kept)
    return AutoModelForCausalLM.from_pretrained(spec, dtype=target.dtype).eval()


def _noisy(target: PreTrainedModel, share: float, seed: int) -> PreTrainedModel:
    draft = copy.deepcopy(target)
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() > 1:
                weight += share * weight.std() * torch.randn(weight.shape, generator=dice).to(weight)
    return draft


def _of_layers(target: PreTrainedModel, kept: list[int]) -> PreTrainedModel:
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[n] for n in kept]
    draft = type(target)(config).to(target.dtype)
    place = {old: new for new, old in enumerate(kept)}
    state = {}
    for key, value in target.state_dict().items():
        found = re.match(r"(.*\.(?:layers|h|block)\.)(\d+)(\..*)", key)
        if found is None:
            state[key] = value
        elif int(found[2]) in place:
            state[f"{found[1]}{place[int(found[2])]}{found[3]}"] = value
    draft.load_state_dict(state)
    draft.generation_config = copy.deepcopy(target.generation_config)
    return draft.eval()
