"""A draft model whose LM head is evaluated for some ids only, after Zhao et al. 2025 (FR-Spec).

Most of what a language writes is made of few of its tokens, and of a small draft the LM head is a large part: 28 of
134 million weights in SmolLM2-135M. What such a draft cannot say costs acceptance where it comes; its law is zero
there.

Shapes: V ids kept, H hidden size.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_treespec import _compat
from hf_treespec.config import TreeConfig
from hf_treespec.errors import TreeConfigError
from hf_treespec.options import frequent_first

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Rows", "asked_vocabulary", "reduced_rows", "with_rows"]


def asked_vocabulary(config: TreeConfig) -> tuple[int, ...] | None:
    """The ids that a config has a draft model reduced to, the most frequent first; None for all.

    Raises:
        TreeConfigError: if its file cannot be read, or holds no ids.
    """
    options = config.options_of("model")
    ids = options["vocabulary"]
    if isinstance(ids, str):
        file = Path(ids).expanduser()
        try:
            about = file.stat()
            ids = _read(file.resolve(), about.st_mtime_ns, about.st_size)
        except OSError as error:
            raise TreeConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
    return None if ids is None else tuple(ids[: options["vocabulary_size"]])


@lru_cache(maxsize=8)
def _read(file: Path, modified: int, size: int) -> tuple[int, ...]:
    try:
        ids = frequent_first(json.loads(file.read_text()))
    except ValueError as error:
        raise TreeConfigError(f"{file}: cannot be parsed: {error}") from error
    if ids is None:
        raise TreeConfigError(
            f"{file}: expected a JSON list of different token ids, the most frequent first, or an object of ids with "
            "their counts"
        )
    return tuple(ids)


class Rows(nn.Linear):
    """Some rows of an LM head.

    Args:
        weight_VH: the rows.
        bias_V: of them, or None.
    """

    def __init__(self, weight_VH: Tensor, bias_V: Tensor | None) -> None:
        super().__init__(weight_VH.shape[1], weight_VH.shape[0], bias=bias_V is not None, device="meta")
        self.weight = nn.Parameter(weight_VH, requires_grad=False)
        if bias_V is not None:
            self.bias = nn.Parameter(bias_V, requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        """Logits `[..., V]`; the model may be spread over devices."""
        return super().forward(input.to(self.weight.device))


# Per model the last rows that were gathered, and what they were gathered from.
_GATHERED: weakref.WeakKeyDictionary[PreTrainedModel, tuple[tuple[Any, ...], Rows]] = weakref.WeakKeyDictionary()


def reduced_rows(model: PreTrainedModel, ids: Sequence[int]) -> Rows:
    """The rows of a model's LM head for these ids, gathered once for a model as long as its head stays the same.

    Args:
        model: has an LM head, see `_compat.lm_head_fault`; kept weakly.
        ids: V ids of the model.
    """
    weight, bias = _compat.lm_head_tensors(model)
    # Weights that were changed in place are others; a tensor of inference mode does not tell.
    version = None if weight.is_inference() else weight._version
    key = tuple(ids), id(weight), weight.data_ptr(), version, weight.dtype, weight.device, bias is None
    known = _GATHERED.get(model)
    if known is not None and known[0] == key:
        return known[1]
    # In inference mode a parameter would be one that no other call can use.
    with torch.inference_mode(False), torch.no_grad():
        index = torch.tensor(ids, device=weight.device)
        rows = Rows(weight.detach()[index], None if bias is None else bias.detach()[index.to(bias.device)])
    _GATHERED[model] = key, rows
    return rows


def with_rows(model: PreTrainedModel, ids: Sequence[int]) -> PreTrainedModel:
    """A view of the model that gives logits for these ids only, in their order."""
    return _compat.with_lm_head(model, reduced_rows(model, ids))
