"""Attention implementations and mask builders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

__all__ = [
    "MASK_IMPLEMENTATIONS",
    "attention_implementation",
    "attention_implementations",
    "custom_attention",
    "mask_function_of",
    "register_mask_function",
    "switch_attention",
]


MASK_IMPLEMENTATIONS = ("sdpa", "eager")


def mask_function_of(name: str) -> Callable[..., Any]:
    """The mask builder registered under an attention name."""
    return AttentionMaskInterface()[name]  # type: ignore[no-any-return]


def register_mask_function(name: str, function: Callable[..., Any]) -> None:
    """Replace the mask builder of an attention name for the whole process."""
    AttentionMaskInterface.register(name, function)


def attention_implementation(model: PreTrainedModel) -> str:
    """Name of the attention that the text part of the model runs."""
    return str(model.config.get_text_config()._attn_implementation)


def attention_implementations(model: PreTrainedModel) -> dict[str, str]:
    """The same of all parts by the names of their configs; that of the model itself under ""."""
    parts = {key: getattr(model.config, key, None) for key in getattr(model.config, "sub_configs", {})}
    own = {"": model.config._attn_implementation}
    return own | {key: part._attn_implementation for key, part in parts.items() if part is not None}


@contextmanager
def switch_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run the model with another attention; the old ones of all its parts come back on every exit.

    The setting lives in the model's config: no second thread may run the model meanwhile.
    """
    if attention_implementation(model) == name:
        yield
        return
    before = attention_implementations(model)
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def custom_attention(model: PreTrainedModel, name: str, attend: Callable[..., Any], mask_like: str) -> Iterator[None]:
    """Run the model with `attend` as its attention, under a name that exists inside only.

    Args:
        model: its config carries the name meanwhile.
        name: of the attention, and of the mask builder that goes with it: without one a model is given no mask.
        attend: `attend(module, query, key, value, attention_mask, **kwargs)`.
        mask_like: whose masks it takes, "sdpa" (bool) or "eager" (additive).
    """
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask_function_of(mask_like))
    try:
        with switch_attention(model, name):
            yield
    finally:
        # There is no public way to take a name back.
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
