"""Whether a model can draft: less is asked than of a target, since no text hangs on what a draft computes."""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from hf_treespec import _compat
from hf_treespec.api.probe import FAILURES
from hf_treespec.api.support import Support, is_supported, require_support, unwrap

__all__ = ["draft_support", "require_draft_support"]

# Per model: what was said of it as a target, and of it as a draft.
_ANSWERS: WeakKeyDictionary[PreTrainedModel, tuple[Support, Support]] = WeakKeyDictionary()


def draft_support(model: Any) -> Support:
    """Whether a model can draft trees, and by which route.

    A model whose tokens disturb each other (layers that quantise all tokens of a forward on one scale) is no target,
    as no tree could equal its plain decoding. As a draft it serves if one of its class and config, without what was
    done to its layers, takes a tree mask: then only its guesses are a little off.

    Args:
        model: as for `is_supported`.
    """
    support, inner = is_supported(model), unwrap(model)
    if support.ok or not isinstance(inner, PreTrainedModel):
        return support
    known = _ANSWERS.get(inner)
    if known is None or known[0] != support:
        known = _ANSWERS[inner] = support, _as_made(inner, support)
    return known[1]


def _as_made(model: PreTrainedModel, support: Support) -> Support:
    """The answer for a model of that class and config as its code makes it; the one given if that is none."""
    base: Any = getattr(type(model), "_treespec_base", type(model))
    try:
        with torch.device("meta"), _compat.quiet_transformers():
            attention = _compat.attention_implementation(model)
            plain = base._from_config(copy.deepcopy(model.config), attn_implementation=attention, dtype=torch.float32)
    except FAILURES:
        return support
    if {type(module) for module in model.modules()} - {type(model)} == {type(m) for m in plain.modules()} - {base}:
        # Nothing was done to its layers: what the probe found is how the model is.
        return support
    answer = is_supported(plain)
    return answer._replace(reason=f"{answer.reason}; as a draft only: {support.reason}") if answer.ok else support


def require_draft_support(model: PreTrainedModel) -> Support:
    """The answer of `draft_support`, with a warning if the model were no target.

    Raises:
        UnsupportedModelError: if the model cannot draft trees, with the reason.
    """
    support = draft_support(model)
    if not support.ok:
        return require_support(model, "assistant_model")
    if not is_supported(model).ok:
        _compat.warn_once(
            f"assistant_model ({type(model).__name__}) gives other logits for a token when others share its forward, "
            "as layers do that quantise all tokens on one scale: the text is right all the same, but fewer drafted "
            "tokens are accepted"
        )
    return support
