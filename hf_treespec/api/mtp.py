"""Multi-token prediction modules of a target: what a call says of them, and loading them once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from hf_treespec import _compat
from hf_treespec.config import TreeConfig
from hf_treespec.draft import check_states
from hf_treespec.errors import UnsupportedCallError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

__all__ = ["forget_modules", "mtp_modules", "with_mtp"]

_LOCK = threading.Lock()
_LOADED: WeakKeyDictionary[PreTrainedModel, PreTrainedModel] = WeakKeyDictionary()
# What the code of transformers raises about checkpoints that are not there, are of another kind, or lack weights.
_FAILURES = (OSError, ValueError, RuntimeError, TypeError, AttributeError, KeyError, StopIteration)
_INSTEAD = "use draft='ngram', which needs no model, or pass an assistant_model"


def with_mtp(config: TreeConfig, generation_config: GenerationConfig) -> TreeConfig:
    """The config with what `use_mtp` of the call asks for, as transformers spells it.

    Raises:
        UnsupportedCallError: if the config says otherwise.
    """
    use = getattr(generation_config, "use_mtp", None)
    if not use or config.with_mtp:
        return config
    if config.draft != "auto":
        raise UnsupportedCallError(
            f"use_mtp={use!r} with TreeConfig(draft={config.draft!r}): both say what drafts; leave use_mtp out, or "
            "use draft='auto' or 'mtp', or ('mtp', 'ngram') for one tree of both"
        )
    return config.replace(draft="mtp")


def mtp_modules(model: PreTrainedModel) -> PreTrainedModel:
    """The modules that came with a model, read from its checkpoint the first time and kept as long as it lives.

    Raises:
        UnsupportedCallError: if there are none, if they cannot read a tree, or if they cannot be loaded.
    """
    name = type(model).__name__
    if not _compat.mtp_declared(model):
        raise UnsupportedCallError(
            f"use_mtp or draft='mtp' with {name}: its config names no num_mtp_layers, so that it has no modules for "
            f"multi-token prediction; {_INSTEAD}"
        )
    with _LOCK:
        modules = _LOADED.get(model)
        try:
            check_states(_compat.make_mtp_cache(_compat.mtp_config(model)).layers, model)
            if modules is None:
                modules = _loaded(model)
        except (torch.OutOfMemoryError, UnsupportedCallError):
            raise  # the former says nothing about the model
        except _FAILURES as error:
            raise UnsupportedCallError(
                f"use_mtp or draft='mtp' with {name}: its modules for multi-token prediction cannot be loaded: "
                f"{type(error).__name__}: {error}. Load the model from a checkpoint that has them, or pass an "
                f"MtpModel as assistant_model; or {_INSTEAD}"
            ) from error
        _compat.follow_model(modules, model)
        _LOADED[model] = modules
    return modules


def _loaded(model: PreTrainedModel) -> PreTrainedModel:
    if not model.config.name_or_path:
        raise ValueError("the model was not loaded from a checkpoint: its config.name_or_path is empty")
    # Weights that are missing would be drawn at random.
    with torch.random.fork_rng(devices=[]):
        return _compat.load_mtp(model)


def forget_modules(ended: Callable[[PreTrainedModel], bool]) -> None:
    """Drop the modules of models for which this is true."""
    with _LOCK:
        for model in [model for model in _LOADED if ended(model)]:
            del _LOADED[model]
