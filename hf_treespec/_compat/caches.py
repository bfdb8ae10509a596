"""Caches and their layers, under the names that each version gives them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers import cache_utils as _caches
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.configuration_utils import GenerationMode

__all__ = [
    "EMPTY_LAYERS",
    "FP8_LAYERS",
    "GROUPED_LAYERS",
    "cache_from_outputs",
    "cache_kwarg",
    "cache_length",
    "dequantized",
    "exact_tokens",
    "generation_cache",
    "is_config",
    "is_linear_attention",
    "is_offloaded",
    "is_user_defined",
    "make_cache",
    "passed_cache",
    "quantizes_in_groups",
    "through_quantization",
]


# Layers that keep their states in 8-bit floating point, each token for itself. Transformers has them since 5.21.
FP8_LAYERS: tuple[type, ...] = tuple(
    getattr(_caches, name) for name in ("Fp8QuantizedLayer",) if hasattr(_caches, name)
)

# Layers that hold nothing: for parts of a model that read the states of others. Transformers has them since 5.22.
EMPTY_LAYERS: tuple[type, ...] = tuple(getattr(_caches, name) for name in ("DummyLayer",) if hasattr(_caches, name))

# Layers that quantize in groups: new states stay exact until there are `residual_length`, then all are quantized anew.
GROUPED_LAYERS: tuple[type, ...] = (_caches.QuantoQuantizedLayer, _caches.HQQQuantizedLayer)


def cache_kwarg(model: nn.Module) -> str:
    """Name of the cache argument of `forward`: "cache" since 5.24, "past_key_values" before."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def cache_from_outputs(outputs: Any) -> Cache | None:
    """The cache that a forward returned, under its old or new name."""
    return outputs["cache"] if "cache" in outputs else outputs.get("past_key_values")  # type: ignore[no-any-return]


def passed_cache(model_kwargs: dict[str, Any]) -> Any:
    """The cache of a prepared call, under its old or new name."""
    return model_kwargs.get("cache", model_kwargs.get("past_key_values"))


def cache_length(cache: Cache) -> int:
    """Physical length as an int (static layers return a tensor)."""
    return int(cache.get_seq_length())


def make_cache(config: PreTrainedConfig) -> DynamicCache:
    """The dynamic cache that `generate` would make for this config, sliding layers included."""
    return DynamicCache(config=config.get_text_config(decoder=True))


def generation_cache(model: Any) -> Cache:
    """The empty cache that `generate` would make for this model; a pair of caches for an encoder-decoder."""
    kwargs: dict[str, Any] = {}
    model._prepare_cache_for_generation(GenerationConfig(), kwargs, GenerationMode.GREEDY_SEARCH, 1, 64)
    return passed_cache(kwargs)  # type: ignore[no-any-return]


def dequantized(layer: Any) -> tuple[Tensor, Tensor]:
    """Keys and values `[B, H, L, D]` that an initialised quantized layer holds, as its next update would give them."""
    keys, values = layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values)
    if getattr(layer, "_pending_beam_idx", None) is not None:
        keys, values = layer._apply_pending_reorder(keys, values)
    if exact_tokens(layer):
        keys, values = torch.cat([keys, layer.keys], dim=-2), torch.cat([values, layer.values], dim=-2)
    return keys, values


def quantizes_in_groups(layer: Any) -> bool:
    """Whether the layer holds its newest states exactly for a while."""
    return isinstance(layer, _caches.QuantizedLayer)


def exact_tokens(layer: Any) -> int:
    """How many of its newest tokens a quantized layer holds exactly."""
    # Without any the tensor has one axis.
    return int(layer.keys.shape[-2]) if layer.is_initialized and layer.keys.dim() == 4 else 0


def through_quantization(layer: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """New states as attention sees them right after the update of an initialised quantized layer."""
    if quantizes_in_groups(layer):
        return keys, values
    stored = layer._quantized_keys, layer._quantized_values
    new = zip((keys, values), stored, strict=True)
    seen = [layer._dequantize(layer._quantize(states, scale=scale)) for states, (_, scale) in new]
    return seen[0], seen[1]


def is_config(value: Any) -> bool:
    """Whether a part of a layer's state is the config of its model."""
    return isinstance(value, PreTrainedConfig)


def is_linear_attention(layer: Any) -> bool:
    """Whether a layer keeps a recurrent state, alone or beside an attention's."""
    return isinstance(layer, _caches.LinearAttentionCacheLayerMixin)


def is_offloaded(cache: Cache) -> bool:
    """Whether the layers of the cache move between devices during a forward."""
    return bool(getattr(cache, "offloading", False))


def is_user_defined(cache: Cache) -> bool:
    """Whether the caller passed the cache in, so that it outlives the call."""
    return bool(getattr(cache, "_is_user_defined", False))
