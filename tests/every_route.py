"""A tiny model and a prompt for every route by which a tree enters a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import ordered
import seq2seq
import slot_models
import tiny
from tiny import prompt


def mask_inputs(batch: int, family: str = "llama") -> dict[str, Tensor]:
    ids, mask = prompt(family, batch)
    return {"input_ids": ids, "attention_mask": mask}


def slot_inputs(batch: int) -> dict[str, Tensor]:
    ids, mask = slot_models.prompt(batch)
    return {"input_ids": ids, "attention_mask": mask}


def ordered_inputs(batch: int) -> dict[str, Tensor]:
    ids, mask = ordered.prompt(batch)
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0}


# Per route a model that was never enabled, one that is, and a prompt.
ROUTES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[int], dict[str, Any]], str]] = {
    "mask": (tiny.stock, tiny.treed, mask_inputs, "llama"),
    "positions": (slot_models.stock, slot_models.treed, slot_inputs, "bart"),
    "alibi": (slot_models.stock, slot_models.treed, slot_inputs, "bloom"),
    "paths": (seq2seq.stock, seq2seq.treed, seq2seq.source_text, "bart"),
    "ordered": (ordered.stock, ordered.treed, ordered_inputs, ordered.PATHS[0]),
}
