"""What tells one model from another without a look at its weights."""

from __future__ import annotations

import hashlib
import json

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
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]
