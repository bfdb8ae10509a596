"""What a call says about the vocabulary of its draft model: which ids, and whether its LM head can be reduced."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from hf_treespec import _compat
from hf_treespec.api.draft_support import draft_support
from hf_treespec.api.outliers import without_shared_outliers
from hf_treespec.api.probe import FAILURES, evaluation
from hf_treespec.attention import attention_for_probes
from hf_treespec.config import TreeConfig
from hf_treespec.draft import Rows, asked_vocabulary, reduced_rows, with_rows
from hf_treespec.errors import TreeConfigError, UnsupportedCallError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["check_vocabulary"]

# Per model the rows of its LM head that were tried last, and what came of it.
_TRIED: WeakKeyDictionary[PreTrainedModel, tuple[Rows, str | None]] = WeakKeyDictionary()
_INSTEAD = "leave draft_options={'model': {'vocabulary': ...}} out"


def check_vocabulary(
    model: PreTrainedModel,
    config: TreeConfig,
    assistant: PreTrainedModel,
    mode_kwargs: Mapping[str, Any],
    *,
    translated: bool,
) -> None:
    """Refuse a reduced vocabulary that is not the draft's, or a draft whose LM head cannot be reduced.

    A small forward of the draft is compared with the same under its whole head, once for its weights.

    Args:
        model: the target.
        config: of the call.
        assistant: the draft.
        mode_kwargs: of the call.
        translated: whether the draft has a tokenizer of its own, so that the ids are those of its vocabulary alone.

    Raises:
        UnsupportedCallError: naming the ids, the file or the argument.
        UnsupportedModelError: if the forward of the draft does not allow it, with the reason.
    """
    where = "TreeConfig(draft_options=...): model['vocabulary']"
    try:
        ids = asked_vocabulary(config)
    except TreeConfigError as error:
        raise UnsupportedCallError(f"{where}: {error}") from error
    if ids is None:
        return
    if mode_kwargs.get("synced_gpus"):
        raise UnsupportedCallError(
            f"synced_gpus=True with {where}: the weights of an LM head may be spread over the ranks; {_INSTEAD}"
        )
    whose, known = {"assistant_model": _compat.vocabulary_size(assistant)}, _compat.vocabulary_size(assistant)
    if not translated:
        whose["the target"] = _compat.vocabulary_size(model)
        known = min(whose.values())
    if max(ids) >= known:
        sizes = " and ".join(f"{name} has {size}" for name, size in whose.items())
        raise UnsupportedCallError(
            f"{where}: it names the id {max(ids)}, and {sizes}: expected ids below {known}. Pass ids that were "
            "counted with this tokenizer"
        )
    fault = _compat.lm_head_fault(assistant)
    if fault is None:
        rows = reduced_rows(assistant, ids)
        tried = _TRIED.get(assistant)
        if tried is None or tried[0] is not rows:
            tried = _TRIED[assistant] = rows, _compared(assistant, ids)
        fault = tried[1]
    if fault is not None:
        raise UnsupportedModelError(
            f"assistant_model ({type(assistant).__name__}) cannot draft with a reduced vocabulary: {fault}; {_INSTEAD}"
        )


def _compared(model: PreTrainedModel, ids: tuple[int, ...]) -> str | None:
    """Why the forward with some rows of the head does not give what it gives with all, or None."""
    attention = attention_for_probes(model) if draft_support(model).route.masked else nullcontext()
    read = torch.tensor([[1, 2, 3]], device=model.device)
    try:
        with (
            torch.inference_mode(False), torch.no_grad(), evaluation(model), attention, without_shared_outliers(model)
        ):  # fmt: skip
            inputs = _compat.prepare_inputs(model, read, use_cache=False)
            whole = model(**inputs, return_dict=True).logits
            found = with_rows(model, ids)(**inputs, return_dict=True).logits
    except torch.OutOfMemoryError:
        raise  # says nothing about the model
    except FAILURES as error:
        return f"a forward with {len(ids)} rows of its LM head raised {type(error).__name__}: {error}"
    expected = whole[..., torch.tensor(ids, device=whole.device)]
    if found.shape != expected.shape:
        return f"with {len(ids)} rows of its LM head it gives {found.shape[-1]} logits a token"
    allowed = 16 * torch.finfo(expected.dtype).eps * float(whole.abs().max())
    if not bool(((found - expected).abs() <= allowed).all()):
        return f"with {len(ids)} rows of its LM head it gives other logits for their ids than with all"
    return None
