"""Random weights that make lively text: logits that hang on the whole context, not on the last token alone."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

__all__ = ["SCALES", "enliven"]

# Sharper attention: which token is seen must matter.
_SHARP = 2.5
_LOOKS = ("q_proj", "k_proj", "query", "key", "c_attn", "qkv", "query_key_value", "q_b_proj", "kv_b_proj")
# Standard deviations of an embedding table and of one that is the head too, which would make tokens repeat themselves;
# and how much each map makes of its input.
SCALES = ((1.0, 0.3, 1.6), (0.2, 0.03, 1.6), (0.2, 0.01, 4.0), (1.0, 0.3, 4.0))


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

    untyped: Any = model
    ends = untyped.get_output_embeddings(), untyped.get_input_embeddings()
    head, table = (getattr(end, "weight", None) for end in ends)
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
