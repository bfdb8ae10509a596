"""A small causal LM cut from the target: some of its layers, with its embeddings, norm and head."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hf_treespec import _compat
from hf_treespec.errors import TrainError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["cut_model", "spaced_layers"]


def spaced_layers(count: int, total: int) -> tuple[int, ...]:
    """So many of the layers, evenly spaced, the first and the last among them."""
    if count == 1:
        return (0,)
    return tuple(round(place * (total - 1) / (count - 1)) for place in range(count))


def cut_model(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model of the target's class with copies of some of its layers and of all else.

    What is tied in the target is tied in it. It is in evaluation mode, on the CPU, in the target's type.

    Args:
        target: a causal LM that is one decoder, with its weights at hand.
        layers: numbers of those that it keeps, rising.

    Raises:
        TrainError: for numbers that are not so, or a target that it cannot be cut from.
    """
    whole = f"{type(target).__name__} cannot be cut to fewer layers"
    modules = _compat.decoder_layers(target)
    if target.config.get_text_config(decoder=True) is not target.config or _compat.is_encoder_decoder(target):
        raise TrainError(f"{whole}: it is more than one decoder; train a head instead")
    if getattr(target.config, "quantization_config", None) is not None:
        raise TrainError(f"{whole}: its weights are quantized, which cannot be trained; load it without")
    if _compat.weights_place(target) != "here":
        raise TrainError(f"{whole}: its weights are not in memory")
    counted = getattr(target.config, "num_hidden_layers", None)
    if counted != len(modules):
        raise TrainError(f"{whole}: num_hidden_layers of its config is {counted}, and it has {len(modules)} layers")
    kept = list(layers)
    if not kept or kept != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < len(modules):
        raise TrainError(f"layers={tuple(kept)}: expected rising numbers from 0 to {len(modules) - 1}")
    config = copy.deepcopy(target.config)
    for name, value in _per_layer(config.to_dict(), len(modules)).items():
        setattr(config, name, [value[layer] for layer in kept])
    config.num_hidden_layers = len(kept)
    names = {id(module): name for name, module in target.named_modules()}
    prefixes = [f"{names[id(module)]}." for module in modules]
    stem = prefixes[0].rpartition("0.")[0]
    state = {}
    for key, tensor in target.state_dict().items():
        of = next((number for number, prefix in enumerate(prefixes) if key.startswith(prefix)), None)
        if of is None:
            state[key] = tensor
        elif of in kept:
            state[f"{stem}{kept.index(of)}.{key.removeprefix(prefixes[of])}"] = tensor
    base: Any = getattr(type(target), "_treespec_base", type(target))
    try:
        with torch.random.fork_rng(devices=[]):
            draft = base(config).to(target.dtype)
        draft.load_state_dict(state)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
        raise TrainError(f"{whole}: {type(error).__name__}: {error}") from error
    draft.tie_weights()
    draft.generation_config = copy.deepcopy(target.generation_config)
    cut: PreTrainedModel = draft.eval()
    return cut


def _per_layer(config: dict[str, Any], layers: int) -> dict[str, Sequence[Any]]:
    """What a config lists layer by layer, such as their types."""
    return {
        name: value
        for name, value in config.items()
        if "layer" in name and isinstance(value, list | tuple) and len(value) == layers
    }
