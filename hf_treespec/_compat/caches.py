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
from transformers.generation.utils import ALL_CACHE_NAMES

__all__ = [
    "EMPTY_LAYERS",
    "FILLED_LAYERS",
    "FP8_LAYERS",
    "GROUPED_LAYERS",
    "KEY_VALUE_LAYERS",
    "cache_fault",
    "cache_from_outputs",
    "cache_kwarg",
    "cache_length",
    "carried_state",
    "dequantized",
    "dynamic_cache_of",
    "dynamic_layer",
    "exact_tokens",
    "generation_cache",
    "grows_by_concatenation",
    "has_fixed_size",
    "held_by",
    "is_config",
    "is_foreign",
    "is_linear_attention",
    "is_offloaded",
    "is_plain_cache",
    "is_user_defined",
    "make_cache",
    "passed_cache",
    "quantized_cache",
    "quantizes_in_groups",
    "replace_cache",
    "returned_cache",
    "static_cache",
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

# Layers of keys and values alone: those that `generate` makes by default, and those of other caches.
KEY_VALUE_LAYERS: tuple[type, ...] = (_caches.DynamicLayer, _caches.DynamicSlidingWindowLayer)
FILLED_LAYERS: tuple[type, ...] = (
    _caches.StaticLayer,
    _caches.StaticSlidingWindowLayer,
    *FP8_LAYERS,
    *GROUPED_LAYERS,
)


def cache_kwarg(model: nn.Module) -> str:
    """Name of the cache argument of `forward`: "cache" since 5.24, "past_key_values" before."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def cache_from_outputs(outputs: Any) -> Cache | None:
    """The cache that a forward returned, under its old or new name."""
    # Asking outputs for a name that they lack would count as the use of an old one.
    return next((outputs[name] for name in ("cache", "past_key_values") if name in list(outputs)), None)


def passed_cache(model_kwargs: dict[str, Any]) -> Any:
    """The cache of a prepared call, under its old or new name ("cache_params" for Mamba and its kin before 5.24)."""
    names = ("cache", "past_key_values", "cache_params")
    return next((model_kwargs[name] for name in names if model_kwargs.get(name) is not None), None)


def replace_cache(model_kwargs: dict[str, Any], cache: Cache) -> None:
    """Put another cache where a prepared call has its own."""
    name = next(name for name in ("cache", "past_key_values") if model_kwargs.get(name) is not None)
    model_kwargs[name] = cache


def returned_cache(model_kwargs: dict[str, Any]) -> Any:
    """What plain decoding returns as the cache, given the arguments of its last forward."""
    return next((model_kwargs[name] for name in ALL_CACHE_NAMES if name in model_kwargs), None)


def cache_length(cache: Cache) -> int:
    """Physical length as an int (static layers return a tensor); 0 if no layer counts, as for plain decoding."""
    layers = getattr(cache, "layers", ())
    return 0 if layers and all(cache.is_linear) else int(cache.get_seq_length() or 0)


def make_cache(config: PreTrainedConfig) -> DynamicCache:
    """The dynamic cache that `generate` would make for this config, sliding layers included."""
    return DynamicCache(config=config.get_text_config(decoder=True))


def cache_fault(model: Any) -> str | None:
    """Why no dynamic cache can be made for the config of a model, or None."""
    try:
        make_cache(model.config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


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


def held_by(layer: Any) -> tuple[tuple[Tensor, Tensor], int]:
    """Keys and values `[B, H, L, D]` that an initialised layer of the classes above still holds, and its length.

    A layer with a window holds the last of so many tokens.
    """
    length = int(layer.get_seq_length())
    keys: Any = layer.keys
    values: Any = layer.values
    if isinstance(layer, _caches.StaticLayer):
        held = min(length, int(layer.max_cache_len))
        return (keys[:, :, :held], values[:, :, :held]), length
    if type(layer) in (*FP8_LAYERS, *GROUPED_LAYERS):
        return dequantized(layer), length
    return (keys, values), length


def dynamic_layer(window: int | None) -> Any:
    """An empty layer of a dynamic cache."""
    return _caches.DynamicLayer() if window is None else _caches.DynamicSlidingWindowLayer(window)


def dynamic_cache_of(layers: list[Any]) -> DynamicCache:
    """A dynamic cache with these layers."""
    cache = DynamicCache()
    cache.layers, cache.layer_class_to_replicate = layers, None
    return cache


def static_cache(config: PreTrainedConfig, slots: int) -> Cache:
    """An empty static cache."""
    return _caches.StaticCache(config=config, max_cache_len=slots)


def quantized_cache(config: PreTrainedConfig, backend: str, options: dict[str, Any]) -> Cache:
    """An empty quantized cache."""
    return _caches.QuantizedCache(backend, config, **options)


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


def cache_name(cache: Any) -> str:
    """What kind of cache it is, as far as reading it costs: classes, storage, and its room where that is all read."""
    if cache is None:
        return "no cache"
    name = type(cache).__name__
    if isinstance(cache, _caches.EncoderDecoderCache):
        return f"{name} of {cache_name(cache.self_attention_cache)}"
    layers = getattr(cache, "layers", ())
    parts = ["+".join(sorted({type(layer).__name__ for layer in layers})) or "no layers"]
    parts += [str(cache.storage)] if hasattr(cache, "storage") else []
    parts += [f"{bits} bits" for bits in sorted({layer.nbits for layer in layers if hasattr(layer, "nbits")})]
    if has_fixed_size(cache):
        slots = max(int(layer.max_cache_len) for layer in layers if isinstance(layer, _caches.StaticLayer))
        parts.append(f"{1 << (slots - 1).bit_length()} slots")
    parts += ["offloaded"] if is_offloaded(cache) else []
    return f"{name} of {' '.join(parts)}"


def is_offloaded(cache: Cache) -> bool:
    """Whether the layers of the cache move between devices during a forward."""
    return bool(getattr(cache, "offloading", False))


def is_user_defined(cache: Cache) -> bool:
    """Whether the caller passed the cache in, so that it outlives the call."""
    return bool(getattr(cache, "_is_user_defined", False))


def grows_by_concatenation(layer: Any) -> bool:
    """Whether a layer's keys and values are never written in place: each update makes new ones."""
    update = getattr(type(layer), "update", None)
    return update in (_caches.DynamicLayer.update, _caches.DynamicSlidingWindowLayer.update)


def has_fixed_size(cache: Any) -> bool:
    """Whether a layer writes attention states in place, into room that was made for a number of rows."""
    return any(isinstance(layer, _caches.StaticLayer) for layer in getattr(cache, "layers", ()))


def is_foreign(layer: Any) -> bool:
    """Whether the class of a cache layer belongs to a model rather than to the caches of transformers."""
    return type(layer).__module__ != _caches.__name__


def is_plain_cache(cache: Any) -> bool:
    """Whether all that a cache holds is in its layers; a subclass may keep more."""
    return type(cache) in (
        Cache,
        DynamicCache,
        _caches.StaticCache,
        _caches.QuantizedCache,
        _caches.EncoderDecoderCache,
    )


def carried_state(model: Any, outputs: Any) -> dict[str, Any]:
    """What plain decoding hands from one forward to the next, by argument name, besides mask and positions."""
    return dict(
        model._update_model_kwargs_for_generation(outputs, {}, is_encoder_decoder=model.config.is_encoder_decoder)
    )
