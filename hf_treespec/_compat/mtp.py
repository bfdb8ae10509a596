"""Multi-token prediction modules: the extra layers of a checkpoint that transformers gathers in one `MtpModel`."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, create_causal_mask
from transformers.modeling_layers import MtpModel

from hf_treespec._compat.caches import cache_kwarg

__all__ = [
    "cache_of_module",
    "follow_model",
    "is_mtp",
    "load_mtp",
    "make_mtp_cache",
    "mtp_config",
    "mtp_count",
    "mtp_declared",
    "mtp_embed",
    "mtp_logits",
    "mtp_place",
    "read_mtp",
]


def is_mtp(value: Any) -> bool:
    """Whether an object is a set of such modules."""
    return isinstance(value, MtpModel)


def mtp_declared(model: PreTrainedModel) -> int:
    """How many modules the checkpoint of a model has by its config; 0 for none."""
    return int(getattr(model.config.get_text_config(decoder=True), "num_mtp_layers", None) or 0)


def load_mtp(model: PreTrainedModel) -> PreTrainedModel:
    """The modules of a model, from the checkpoint that it was loaded from; embeddings and head are the model's own.

    They have the type in which the model computes now, but for what transformers keeps in float32.

    Raises:
        OSError, ValueError, RuntimeError: if there is no checkpoint, or it lacks some of their weights.
    """
    modules: PreTrainedModel = MtpModel.from_pretrained(model, device_map={"": _last_device(model)})
    _cast(modules, model)
    follow_model(modules, model)
    return modules


def follow_model(modules: Any, model: PreTrainedModel) -> None:
    """Bring the modules to where the last layer of their model is, and give them its embeddings and head.

    Only what belongs to the modules alone is moved, and put into evaluation. Their type is that of their loading: the
    weights of the model may have become of one in which nothing else could be kept.
    """
    device = _last_device(model)
    for part in _own_parts(modules):
        part.to(device).eval()
    table, own = model.get_input_embeddings(), modules.embed_tokens
    # With a norm of its own, which the modules go without, it is a copy of the table; the weight need not be.
    tied = own is table or (hasattr(table, "embed_norm") and own.weight is table.weight)
    if not tied or modules.shared_head is not model.lm_head:
        modules.tie_with_main_model(model)
        if modules.embed_tokens is not table:
            modules.embed_tokens.weight = table.weight


def mtp_place(modules: Any) -> tuple[torch.device, torch.dtype]:
    """Device and type of the modules' own weights: of those that read the inputs, as norms may be kept in float32."""
    weights = [modules.layers[0].eh_proj.weight, *modules.layers.parameters()]
    weight = next(weight for weight in weights if _computes(weight))
    return weight.device, weight.dtype


def _last_device(model: PreTrainedModel) -> torch.device:
    layers: Any = model.get_decoder().get_submodule("layers")
    weight = next(layers[-1].parameters(), None)
    return model.device if weight is None else weight.device


def _computes(tensor: Tensor) -> bool:
    """Whether these are numbers to compute with, rather than ones that some scale belongs to."""
    return tensor.is_floating_point() and tensor.element_size() > 1


def _cast(modules: Any, model: PreTrainedModel) -> None:
    wanted = model.dtype
    if wanted.itemsize == 1:
        wanted = next((weight.dtype for weight in model.parameters() if _computes(weight)), mtp_place(modules)[1])
    # As `from_pretrained` has it.
    names = {
        *((model._keep_in_fp32_modules or ()) if wanted is torch.float16 else ()),
        *((model._keep_in_fp32_modules_strict or ()) if wanted in (torch.float16, torch.bfloat16) else ()),
    }
    kept = [re.compile(re.escape(name).replace(r"\*", ".*")) for name in names]
    for part in _own_parts(modules):
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
            if _computes(tensor) and not any(pattern.search(name) for pattern in kept):
                tensor.data = tensor.data.to(wanted)


def _own_parts(modules: Any) -> list[nn.Module]:
    return [modules.layers, *([modules.shared_post_norm] if modules.use_shared_post_norm else [])]


def mtp_count(modules: Any) -> int:
    """How many there are."""
    return len(modules.layers)


def mtp_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The config that the modules of a model have.

    Raises:
        ValueError: if the model has none, or its config does not say of what kind they are.
    """
    config: PreTrainedConfig = model.config.get_mtp_config()
    return config


def make_mtp_cache(config: PreTrainedConfig) -> DynamicCache:
    """A cache with a layer for each module of this config."""
    return DynamicCache(config=config)


def cache_of_module(cache: Cache, number: int) -> Cache:
    """A cache whose only layer is that of one module: the very object."""
    alone = DynamicCache()
    alone.layers = [cache.layers[number]]
    return alone


def mtp_embed(modules: Any, ids: Tensor) -> Tensor:
    """Embeddings `[..., H]` as the modules read them."""
    table = modules.embed_tokens
    out: Tensor = table(ids.to(next(table.parameters()).device))
    return out


def read_mtp(
    modules: Any,
    number: int,
    embeddings: Tensor,
    states: Tensor,
    *,
    positions: Tensor,
    mask: Tensor | None,
    cache: Cache,
) -> Tensor:
    """One forward of one module; returns the states `[B, T, H]` that the next module reads.

    Args:
        modules: all of them.
        number: of the module.
        embeddings: `[B, T, H]` of the tokens.
        states: `[B, T, H]`, what the module before gave for the tokens in front of them; for the first the model's
            last hidden states.
        positions: int64 `[B, T]` of the tokens.
        mask: int64 `[B, L + T]` with 0 at padding, or None; what else is masked is for the mask functions.
        cache: of all modules; extended in place.
    """
    config = modules.config
    layer_types = getattr(config, "layer_types", None)
    kind = None if layer_types is None else layer_types[number]
    extra: dict[str, Any] = {}
    embeddings_of_positions = None
    if modules.rotary_emb is not None:
        # Since 5.18 some kinds of layers have positions of their own.
        by_kind = {"layer_type": kind} if getattr(modules, "has_per_layer_rope", False) else {}
        embeddings_of_positions = modules.rotary_emb(embeddings, position_ids=positions, **by_kind)
    layer = modules.layers[number]
    extra[cache_kwarg(layer)] = cache
    out: Tensor = layer(
        embeddings,
        states,
        position_embeddings=embeddings_of_positions,
        position_ids=positions,
        attention_mask=_mask(config, kind, number, embeddings, mask, cache),
        **extra,
    )
    if modules.use_shared_post_norm:
        out = modules.shared_post_norm(out)
    return out


def _mask(
    config: Any, kind: str | None, number: int, embeddings: Tensor, mask: Tensor | None, cache: Cache
) -> Tensor | None:
    make: Any = LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.get(kind or "", create_causal_mask)
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[number]
    # Its rows and lengths are those of the module's own layer.
    arguments = {"config": config, "inputs_embeds": embeddings, "attention_mask": mask, "layer_idx": number}
    out: Tensor | None = make(**arguments, **{_cache_name(make): cache})
    return out


def _cache_name(function: Any) -> str:
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"


def mtp_logits(modules: Any, states: Tensor) -> Tensor:
    """Logits `[..., V]` of what a module gave."""
    weight = next(modules.shared_head.parameters())
    out: Tensor = modules._project_to_logits(states.to(weight.device, weight.dtype))
    return out
