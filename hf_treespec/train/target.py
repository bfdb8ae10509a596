"""The user's model during a run: lent, and given back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hf_treespec.api.enable import enable
from hf_treespec.api.probe import evaluation
from hf_treespec.api.support import unwrap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["frozen", "lent", "taking_trees"]

_STATS = "treespec_stats"


@contextmanager
def lent(model: PreTrainedModel) -> Iterator[None]:
    """Let a run use a model: in evaluation mode.

    Mode of each module and the statistics of the user's last call are as they were afterwards, also after an
    exception.
    """
    inner: Any = unwrap(model)
    had, stats = _STATS in vars(inner), vars(inner).get(_STATS)
    with evaluation(model):
        try:
            yield
        finally:
            vars(inner).pop(_STATS, None)
            if had:
                vars(inner)[_STATS] = stats


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """Weights that take no gradients, though these flow through the model; afterwards they are as they were.

    For training alone: torch multiplies a few sliced rows with a matrix that takes no gradients by copying the matrix
    for each row, which in a batched prefill is the whole LM head.
    """
    # By name: hooks that bring in offloaded weights make new ones.
    learning = {name for name, weight in model.named_parameters() if weight.requires_grad}
    try:
        for weight in model.parameters():
            weight.requires_grad_(False)
        yield
    finally:
        # Weights that were made in inference mode can be set back there only.
        with torch.inference_mode():
            for name, weight in model.named_parameters():
                if name in learning:
                    weight.requires_grad_(True)


@contextmanager
def taking_trees(model: PreTrainedModel) -> Iterator[Any]:
    """The model as calls with a `tree_config` need it, and of its own class again afterwards.

    `disable` would also drop what calls of the user have left in it.
    """
    inner: Any = unwrap(model)
    own = type(inner)
    try:
        yield enable(model)
    finally:
        inner.__class__ = own
