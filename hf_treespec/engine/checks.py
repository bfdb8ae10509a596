"""Refusals that need the prepared call. All are raised before any forward and before anything is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_treespec.cache import check_cache
from hf_treespec.errors import UnsupportedCallError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["check_call"]


def check_call(model: PreTrainedModel, request: Any) -> None:
    """Refuse what cannot be right with a tree.

    Raises:
        UnsupportedCallError: naming the argument and what to do.
    """
    generation, kwargs = request.generation_config, request.model_kwargs
    if not kwargs.get("use_cache", True):
        raise UnsupportedCallError("use_cache=False with tree_config: a tree needs the cache; leave use_cache at True")
    if request.synced_gpus:
        raise UnsupportedCallError(
            "synced_gpus=True with tree_config: ranks would run different numbers of forwards and hang; "
            "generate without tree_config under ZeRO-3 or FSDP"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation, name) and generation.return_dict_in_generate:
            raise UnsupportedCallError(
                f"{name}=True with tree_config: a tree forward has other rows than plain decoding; leave {name} out, "
                "or generate without tree_config"
            )
    if kwargs.get("inputs_embeds") is not None:
        raise UnsupportedCallError("inputs_embeds with tree_config: drafts need token ids; pass input_ids instead")
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if cache is not None:
        check_cache(cache)
    if request.input_ids.shape[1] == 0:
        raise UnsupportedCallError("input_ids are empty: pass at least one token, for example the bos token")
