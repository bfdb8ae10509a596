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

__all__ = ["lent", "taking_trees"]

_STATS = "treespec_stats"


@contextmanager
def lent(model: PreTrainedModel) -> Iterator[None]:
    """Let a run use a model: in evaluation mode, with weights that take no gradients, though these flow through it.

    Mode of each module, `requires_grad` of each weight and the statistics of the user's last call are as they were
    afterwards, also after an exception.
    """
    inner: Any = unwrap(model)
    had, stats = _STATS in vars(inner), vars(inner).get(_STATS)
    # By name: hooks that bring in offloaded weights make new ones.
    learning = {name for name, weight in model.named_parameters() if weight.requires_grad}
    with evaluation(model):
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
            vars(inner).pop(_STATS, None)
            if had:
                vars(inner)[_STATS] = stats


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
