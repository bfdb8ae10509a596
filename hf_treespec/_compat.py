"""The only file that knows transformers versions and private names.

Each shim says when it can go. Supported: transformers 5.17 to 5.24.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import cache_utils as _caches
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.generation import logits_process as _lp
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.masking_utils import AttentionMaskInterface

from hf_treespec.errors import TreeSpecWarning

__all__ = [
    "FP8_LAYERS",
    "GROUPED_LAYERS",
    "MASK_IMPLEMENTATIONS",
    "Cache",
    "DynamicCache",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "EncoderDecoderCache",
    "EosTokenCriteria",
    "GenerationMixin",
    "GenerationMode",
    "GuidanceProcessor",
    "MaxLengthCriteria",
    "MaxTimeCriteria",
    "PreTrainedModel",
    "StaticLayer",
    "StaticSlidingWindowLayer",
    "StopStringCriteria",
    "accepts_position_ids",
    "attention_implementation",
    "cache_from_outputs",
    "cache_kwarg",
    "cache_length",
    "chunks_behind_a_cache",
    "cross_attention_layers",
    "decode_context",
    "decoder_of",
    "decoder_output",
    "dequantized",
    "embedding_rows",
    "encoder_width",
    "end_stream",
    "eos_token_ids",
    "exact_tokens",
    "generation_cache",
    "generation_defaults",
    "has_alibi",
    "has_process_group",
    "input_device",
    "is_encoder_decoder",
    "is_offloaded",
    "is_stateful",
    "is_user_defined",
    "length_free_processors",
    "make_cache",
    "mask_function_of",
    "mask_length",
    "max_positions",
    "max_sequence",
    "model_forward",
    "overrides_sampling",
    "pad_token_id",
    "passed_cache",
    "prefill",
    "prepare_inputs",
    "process_logits",
    "pure_processors",
    "quantizes_in_groups",
    "register_mask_function",
    "stream",
    "supports_dynamic_cache",
    "supports_logits_to_keep",
    "switch_attention",
    "text_part",
    "through_quantization",
    "vocabulary_size",
    "warn_once",
]

MASK_IMPLEMENTATIONS = ("sdpa", "eager")
GuidanceProcessor = _lp.UnbatchedClassifierFreeGuidanceLogitsProcessor


# --- attention and masks -------------------------------------------------------------------------------------------


def mask_function_of(name: str) -> Callable[..., Any]:
    """The mask builder registered under an attention name."""
    return AttentionMaskInterface()[name]  # type: ignore[no-any-return]


def register_mask_function(name: str, function: Callable[..., Any]) -> None:
    """Replace the mask builder of an attention name for the whole process."""
    AttentionMaskInterface.register(name, function)


def attention_implementation(model: PreTrainedModel) -> str:
    """Name of the attention that the text part of the model runs."""
    return str(model.config.get_text_config()._attn_implementation)


@contextmanager
def switch_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run the model with another attention; the old ones of all its parts come back on every exit.

    The setting lives in the model's config: no second thread may run the model meanwhile.
    """
    if attention_implementation(model) == name:
        yield
        return
    parts = {key: getattr(model.config, key, None) for key in getattr(model.config, "sub_configs", {})}
    before = {"": model.config._attn_implementation}
    before |= {key: part._attn_implementation for key, part in parts.items() if part is not None}
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)


# --- caches --------------------------------------------------------------------------------------------------------

# Layers that keep their states in 8-bit floating point, each token for itself. Transformers has them since 5.21.
FP8_LAYERS: tuple[type, ...] = tuple(
    getattr(_caches, name) for name in ("Fp8QuantizedLayer",) if hasattr(_caches, name)
)
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


def supports_dynamic_cache(model: Any) -> bool:
    """Whether `generate` gives this model a `DynamicCache`."""
    return bool(type(model)._supports_default_dynamic_cache())


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


def is_offloaded(cache: Cache) -> bool:
    """Whether the layers of the cache move between devices during a forward."""
    return bool(getattr(cache, "offloading", False))


# --- generation ----------------------------------------------------------------------------------------------------


