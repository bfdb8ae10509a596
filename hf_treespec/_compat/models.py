"""What a model says about itself."""

from __future__ import annotations

import copy
import inspect
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput

from hf_treespec._compat.caches import cache_kwarg

__all__ = [
    "accepts_position_ids",
    "cross_attention_layers",
    "decoder_of",
    "embedding_rows",
    "encoder_states",
    "has_alibi",
    "has_compiled_parts",
    "input_device",
    "is_encoder_decoder",
    "is_stateful",
    "max_positions",
    "max_sequence",
    "model_forward",
    "new_base_model",
    "overrides_generate",
    "overrides_sampling",
    "supports_dynamic_cache",
    "supports_logits_to_keep",
    "text_part",
    "token_streams",
    "vocabulary_size",
    "weights_place",
    "working_dtype",
]


def supports_dynamic_cache(model: Any) -> bool:
    """Whether `generate` gives this model a `DynamicCache`."""
    return bool(type(model)._supports_default_dynamic_cache())


def overrides_sampling(model: PreTrainedModel) -> bool:
    """Whether the class of the model has a sampling loop of its own."""
    base: Any = getattr(type(model), "_treespec_base", type(model))
    return not base._sample.__qualname__.startswith("GenerationMixin.")


def overrides_generate(model: PreTrainedModel) -> bool:
    """Whether the class of the model has a `generate` of its own that never runs that of transformers."""
    for base in type(model).__mro__:
        if base is GenerationMixin:
            return False
        if "generate" in vars(base):
            methods = (inspect.unwrap(value) for value in vars(base).values() if inspect.isfunction(value))
            names = [_names_in(method.__code__) for method in methods]
            return not any("generate" in found and found & {"super", "GenerationMixin"} for found in names)
    return False


def _names_in(code: CodeType) -> set[str]:
    """Names that a function uses, functions inside of it included."""
    parts = (part for part in code.co_consts if isinstance(part, CodeType))
    return {*code.co_names, *(name for part in parts for name in _names_in(part))}


def is_encoder_decoder(model: Any) -> bool:
    """Whether `generate` runs an encoder once and decodes behind it."""
    return bool(model.config.is_encoder_decoder)


def decoder_of(model: Any) -> nn.Module:
    """The part of a model that reads the generated tokens."""
    return model.get_decoder() if is_encoder_decoder(model) else model  # type: ignore[no-any-return]


def encoder_states(model: Any) -> dict[str, Any]:
    """What an encoder may have read, as arguments of decoding forwards; nothing for a decoder alone.

    Random states, since the inputs of an encoder may be of any kind.
    """
    if not is_encoder_decoder(model):
        return {}
    # A generator of its own: the random numbers of the process must not move.
    shape = (1, 5, int(model.get_encoder().config.hidden_size))
    states = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return {"encoder_outputs": BaseModelOutput(last_hidden_state=states.to(model.device, model.dtype))}


def weights_place(model: PreTrainedModel) -> str:
    """Where the weights are: "here", "offloaded" (a hook of accelerate brings them in for a forward) or "nowhere".

    Of weights that are nowhere only shapes are known: at least some lie on the meta device.
    """
    if not any(parameter.device.type == "meta" for parameter in model.parameters()):
        return "here"
    return "offloaded" if any(hasattr(module, "_hf_hook") for module in model.modules()) else "nowhere"


def is_stateful(model: Any) -> bool:
    """Whether the model's state is recurrent."""
    return bool(model._is_stateful)


def cross_attention_layers(model: PreTrainedModel) -> list[int]:
    """Layers of a decoder that read another sense, and keep its states, of a length of their own, in the cache."""
    return list(getattr(model.config.get_text_config(), "cross_attention_layers", None) or [])


def accepts_position_ids(model: PreTrainedModel) -> bool:
    """Whether `generate` prepares position ids for the model."""
    return "position_ids" in inspect.signature(model.forward).parameters


def supports_logits_to_keep(model: Any) -> bool:
    """Whether the forward can leave out logits."""
    return bool(model._supports_logits_to_keep())


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


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether torch.compile has replaced the call of a module inside, or the module."""
    modules = model.modules()
    return any(module._compiled_call_impl is not None or "_orig_mod" in module._modules for module in modules)


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


def working_dtype(model: PreTrainedModel) -> torch.dtype:
    """The floating type that forwards go by: that of autocast where the caller has it on, else that of the weights.

    float32 for a model without any.
    """
    device = model.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def embedding_rows(model: PreTrainedModel) -> int:
    """Token ids that the model can read."""
    # DeepSpeed ZeRO-3 leaves a parameter empty between forwards and keeps its shape beside it.
    return min(int(getattr(table.weight, "ds_shape", table.weight.shape)[0]) for table in _tables(model))


def token_streams(model: PreTrainedModel) -> int:
    """Tokens that the model reads at once in each step: a model of sound has one for each of its codebooks."""
    return len(_tables(model))


def _tables(model: PreTrainedModel) -> list[Any]:
    found: Any = model.get_input_embeddings()
    return list(found) if isinstance(found, nn.ModuleList) else [found]


def new_base_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A random base model of a config, under sdpa and without embeddings; the process's random numbers do not move."""
    config = copy.deepcopy(config)
    # The table of embeddings is not kept.
    config.vocab_size, config.pad_token_id = 1, None
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = AutoModel.from_config(config, attn_implementation="sdpa")
    model.embed_tokens = nn.Identity()
    return model.eval()
