"""Models of transformers that draft a whole block in one forward (DFlash), and what they need of their target."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from hf_treespec._compat.caches import cache_kwarg

__all__ = [
    "BLOCK_MODEL_TYPE",
    "block_forward",
    "block_settings",
    "is_block_draft",
    "lm_scaling",
    "new_block_model",
    "raw_embeddings",
]

# The one of transformers whose layers are those of the published checkpoints, under other names.
BLOCK_MODEL_TYPE = "muse_glimmer_assistant"
_INPUTS = {"noise_embeds", "context_hidden_states", "attention_mask", "position_ids"}
# Names of configs for what a model multiplies (or, Granite's, divides) its logits by: Muse Glimmer, Cohere, Falcon-H1.
_LOGIT_FACTORS = {"output_multiplier": 1, "logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
_SETTINGS = ("block_size", "mask_token_id", "target_layer_ids")


def is_block_draft(model: Any) -> bool:
    """Whether a model denoises blocks beside hidden states of a target, by its signature and its config."""
    if not isinstance(model, PreTrainedModel):
        return False
    takes = set(inspect.signature(model.forward).parameters)
    return takes >= _INPUTS and all(hasattr(model.config, name) for name in _SETTINGS)


def block_settings(config: Any) -> dict[str, Any]:
    """What the config of such a model says of its blocks: their size, the id of the mask, the layers it reads."""
    return {name: getattr(config, name) for name in _SETTINGS}


def new_block_model(settings: Mapping[str, Any]) -> PreTrainedModel:
    """A random model of that kind, under sdpa; the random numbers of the process do not move.

    Args:
        settings: of its config.

    Raises:
        ValueError, TypeError: for settings that its config does not take.
    """
    config = AutoConfig.for_model(BLOCK_MODEL_TYPE, **settings)
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = AutoModel.from_config(config, attn_implementation="sdpa")
    return model.eval()


def block_forward(
    model: PreTrainedModel,
    *,
    noise: Tensor,
    context: Tensor,
    masks: Mapping[str, Tensor | None],
    positions: Tensor,
    cache: Any,
) -> Tensor:
    """One forward; returns the last hidden states `[B, Q, E]`.

    Args:
        model: the model.
        noise: `[B, Q, E]`, embeddings of the blocks.
        context: `[B, C, F]`, features of the target that were not read before.
        masks: bool by the name of the kind of layer, `[B, 1, Q, keys]`; None shows all.
        positions: int64 `[B, C + Q]`, of the context and behind it of the blocks.
        cache: anything whose `update(keys, values, layer)` gives the keys and values to attend to; None attends to
            these alone.
    """
    # Masks that are prepared by kind of layer are taken as they are.
    given = masks
    if model.config._attn_implementation == "eager":
        low = torch.finfo(noise.dtype).min
        given = {
            kind: None
            if mask is None
            else torch.zeros(mask.shape, dtype=noise.dtype, device=mask.device).masked_fill(~mask, low)
            for kind, mask in masks.items()
        }
    extra = {cache_kwarg(model): cache}
    outputs = model(
        noise_embeds=noise, context_hidden_states=context, attention_mask=dict(given), position_ids=positions, **extra
    )
    state: Tensor = outputs.last_hidden_state
    return state


def raw_embeddings(table: nn.Module, tokens: Tensor, scale: float | None) -> Tensor:
    """Embeddings of a target as a block draft is given them.

    Args:
        table: the target's.
        tokens: ids, on any device.
        scale: of the rows of the table; None for what the table itself makes of them, but for a norm on top of them
            (Muse Glimmer), which transformers leaves out here.
    """
    weight = next(table.parameters())
    tokens = tokens.to(weight.device)
    plain = type(table) is nn.Embedding
    if (scale is None and not hasattr(table, "embed_norm")) or plain:
        out: Tensor = table(tokens)
    else:
        out = nn.functional.embedding(tokens, weight)
    return out if scale in (None, 1.0) else out * scale


def lm_scaling(model: PreTrainedModel) -> tuple[float, float | None]:
    """What a target does to the output of its LM head: a factor, and the bound of a tanh behind it, or None."""
    config = model.config.get_text_config(decoder=True)
    factor = 1.0
    for name, power in _LOGIT_FACTORS.items():
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value:
            factor *= float(value) ** power
    bound = getattr(config, "final_logit_softcapping", None)
    return factor, None if not bound else float(bound)
