"""Random weights that make lively text: logits that hang on the whole context, not on the last token alone."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

# Sharper attention: which token is seen must matter.
_SHARP = 2.5
_LOOKS = ("q_proj", "k_proj", "query", "key", "c_attn", "qkv", "query_key_value", "q_b_proj", "kv_b_proj")
# Standard deviations of an embedding table and of one that is the head too, which would make tokens repeat themselves;
# and how much each map makes of its input.
SCALES = ((1.0, 0.3, 1.6), (0.2, 0.03, 1.6), (0.2, 0.01, 4.0), (1.0, 0.3, 4.0))

_PROMPT = (5, 17, 33, 8, 61, 25, 9, 44, 70, 12, 31)
_NEW = 24
_DISTINCT = 7
# Share of the largest logit by which another token a little further back must move some logit.
_TELLING = 0.02


@torch.no_grad()
def enliven(model: PreTrainedModel, seed: int, scale: int = 0) -> None:
    """Draw the weights of all maps and tables anew; norms, decays and other special parameters stay.

    Args:
        model: changed in place.
        seed: of the draw.
        scale: index into `SCALES`.
    """
    free, own_head, gain = SCALES[scale]
    generator = torch.Generator().manual_seed(seed)

    def draw(parameter: Tensor, std: float) -> None:
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_((noise * std).to(parameter.dtype))

    head, table = (getattr(m, "weight", None) for m in (model.get_output_embeddings(), model.get_input_embeddings()))
    done: set[int] = set()
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) in done or not parameter.is_floating_point():
                continue
            done.add(id(parameter))
            if isinstance(module, nn.Embedding):
                draw(parameter, own_head if parameter is table and head is table else free)
            elif own == "weight" and isinstance(module, nn.Linear | Conv1D | nn.Conv1d):
                fan_in = parameter.shape[0] if isinstance(module, Conv1D) else parameter[0].numel()
                sharp = _SHARP if name.rpartition(".")[2] in _LOOKS else 1.0
                draw(parameter, gain * sharp / math.sqrt(fan_in))
            elif parameter.dim() == 3 and "expert" in name:
                draw(parameter, gain / math.sqrt(min(parameter.shape[1:])))
            elif parameter.dim() == 2 and own == "weight":
                draw(parameter, gain / math.sqrt(parameter.shape[-1]))


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
