"""Attention implementations and mask builders."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import AttentionInterface

__all__ = [
    "MASK_IMPLEMENTATIONS",
    "add_attention",
    "attention_function_of",
    "attention_implementation",
    "attention_implementations",
    "custom_attention",
    "mask_function_of",
    "mask_window",
    "register_attention_function",
    "register_mask_function",
    "switch_attention",
]


MASK_IMPLEMENTATIONS = ("sdpa", "eager")


def mask_function_of(name: str) -> Callable[..., Any]:
    """The mask builder registered under an attention name."""
    return AttentionMaskInterface()[name]  # type: ignore[no-any-return]


def register_attention_function(name: str, function: Callable[..., Any]) -> None:
    """Replace the function of an attention name for the whole process."""
    AttentionInterface.register(name, function)


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
    remove = add_attention(name, attend, mask_function_of(mask_like))
    try:
        with switch_attention(model, name):
            yield
    finally:
        remove()


def add_attention(name: str, attend: Callable[..., Any], mask_function: Callable[..., Any]) -> Callable[[], None]:
    """Register an attention and the mask builder that goes with it; the result takes both back."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask_function)

    def remove() -> None:
        # There is no public way to take a name back.
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)

    return remove


def attention_function_of(name: str, module: Any) -> Callable[..., Any] | None:
    """The function that an attention module runs under a name; eager attention is a function beside its class."""
    if name != "eager":
        return AttentionInterface()[name]  # type: ignore[no-any-return]
    files = [sys.modules[cls.__module__] for cls in type(module).__mro__ if cls.__module__ in sys.modules]
    found = [file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward")]
    return found[0] if found else None


def mask_window(predicate: Callable[..., Any], local_size: int | None) -> int | None:
    """How many positions a mask predicate lets a query see, its own included; 0 for all that are not behind it.

    Args:
        predicate: of a mask builder's call, over (row, head, query position, key position).
        local_size: what the call says of a window or chunk.

    Returns:
        None for a predicate of another kind, such as a chunk, or one that looks at the text.
    """
    if predicate is causal_mask_function:
        return 0
    if not local_size or not _of_numbers(predicate):
        return None
    first, query, keys = torch.tensor(0), torch.tensor(2 * local_size), torch.arange(2 * local_size + 2)
    window = (keys <= query) & (keys > query - local_size)
    return local_size if torch.equal(predicate(first, first, query, keys).expand_as(window), window) else None


def _of_numbers(value: Any) -> bool:
    """Whether a function depends on its arguments and on integers alone."""
    if isinstance(value, tuple):
        return all(_of_numbers(part) for part in value)
    if isinstance(value, int):
        return True
    cells = getattr(value, "__closure__", ()) or ()
    return hasattr(value, "__code__") and all(_of_numbers(cell.cell_contents) for cell in cells)
