"""Refusals by the call's arguments. All are raised before any forward and before anything is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_treespec import _compat
from hf_treespec.cache import check_cache
from hf_treespec.errors import UnsupportedCallError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

__all__ = ["check_inputs", "check_path_inputs", "check_path_settings", "check_settings"]


def check_settings(generation_config: GenerationConfig, *, synced_gpus: bool) -> None:
    """Refuse settings that cannot be right with a tree, before `generate` prepares anything.

    Raises:
        UnsupportedCallError: naming the argument and what to do.
    """
    if generation_config.use_cache is False:
        raise UnsupportedCallError("use_cache=False with tree_config: a tree needs the cache; leave use_cache at True")
    if synced_gpus:
        raise UnsupportedCallError(
            "synced_gpus=True with tree_config: ranks would run different numbers of forwards and hang; "
            "generate without tree_config under ZeRO-3 or FSDP"
        )
    kind = generation_config.cache_implementation
    if kind not in (None, "dynamic"):
        raise UnsupportedCallError(
            f"cache_implementation={kind!r} with tree_config: a tree needs a dynamic cache, whose layers are of class "
            "DynamicLayer; leave cache_implementation out"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, name) and generation_config.return_dict_in_generate:
            raise UnsupportedCallError(
                f"{name}=True with tree_config: a tree forward has other rows than plain decoding; leave {name} out, "
                "or generate without tree_config"
            )


def check_inputs(input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Refuse inputs that cannot be right with a tree, before the prefill.

    Raises:
        UnsupportedCallError: naming the argument and what to do.
    """
    if model_kwargs.get("inputs_embeds") is not None and model_kwargs.get("encoder_outputs") is None:
        raise UnsupportedCallError("inputs_embeds with tree_config: drafts need token ids; pass input_ids instead")
    cache = _compat.passed_cache(model_kwargs)
    if cache is not None:
        check_cache(cache)
    if input_ids.shape[1] == 0:
        raise UnsupportedCallError("input_ids are empty: pass at least one token, for example the bos token")


def check_path_settings(generation_config: GenerationConfig) -> None:
    """Refuse settings that only the mask route can serve, for a model that reads trees path by path.

    Raises:
        UnsupportedCallError: naming the argument and what to do.
    """
    kind = generation_config.cache_implementation
    if kind not in (None, "dynamic"):
        raise UnsupportedCallError(
            f"cache_implementation={kind!r} with tree_config: this model reads a tree path by path, which repeats the "
            "rows of a dynamic cache; leave cache_implementation out"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, name) and generation_config.return_dict_in_generate:
            raise UnsupportedCallError(
                f"{name}=True with tree_config: this model reads a tree path by path, in other rows than plain "
                f"decoding; leave {name} out, or generate without tree_config"
            )


def check_path_inputs(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> None:
    """Refuse a passed-in cache of the other kind: plain decoding would mix up what the two attentions have read.

    Raises:
        UnsupportedCallError: naming the class that was expected.
    """
    cache = _compat.passed_cache(model_kwargs)
    if cache is None:
        return
    pair = _compat.is_encoder_decoder(model)
    if isinstance(cache, _compat.EncoderDecoderCache) != pair:
        wanted = "EncoderDecoderCache" if pair else "DynamicCache"
        raise UnsupportedCallError(
            f"cache of type {type(cache).__name__} for {type(model).__name__}: expected {wanted}"
        )
