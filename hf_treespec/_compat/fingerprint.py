"""What tells one model from another without a look at its weights."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel

__all__ = ["class_name", "config_hash", "transformers_version"]

# Where a model came from and how it was loaded says nothing of what it computes.
_NOT_ITS_OWN = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation")


def transformers_version() -> str:
    """Of the installed package."""
    return str(transformers.__version__)


def class_name(model: nn.Module) -> str:
    """Of the model's class; that which `enable` makes carries the name of its base."""
    return type(model).__name__


def config_hash(model: PreTrainedModel) -> str:
    """Of the settings of the model's config that its computations go by."""
    settings = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_ITS_OWN}
    return hashlib.sha256(json.dumps(_in_order(settings), default=str).encode()).hexdigest()[:16]


def _in_order(value: Any) -> Any:
    """The same with the keys of dicts in the order of their text: keys of several types have no other."""
    if isinstance(value, dict):
        return {str(key): _in_order(value[key]) for key in sorted(value, key=str)}
    return [_in_order(one) for one in value] if isinstance(value, list | tuple) else value
