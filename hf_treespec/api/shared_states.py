"""Which layers of a target's cache an assistant reads, found by one small forward of each."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.api.probe import FAILURES, evaluation
from hf_treespec.attention import attention_for_probes, tree_masks
from hf_treespec.draft import AssistantHead
from hf_treespec.draft.heads import Borrowed
from hf_treespec.errors import TreeSpecError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["lent_layers"]

_Answers = WeakKeyDictionary["PreTrainedModel", "dict[str, int] | str"]
# Per target and assistant: the layers, or why there are none.
_TRIED: WeakKeyDictionary[PreTrainedModel, _Answers] = WeakKeyDictionary()


def lent_layers(model: PreTrainedModel, assistant: PreTrainedModel) -> dict[str, int]:
    """Per kind of layer that the assistant reads the number of the target's cache layer with these states.

    Found once for a pair: by a forward of the target over two tokens, and one of the assistant behind it.

    Raises:
        UnsupportedModelError: if the target shows no such states, or the assistant cannot read them.
    """
    answers = _TRIED.setdefault(model, WeakKeyDictionary())
    if assistant not in answers:
        # As calls with trees run them: under another attention a first forward may cost a compilation.
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            for each in (model, assistant):
                stack.enter_context(evaluation(each))
                stack.enter_context(attention_for_probes(each))
            stack.enter_context(tree_masks())
            answers[assistant] = _found(model, assistant)
    found = answers[assistant]
    if isinstance(found, str):
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot take a {type(assistant).__name__} as assistant_model: {found}. Pass the "
            "assistant that was made for this target, or leave assistant_model out to draft by n-grams"
        )
    return found


def _found(model: PreTrainedModel, assistant: PreTrainedModel) -> dict[str, int] | str:
    ids = torch.tensor([[1, 2]], device=model.device)
    cache = _compat.make_cache(model.config)
    try:
        states, shown = _compat.shared_states(model, ids, cache)
    except torch.OutOfMemoryError:
        raise  # says nothing about the model
    except FAILURES as error:
        return f"it does not show its keys and values: {type(error).__name__}: {error}"
    if not shown:
        return "it does not show keys and values to assistants (return_shared_kv_states)"
    layers: dict[str, int] = {}
    for kind, (keys, _) in shown.items():
        number = next((number for number, layer in enumerate(cache.layers) if _holds(layer, keys)), None)
        if number is None:
            return f"no layer of its cache holds the keys that it shows for {kind}"
        layers[kind] = number
    head = AssistantHead(assistant, layers)
    try:
        head.step(
            ids[:, 1:],
            head.placed(states[:, :1]),
            torch.ones_like(ids[:, 1:]),
            None,
            {kind: (head.placed(keys), head.placed(values)) for kind, (keys, values) in shown.items()},
            Borrowed.of(model),
        )
    except torch.OutOfMemoryError:
        raise
    except (*FAILURES, TreeSpecError) as error:
        return f"the assistant cannot read what it shows ({', '.join(shown)}): {type(error).__name__}: {error}"
    return layers


def _holds(layer: object, keys: Tensor) -> bool:
    """Whether the newest keys of a layer are those."""
    own = getattr(layer, "keys", None)
    if own is None or own.dim() != keys.dim():
        return False
    mine, theirs = own[..., -1:, :], keys[..., -1:, :]
    return mine.shape == theirs.shape and bool(torch.equal(mine.to(theirs.device), theirs))
