"""What moves the weights of a draft: AdamW, or Muon for its matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_treespec.train.lessons import Lesson

__all__ = ["OPTIMIZERS", "make_optimizers", "set_rate"]

OPTIMIZERS = ("muon", "adamw")
# Muon takes longer steps than AdamW before it is unsteady.
_MATRIX_RATE = 3.0
_BETAS = (0.9, 0.95)


def make_optimizers(
    lesson: Lesson, name: str, *, learning_rate: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """The optimizers of a lesson's weights; each weight has one.

    Muon (Jordan et al. 2024) makes the step of a matrix orthogonal, three times as large as one of AdamW (Liu et al.
    2025, 2.2). It is for matrices between hidden states: embeddings, LM heads, norms and biases stay with AdamW.

    Args:
        lesson: with the draft.
        name: one of `OPTIMIZERS`.
        learning_rate: highest, of AdamW.
        weight_decay: of both.
    """
    weights = [weight for weight in lesson.parameters() if weight.requires_grad]
    inner = _inner_matrices(lesson) if name == "muon" else set()
    matrices = [weight for weight in weights if id(weight) in inner]
    rest = [weight for weight in weights if id(weight) not in inner]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        rate = _MATRIX_RATE * learning_rate
        group = {"params": matrices, "initial_lr": rate}
        found.append(torch.optim.Muon([group], rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
    if rest:
        group = {"params": rest, "initial_lr": learning_rate}
        found.append(torch.optim.AdamW([group], learning_rate, betas=_BETAS, weight_decay=weight_decay, fused=True))
    return found


def set_rate(optimizer: Any, share: float) -> None:
    """Let each group of weights have a share of its highest learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = share * group["initial_lr"]


def _inner_matrices(lesson: Lesson) -> set[int]:
    """`id` of the weights of linear layers whose output is not a law over ids."""
    known = int((lesson.get_buffer("place_of") >= 0).sum())
    laws = getattr(lesson.draft, "get_output_embeddings", lambda: None)()
    linear = [module for module in lesson.modules() if isinstance(module, nn.Linear)]
    return {id(one.weight) for one in linear if one is not laws and one.out_features != known}
