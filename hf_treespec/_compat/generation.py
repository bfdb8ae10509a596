"""The private parts of `generate`."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

__all__ = [
    "chunks_behind_a_cache",
    "continued_kwargs",
    "continues_by_itself",
    "decode_context",
    "decoder_output",
    "default_config",
    "end_stream",
    "eos_token_ids",
    "generation_defaults",
    "has_process_group",
    "mask_length",
    "pad_token_id",
    "plain_step",
    "prefill",
    "prepare_inputs",
    "rereads_all",
    "start_kwargs",
    "stream",
]


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


def eos_token_ids(criterion: EosTokenCriteria) -> frozenset[int]:
    """Ids that end a row."""
    return frozenset(int(token) for token in torch.as_tensor(criterion.eos_token_id).flatten().tolist())


def mask_length(generation_config: GenerationConfig, attention_mask: Tensor | None) -> int | None:
    """Width of the 2D mask of the call. Since 5.18 an all-ones mask is dropped and only its width recorded."""
    if attention_mask is not None:
        return int(attention_mask.shape[1])
    return getattr(generation_config, "_mask_length", None)


def chunks_behind_a_cache() -> bool:
    """Whether a prefill in chunks goes on behind a passed-in cache: before 5.24 it began again at position 0."""
    return _release() >= (5, 24)


def _release() -> tuple[int, ...]:
    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


def prefill(model: Any, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> Any:
    """The prefill of plain decoding: chunking, passed-in caches and multimodal inputs included."""
    return model._prefill(input_ids, generation_config, model_kwargs)


def prepare_inputs(model: Any, input_ids: Tensor, **model_kwargs: Any) -> dict[str, Any]:
    """Inputs of a decoding forward, by the model's own rules."""
    return model.prepare_inputs_for_generation(input_ids, **model_kwargs)  # type: ignore[no-any-return]


def stream(streamer: Any, tokens: Tensor) -> None:
    """One step to a streamer."""
    streamer.put(tokens)


def end_stream(streamer: Any) -> None:
    """Tell a streamer that the text is complete."""
    streamer.end()


def has_process_group() -> bool:
    """Whether torch.distributed is ready for collectives."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def default_config() -> GenerationConfig:
    """The settings of a call that sets none."""
    return GenerationConfig()


def start_kwargs(model: Any, input_ids: Tensor, attention_mask: Tensor | None) -> dict[str, Any]:
    """The keyword arguments with which `generate` would begin to decode a prompt that is padded as the mask says."""
    kwargs: dict[str, Any] = {"use_cache": True}
    if attention_mask is None and _release() < (5, 18):
        # Since then a mask without padding is dropped.
        attention_mask = torch.ones_like(input_ids)
    if attention_mask is not None:
        kwargs["attention_mask"] = attention_mask
    if "position_ids" in inspect.signature(model.forward).parameters and not model.config.is_encoder_decoder:
        kwargs["position_ids"] = model._prepare_position_ids_for_generation(input_ids, kwargs)
    mode = GenerationMode.GREEDY_SEARCH
    model._prepare_cache_for_generation(default_config(), kwargs, mode, int(input_ids.shape[0]), 64)
    return kwargs


def rereads_all(model: Any, text: Tensor) -> bool:
    """Whether a step of plain decoding is given the whole text `[B, L]`, for want of a cache."""
    kwargs = start_kwargs(model, text, None)
    inputs = model.prepare_inputs_for_generation(text, next_sequence_length=1, **kwargs)
    return int(inputs["input_ids"].shape[1]) >= text.shape[1]


def plain_step(model: Any, outputs: Any, text: Tensor, model_kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A step of plain decoding.

    Args:
        model: the model.
        outputs: of the forward before.
        text: int64 `[B, L]`, whose last column is new.
        model_kwargs: those of the forward before.

    Returns:
        The outputs of this forward and its keyword arguments.
    """
    kwargs = _continued(model, outputs, model_kwargs)
    inputs = model.prepare_inputs_for_generation(text, next_sequence_length=1, **kwargs)
    return model(**inputs, return_dict=True), kwargs


def continues_by_itself(model: Any) -> bool:
    """Whether the class of the model has its own rule for what becomes of the arguments of one forward in the next."""
    return not type(model)._update_model_kwargs_for_generation.__qualname__.startswith("GenerationMixin.")


def continued_kwargs(model: Any, outputs: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of decoding behind a prefill: those of the prefill, unless the class has its own rule.

    Such a rule may say that the first forward is over, or hand on what it has read of another sense.
    """
    return _continued(model, outputs, model_kwargs) if continues_by_itself(model) else model_kwargs


def _continued(model: Any, outputs: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    pair = model.config.is_encoder_decoder
    kwargs: dict[str, Any] = model._update_model_kwargs_for_generation(
        outputs, dict(model_kwargs), is_encoder_decoder=pair
    )
    return kwargs
