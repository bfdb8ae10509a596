"""What a call says about a draft head: whether it was made for this target, and whether it can be served."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.api.assistants import check_sources, differing_tokenizers
from hf_treespec.api.mtp import mtp_modules
from hf_treespec.api.probe import FAILURES, evaluation
from hf_treespec.api.shared_states import lent_layers
from hf_treespec.api.support import is_supported
from hf_treespec.attention import attention_for_probes, check_attention
from hf_treespec.config import TreeConfig
from hf_treespec.draft import AssistantHead, DFlashHead, DraftHead, Features, MtpHead
from hf_treespec.engine import Places, tapped
from hf_treespec.errors import TreeSpecError, UnsupportedCallError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["check_head", "drafts_blocks", "find_head", "is_head"]

# Per model the features whose hooks were compared with `output_hidden_states`: their width, or why they are not shown.
_TRIED: WeakKeyDictionary[PreTrainedModel, dict[Features, int | str]] = WeakKeyDictionary()


def is_head(assistant: Any) -> bool:
    """Whether the assistant of a call reads hidden states of the target: it is a draft head, or serves as one."""
    inner = getattr(assistant, "_orig_mod", assistant)
    serves = _compat.is_mtp(inner) or _compat.reads_shared_states(inner) or _compat.is_block_draft(inner)
    return isinstance(inner, DraftHead) or serves


def drafts_blocks(assistant: Any) -> bool:
    """Whether the assistant of a call is what `speculation_type="dflash"` says of it."""
    inner = getattr(assistant, "_orig_mod", assistant)
    return isinstance(inner, DFlashHead) or _compat.is_block_draft(inner)


def find_head(model: PreTrainedModel, config: TreeConfig, assistant: Any) -> DraftHead | None:
    """The draft head of a call, or None if it has none.

    Raises:
        UnsupportedCallError: if the config contradicts the assistant, or asks for modules that cannot be had.
        UnsupportedModelError: if the target does not show what the assistant reads.
    """
    inner = getattr(assistant, "_orig_mod", assistant)
    depth = config.options_of("mtp")["depth"]
    if _compat.is_mtp(inner):
        return MtpHead(inner, depth)
    if config.with_mtp:
        if inner is not None:
            raise UnsupportedCallError(
                f"TreeConfig(draft={config.draft!r}), or use_mtp=True, with a {type(inner).__name__} as "
                "assistant_model: both say what drafts; leave one of the two out"
            )
        return MtpHead(mtp_modules(model), depth)
    if isinstance(inner, DraftHead):
        return inner
    if _compat.is_block_draft(inner):
        return DFlashHead.around(inner)
    if not _compat.reads_shared_states(inner):
        return None
    route = is_supported(model).route
    if not route.masked:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot take a {type(inner).__name__} as assistant_model: trees enter it by the "
            f"route {route.value!r}, the assistant reads its keys and values between forwards of one row under a tree "
            "mask. Leave assistant_model out to draft by n-grams"
        )
    check_attention(inner, config.attention)
    return AssistantHead(inner, lent_layers(model, inner))


def check_head(model: PreTrainedModel, config: TreeConfig, head: DraftHead, mode_kwargs: Mapping[str, Any]) -> None:
    """Refuse a head that was not made for the target, or a call that it cannot serve.

    Raises:
        UnsupportedCallError: naming the sizes, or the argument.
        UnsupportedModelError: if the hidden states of the target cannot be found.
    """
    check_sources(model, config, mode_kwargs, assistant=True)
    if head.drafter is not None:
        check_attention(head.drafter, config.attention)
    if mode_kwargs.get("synced_gpus"):
        raise UnsupportedCallError(
            f"synced_gpus=True with a {head.kind} head as assistant_model: ranks that wait for others run forwards of "
            "the target that the head must not see; leave the head out to draft by n-grams"
        )
    if differing_tokenizers(mode_kwargs.get("tokenizer"), mode_kwargs.get("assistant_tokenizer")) is not None:
        raise UnsupportedCallError(
            f"assistant_tokenizer with a {head.kind} head as assistant_model: a head reads and writes the target's "
            "own tokens; leave assistant_tokenizer out"
        )
    head.check(model)
    fault = features_fault(model, head.features(len(_compat.decoder_layers(model))), head.hidden_size)
    if fault is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot take a {head.kind} head: {fault}. Leave assistant_model out to draft by "
            "n-grams"
        )


def features_fault(model: PreTrainedModel, features: Features, size: int | None = None) -> str | None:
    """Why hooks do not show the hidden states of a model, or None; found by one small forward, once for a model.

    Weights that accelerate offloads would take too long to bring in: such a model is taken as it looks.

    Args:
        model: the target.
        features: the hidden states.
        size: values that each must have; None for any number.
    """
    if _compat.weights_place(model) != "here":
        return None
    answers = _TRIED.setdefault(model, {})
    if features not in answers:
        # As calls with trees run it: under another attention a first forward may cost a compilation.
        attention = attention_for_probes(model) if is_supported(model).route.masked else nullcontext()
        with torch.inference_mode(False), torch.no_grad(), evaluation(model), attention:
            answers[features] = _compared(model, features)
    found = answers[features]
    if isinstance(found, str):
        return found
    if size is not None and found != size * features.count:
        # Some models project what their layers give (word_embed_proj_dim of OPT).
        where = "behind its last layer" if features.last else f"{features.layers}"
        return f"its hidden states {where} have {found // features.count} values, the head reads {size}"
    return None


def _compared(model: PreTrainedModel, features: Features) -> int | str:
    """Width of the features side by side, or why hooks do not show them."""
    ids = torch.tensor([[1, 2, 3]], device=model.device)
    name = "decoder_input_ids" if _compat.is_encoder_decoder(model) else "input_ids"
    inputs = {name: ids, "use_cache": False, "return_dict": True, **_compat.encoder_states(model)}
    try:
        with tapped(model, features) as taps:
            assert taps is not None
            with taps.watched():
                outputs = model(**inputs, output_hidden_states=True)
            (seen,) = taps.of_paths(Places([([0] * 3, [0, 1, 2])]))
    except torch.OutOfMemoryError:
        raise  # says nothing about the model
    except (*FAILURES, TreeSpecError) as error:
        return f"its hidden states could not be read: {type(error).__name__}: {error}"
    states = getattr(outputs, "decoder_hidden_states", None) or outputs.hidden_states
    wanted = [states[layer][0] for layer in features.layers] + [states[-1][0]] * features.last
    expected = torch.cat([state.to(wanted[-1].device, wanted[-1].dtype) for state in wanted], dim=-1)
    if seen is None or seen.shape != expected.shape or not _close(seen, expected):
        return f"hooks on its layers do not show the hidden states {features.layers} that it names itself"
    return int(seen.shape[-1])


def _close(one: Tensor, other: Tensor) -> bool:
    scale = float(other.abs().max()) * torch.finfo(other.dtype).eps
    return bool(((one - other).abs() <= 16 * scale).all())
