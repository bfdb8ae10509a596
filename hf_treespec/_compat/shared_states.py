"""Assistants that read hidden states and keys and values of their target (those of Gemma 4)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_treespec._compat.caches import cache_kwarg

__all__ = ["assistant_sizes", "read_shared", "reads_shared_states", "shared_states"]

# States by kind of layer: keys and values, each [B, heads, L, head size].
States = Mapping[str, tuple[Tensor, Tensor]]


def reads_shared_states(model: Any) -> bool:
    """Whether a model is such an assistant: it has a forward over states of another model and none over tokens."""
    if not isinstance(model, PreTrainedModel) or not hasattr(model.config, "backbone_hidden_size"):
        return False
    return "shared_kv_states" in inspect.signature(model.forward).parameters


def assistant_sizes(assistant: PreTrainedModel) -> tuple[int, int]:
    """Width of the target's hidden states, and ids of its vocabulary."""
    return int(assistant.config.backbone_hidden_size), int(assistant.config.get_text_config().vocab_size)


def shared_states(model: PreTrainedModel, ids: Tensor, cache: Cache) -> tuple[Tensor, States]:
    """The last hidden states `[B, T, H]` of a small forward, and the states that the model shows to assistants.

    Args:
        model: the target.
        ids: int64 `[B, T]`.
        cache: extended in place.
    """
    outputs = model(
        input_ids=ids,
        use_cache=True,
        return_dict=True,
        output_hidden_states=True,
        return_shared_kv_states=True,
        **{cache_kwarg(model): cache},
    )
    return outputs.hidden_states[-1], dict(getattr(outputs, "shared_kv_states", None) or {})


def read_shared(
    assistant: PreTrainedModel,
    inputs: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    states: Mapping[str, tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """One forward of an assistant.

    Args:
        assistant: the assistant.
        inputs: `[B, Q, 2 H]`, of each token its embedding and the hidden state of the token before it.
        positions: int64 `[B, Q]`.
        mask: int64 `[B, L]` with 0 at padding, or None.
        states: of the target.

    Returns:
        `[B, Q, H]`, what takes the place of the target's hidden states; and logits `[B, Q, V]`.
    """
    extra: dict[str, Any] = {}
    if "logits_to_keep" in inspect.signature(assistant.model.forward).parameters:
        # An int lets its decoder look for inputs by layer, which it has none of, as soon as there are several queries.
        extra["logits_to_keep"] = torch.arange(inputs.shape[1], device=inputs.device)
    outputs = assistant(
        inputs_embeds=inputs,
        position_ids=positions,
        attention_mask=mask,
        shared_kv_states=dict(states),
        use_cache=False,
        return_dict=True,
        **extra,
    )
    return outputs.last_hidden_state, outputs.logits
