"""Whether a tiny model makes lively text: logits that hang on the whole context, not on the last token alone."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

_PROMPT = (5, 17, 33, 8, 61, 25, 9, 44, 70, 12, 31)
_NEW = 24
_DISTINCT = 7
# Share of the largest logit by which another token a little further back must move some logit.
_TELLING = 0.02


def streams(model: PreTrainedModel) -> int:
    """Rows of ids that make up one text: a model of music reads several codebooks at once."""
    return int(model.config.num_codebooks) if hasattr(model, "build_delay_pattern_mask") else 1


def extra_arguments(model: PreTrainedModel) -> dict[str, Any]:
    """Arguments without which the model's own `generate` fails."""
    return {"num_return_sequences": 1} if streams(model) > 1 else {}


@torch.no_grad()
def is_lively(model: PreTrainedModel) -> bool:
    """Whether greedy text has many different tokens, and a token a little further back moves the logits."""
    ids = torch.tensor([_PROMPT] * streams(model))
    call = {"do_sample": False, "return_dict_in_generate": True, **extra_arguments(model)}
    text = model.generate(ids, max_new_tokens=_NEW, output_logits=True, **call)
    other = ids.clone()
    other[:, -4] = 55
    moved = model.generate(other, max_new_tokens=1, output_logits=True, **call)
    before, after = text.logits[0], moved.logits[0]
    # Some heads never say some tokens.
    finite = before.isfinite() & after.isfinite()
    change = (before - after)[finite].abs().max() / before[finite].abs().max()
    return len(set(text.sequences[0, len(_PROMPT) :].tolist())) >= _DISTINCT and float(change) > _TELLING