def decode_context(model: Any) -> AbstractContextManager[None]:
    """What `generate` wraps around its decoding forwards (it switches the experts of MoE models)."""
    return model._optimize_model_for_decode()  # type: ignore[no-any-return]


def decoder_output(*, cache: Cache | None, encoder_decoder: bool = False, **fields: Any) -> Any:
    """The output class of plain decoding; its cache field is "cache" since 5.24, "past_key_values" before."""
    make: Any = GenerateEncoderDecoderOutput if encoder_decoder else GenerateDecoderOnlyOutput
    names = inspect.signature(make).parameters
    return make(**fields, **{"cache" if "cache" in names else "past_key_values": cache})


def generation_defaults(generation_config: GenerationConfig) -> dict[str, Any]:
    """What `generate` fills into the fields that nobody set."""
    return generation_config._get_default_generation_params()


def pad_token_id(generation_config: GenerationConfig) -> int | None:
    """The pad id that `generate` prepared for this call."""
    tensor = generation_config._pad_token_tensor
    return None if tensor is None else int(tensor)


def overrides_sampling(model: PreTrainedModel) -> bool:
    """Whether the class of the model has a sampling loop of its own."""
    base: Any = getattr(type(model), "_treespec_base", type(model))
    return not base._sample.__qualname__.startswith("GenerationMixin.")


def is_encoder_decoder(model: Any) -> bool:
    """Whether `generate` runs an encoder once and decodes behind it."""
    return bool(model.config.is_encoder_decoder)


def decoder_of(model: Any) -> nn.Module:
    """The part of a model that reads the generated tokens."""
    return model.get_decoder() if is_encoder_decoder(model) else model  # type: ignore[no-any-return]


def encoder_width(model: Any) -> int:
    """Width of the states that the encoder of an encoder-decoder hands over."""
    return int(model.get_encoder().config.hidden_size)


def is_stateful(model: Any) -> bool:
    """Whether the model's state is recurrent."""
    return bool(model._is_stateful)


def cross_attention_layers(model: PreTrainedModel) -> list[int]:
    """Layers of a decoder that read another sense, and keep its states, of a length of their own, in the cache."""
    return list(getattr(model.config.get_text_config(), "cross_attention_layers", None) or [])


def is_user_defined(cache: Cache) -> bool:
    """Whether the caller passed the cache in, so that it outlives the call."""
    return bool(getattr(cache, "_is_user_defined", False))


def accepts_position_ids(model: PreTrainedModel) -> bool:
    """Whether `generate` prepares position ids for the model."""
    return "position_ids" in inspect.signature(model.forward).parameters


def warn_once(message: str) -> None:
    """A `TreeSpecWarning`, once per process and message."""
    if message not in _WARNED:
        _WARNED.add(message)
        warnings.warn(message, TreeSpecWarning, stacklevel=3)


_WARNED: set[str] = set()


def eos_token_ids(criterion: EosTokenCriteria) -> frozenset[int]:
    """Ids that end a row."""
    return frozenset(int(token) for token in torch.as_tensor(criterion.eos_token_id).flatten().tolist())


def mask_length(generation_config: GenerationConfig, attention_mask: Tensor | None) -> int | None:
    """Width of the 2D mask of the call. Since 5.18 an all-ones mask is dropped and only its width recorded."""
    if attention_mask is not None:
        return int(attention_mask.shape[1])
    return getattr(generation_config, "_mask_length", None)


def supports_logits_to_keep(model: Any) -> bool:
    """Whether the forward can leave out logits."""
    return bool(model._supports_logits_to_keep())


def chunks_behind_a_cache() -> bool:
    """Whether a prefill in chunks goes on behind a passed-in cache: before 5.24 it began again at position 0."""
    return tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 24)


