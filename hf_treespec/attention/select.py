"""Which attention implementation runs the tree forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from hf_treespec import _compat
from hf_treespec.attention.grouped import shared_heads_as_they_are
from hf_treespec.attention.kernel import KERNEL, kernel_attention
from hf_treespec.errors import UnsupportedCallError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["attention_for_drafts", "attention_for_probes", "attention_for_trees", "check_attention"]


def check_attention(model: PreTrainedModel, wanted: str) -> None:
    """Refuse a model whose own attention takes no tree mask, unless the call names one that does.

    Raises:
        UnsupportedCallError: naming the attention and what to do.
    """
    own = _compat.attention_implementation(model)
    if wanted in ("auto", KERNEL) and own not in _compat.MASK_IMPLEMENTATIONS:
        raise UnsupportedCallError(
            f"{type(model).__name__} runs attn_implementation={own!r}, which takes no tree mask; expected one of "
            f"{_compat.MASK_IMPLEMENTATIONS}. Load the model with attn_implementation='sdpa', or pass "
            "TreeConfig(attention='sdpa') to switch it for the call"
        )


@contextmanager
def attention_for_trees(model: PreTrainedModel, wanted: str) -> Iterator[None]:
    """Run the model under an attention that takes tree masks, and give it back its own afterwards.

    Args:
        model: target or draft.
        wanted: "auto" for the model's own, "treespec" for the kernel, else "sdpa" or "eager".

    Raises:
        UnsupportedCallError: with "auto" and "treespec" for a model whose own attention cannot take a tree mask.
    """
    check_attention(model, wanted)
    own = _compat.attention_implementation(model)
    attention = (
        kernel_attention(model)
        if wanted == KERNEL
        else _compat.switch_attention(model, own if wanted == "auto" else wanted)
    )
    with shared_heads_as_they_are(), attention:
        yield


def attention_for_drafts(model: PreTrainedModel, wanted: str) -> AbstractContextManager[None]:
    """`attention_for_trees` for a draft: it reads a level at a time, for which the kernel was not made."""
    return attention_for_trees(model, "auto" if wanted == KERNEL else wanted)


def attention_for_probes(model: PreTrainedModel) -> AbstractContextManager[None]:
    """`attention_for_trees` for any model: its own attention if that takes tree masks, else sdpa, as calls may ask."""
    own = _compat.attention_implementation(model)
    return attention_for_trees(model, "auto" if own in _compat.MASK_IMPLEMENTATIONS else "sdpa")
