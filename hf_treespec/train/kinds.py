"""The kinds of drafts: how one is begun, taught and saved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hf_treespec import _compat
from hf_treespec.draft import Borrowed, DraftHead
from hf_treespec.draft.heads import load_draft, save_draft
from hf_treespec.errors import TrainError
from hf_treespec.train.cut import cut_model, spaced_layers
from hf_treespec.train.fresh import fresh_eagle, fresh_medusa, fresh_mlp
from hf_treespec.train.lessons import Lesson, ModelLesson, head_lesson
from hf_treespec.train.settings import TrainSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["VOCABULARY_FILE", "check_layers", "lesson_of", "new_draft", "save"]

VOCABULARY_FILE = "vocabulary.json"
# EAGLE-3 reads so many hidden states.
_STATES = 3
# A model keeps one layer of so many.
_SHARE = 6


def check_layers(target: PreTrainedModel, settings: TrainSettings) -> None:
    """Refuse layers that the target does not have.

    Raises:
        TrainError: naming those that it has.
    """
    count = len(_compat.decoder_layers(target))
    # The layout of EAGLE-3 has no name for state 0, the embeddings; the last state is read behind the final norm.
    first, what = (1, "hidden states") if settings.kind == "eagle3" else (0, "layers")
    if settings.kind == "eagle3" and count < 2:
        raise TrainError(
            f"kind='eagle3': it reads hidden states between layers, and {type(target).__name__} has {count}; train "
            "kind='medusa' or 'mlp'"
        )
    kept = settings.layers
    if kept is not None and not first <= min(kept) <= max(kept) < count:
        raise TrainError(
            f"layers={kept} with kind={settings.kind!r}: expected numbers of {what} from {first} to {count - 1}, as "
            f"{type(target).__name__} has {count} layers"
        )


def new_draft(target: PreTrainedModel, ids: Sequence[int], settings: TrainSettings) -> nn.Module:
    """An untrained draft, the same one for the same seed.

    Args:
        target: the model.
        ids: that it is to know, the most frequent first; those of a model are all.
        settings: of the run.

    Raises:
        TrainError: if no draft of the kind can be made for the target, or the one to begin from cannot be read or is
            none of this kind and target.
    """
    check_layers(target, settings)
    if settings.init is not None:
        return _begun(target, settings.init, settings)
    layers = len(_compat.decoder_layers(target))
    if settings.kind == "model":
        return cut_model(target, settings.layers or spaced_layers(max(1, round(layers / _SHARE)), layers))
    known = None if len(ids) >= _compat.vocabulary_size(target) else torch.tensor(sorted(ids))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.loop_settings().seed)
        return _new_head(target, known, settings, layers)


def _begun(target: PreTrainedModel, folder: str, settings: TrainSettings) -> nn.Module:
    """The draft of a folder, if the run can go on with it."""
    about = f"init={folder!r}"
    draft: Any
    try:
        if settings.kind == "model":
            draft = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype)
        else:
            draft = load_draft(folder)
            draft.check(target)
    except (OSError, ValueError) as error:
        raise TrainError(f"{about}: {error}") from error
    if isinstance(draft, DraftHead):
        if draft.kind != settings.kind:
            raise TrainError(f"{about}: it is of kind {draft.kind!r}, and kind={settings.kind!r} is to be trained")
        if draft.max_depth not in (None, settings.depths):
            raise TrainError(f"{about}: it drafts {draft.max_depth} tokens ahead, and depths={settings.depths}")
    elif (known := _compat.vocabulary_size(draft)) != (wanted := _compat.vocabulary_size(target)):
        raise TrainError(f"{about}: it knows {known} ids, and the target {wanted}; pass a draft of this target")
    found: nn.Module = draft.eval()
    return found


def _new_head(target: PreTrainedModel, ids_V: Tensor | None, settings: TrainSettings, layers: int) -> DraftHead:
    if settings.kind == "medusa":
        return fresh_medusa(target, ids_V, heads=settings.depths)
    if settings.kind == "mlp":
        return fresh_mlp(target, ids_V, stages=settings.depths, inner_size=settings.inner_size)
    return fresh_eagle(
        target, ids_V, layers=settings.layers or _read_layers(layers), intermediate_size=settings.inner_size
    )


def _read_layers(layers: int) -> tuple[int, ...]:
    """The usual hidden states; of a target with few layers the last ones. The layout has no name for state 0."""
    usual = (2, layers // 2, layers - 3)
    few = len(set(usual)) < _STATES or not all(0 < layer < layers for layer in usual)
    return tuple(range(max(1, layers - _STATES), layers)) if few else usual


def lesson_of(draft: nn.Module, target: PreTrainedModel, settings: TrainSettings) -> Lesson:
    """How the draft is taught."""
    if isinstance(draft, DraftHead):
        layers = len(_compat.decoder_layers(target))
        return head_lesson(draft, Borrowed.of(target), layers, depths=settings.depths, decay=settings.decay)
    return ModelLesson(draft, depths=settings.depths, vocab_size=_compat.vocabulary_size(target))


def save(draft: Any, folder: Path, *, target: str, ids: Sequence[int], tokenizer: Any) -> None:
    """Write the draft so that calls can load it.

    Args:
        draft: the draft.
        folder: made if needed.
        target: its name.
        ids: that the target writes most often; a model has them beside it in `VOCABULARY_FILE`.
        tokenizer: of the target, saved with a model; None for none.
    """
    if isinstance(draft, DraftHead):
        save_draft(draft, folder, target=target)
        return
    draft.save_pretrained(folder)
    (folder / VOCABULARY_FILE).write_text(json.dumps(list(ids)) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