def prefill(model: Any, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> Any:
    """The prefill of plain decoding: chunking, passed-in caches and multimodal inputs included."""
    return model._prefill(input_ids, generation_config, model_kwargs)


def prepare_inputs(model: Any, input_ids: Tensor, **model_kwargs: Any) -> dict[str, Any]:
    """Inputs of a decoding forward, by the model's own rules."""
    return model.prepare_inputs_for_generation(input_ids, **model_kwargs)  # type: ignore[no-any-return]


def process_logits(processors: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """Run a list of logits processors."""
    return processors(input_ids, scores)  # type: ignore[no-any-return]


def stream(streamer: Any, tokens: Tensor) -> None:
    """One step to a streamer."""
    streamer.put(tokens)


def end_stream(streamer: Any) -> None:
    """Tell a streamer that the text is complete."""
    streamer.end()


def model_forward(
    model: PreTrainedModel,
    *,
    input_ids: Tensor,
    cache: Cache | None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    logits_to_keep: int = 0,
) -> Tensor:
    """One forward of a causal LM; returns its logits.

    Args:
        model: the model.
        input_ids: int64 [B, Q].
        cache: extended in place; None runs without a cache.
        position_ids: int64 [B, Q].
        attention_mask: int64 [B, L + Q], or None if nothing is padded.
        logits_to_keep: only the last so many positions, 0 for all. Ignored by models that cannot.

    Returns:
        Logits [B, Q, V] or [B, logits_to_keep, V].
    """
    extra: dict[str, Any] = {}
    if cache is not None:
        extra[cache_kwarg(model)] = cache
    if logits_to_keep and supports_logits_to_keep(model):
        extra["logits_to_keep"] = logits_to_keep
    if position_ids is not None:
        extra["position_ids"] = position_ids
    outputs = model(
        input_ids=input_ids, attention_mask=attention_mask, use_cache=cache is not None, return_dict=True, **extra
    )
    logits: Tensor = outputs.logits
    return logits[:, -logits_to_keep:] if logits_to_keep else logits


def vocabulary_size(model: PreTrainedModel) -> int:
    """Width of the logits by the config."""
    return int(model.config.get_text_config().vocab_size)


def max_positions(model: PreTrainedModel) -> int | None:
    """`max_position_embeddings` of the text part, if its config has one."""
    config = model.config.get_text_config(decoder=is_encoder_decoder(model) or None)
    return getattr(config, "max_position_embeddings", None)


def has_alibi(model: PreTrainedModel) -> bool:
    """Whether the config asks for a bias by distance in the cache, which no position id can move (Falcon)."""
    return bool(getattr(model.config.get_text_config(), "alibi", False))


def max_sequence(model: PreTrainedModel) -> int | None:
    """`max_seq_len` of the config, for models whose attention bias is a table of that many keys (MPT)."""
    return getattr(model.config, "max_seq_len", None)


def text_part(model: nn.Module) -> nn.Module:
    """The decoder inside a model of several senses; any other module itself."""
    if not isinstance(model, PreTrainedModel) or model.config.get_text_config(decoder=True) is model.config:
        return model
    return model.get_decoder()


def input_device(model: PreTrainedModel, given: torch.device) -> torch.device:
    """Where the inputs of a forward belong.

    Weights that accelerate offloads lie on the meta device between forwards; its hooks then move the inputs.
    """
    return given if model.device.type == "meta" else model.device


def embedding_rows(model: PreTrainedModel) -> int:
    """Token ids that the model can read."""
    table: Any = model.get_input_embeddings()
    # DeepSpeed ZeRO-3 leaves a parameter empty between forwards and keeps its shape beside it.
    return int(getattr(table.weight, "ds_shape", table.weight.shape)[0])


def has_process_group() -> bool:
    """Whether torch.distributed is ready for collectives."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _classes(*names: str) -> frozenset[type]:
    # A class that one of the supported versions lacks simply never occurs in it.
    return frozenset(getattr(_lp, name) for name in names if hasattr(_lp, name))


def length_free_processors() -> frozenset[type]:
    """Processors whose row of scores depends on that row of logits alone."""
    return _classes(
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "LogitNormalization",
        "InfNanRemoveLogitsProcessor",
        "SuppressTokensLogitsProcessor",
    )


def pure_processors() -> frozenset[type]:
    """Processors that are functions of their arguments, so that calling them in another order changes nothing."""
    return length_free_processors() | _classes(
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "SuppressTokensAtBeginLogitsProcessor",
    )
