"""Whether a model runs on a `TreeCache`, tried on the user's own model in tiny forwards.

A `TreeCache` of 8-bit storage dequantises every layer into the same buffer. A model whose later layers read keys and
values of earlier ones (Gemma 3n and 4) would find others there; so would one that keeps what an update returned.
"""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_treespec import _compat
from hf_treespec.api.layer_trial import read_behind
from hf_treespec.api.outliers import without_shared_outliers
from hf_treespec.api.probe import FAILURES, evaluation
from hf_treespec.attention import attention_for_probes
from hf_treespec.cache import TreeCache

__all__ = ["kv_cache_fault"]

_PROMPT, _NEXT = (4, 3, 1, 2), (1, 3)
# Share of the largest logit: both sides make the same sums of the same numbers.
_TOLERANCE = 1e-3
_LOCK = threading.Lock()
_FAULTS: WeakKeyDictionary[PreTrainedModel, dict[str, str | None]] = WeakKeyDictionary()


def kv_cache_fault(model: PreTrainedModel, storage: str) -> str | None:
    """Why the model cannot run on a `TreeCache` of this storage, or None. The answer is kept as long as the model."""
    with _LOCK:
        known = _FAULTS.setdefault(model, {})
        # 8-bit storage is compared with itself, and what is wrong with slots in place is wrong on both sides.
        for each in dict.fromkeys(("dense", storage)):
            if each not in known:
                known[each] = _tried(model, each)
            if known[each] is not None:
                return known[each]
        return None


@torch.no_grad()
def _tried(model: PreTrainedModel, storage: str) -> str | None:
    config = model.config
    try:
        with evaluation(model), without_shared_outliers(model), attention_for_probes(model):
            if storage == "dense":
                one = _logits(model, _compat.make_cache(config))
                why = "logits differ from those over a dynamic cache"
            else:
                one = _logits(model, TreeCache(config, storage=storage, buffers="per_layer"))
                why = (
                    "it reads keys and values of a layer after those of another were made, which one buffer for all "
                    "layers cannot serve; use kv_cache='dense'"
                )
            two = _logits(model, TreeCache(config, storage=storage))
    except torch.OutOfMemoryError:
        raise  # says nothing about the model
    except FAILURES as error:
        return f"a forward over it raised {type(error).__name__}: {error}"
    off, size = float((one - two).abs().max()), float(one.abs().max())
    return None if off <= _TOLERANCE * size else why


def _logits(model: PreTrainedModel, cache: _compat.Cache) -> Tensor:
    """Logits `[Q, V]` of a few tokens behind a prompt."""
    read_behind(model, _PROMPT, cache, first=0)
    return read_behind(model, _NEXT, cache, first=len(_PROMPT))[0].double()
