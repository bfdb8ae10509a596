"""Which attention implementation runs the tree forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hf_treespec import _compat
from hf_treespec.errors import UnsupportedCallError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["attention_for_trees"]


@contextmanager
def attention_for_trees(model: PreTrainedModel, wanted: str) -> Iterator[None]:
    """Run the model under an attention that takes tree masks, and give it back its own afterwards.

    Args:
        model: target or draft.
        wanted: "auto" for the model's own, else "sdpa" or "eager".

    Raises:
        UnsupportedCallError: with "auto" for a model whose own attention cannot take a tree mask.
    """
    own = _compat.attention_implementation(model)
    if wanted == "auto":
        if own not in _compat.MASK_IMPLEMENTATIONS:
            raise UnsupportedCallError(
                f"{type(model).__name__} runs attn_implementation={own!r}, which takes no tree mask; expected one of "
                f"{_compat.MASK_IMPLEMENTATIONS}. Load the model with attn_implementation='sdpa', or pass "
                "TreeConfig(attention='sdpa') to switch it for the call"
            )
        wanted = own
    with _compat.switch_attention(model, wanted):
        yield
