"""Whether a model runs an attention function that is put in place of its own: what a kernel needs.

Many models do not dispatch their attention by name, or keep a part of it for the names that they know: an index that
chooses keys is left out under any other name, without a word. So the answer is found by trying a function that
computes what a kernel would, and comparing the logits.

Shapes: B rows, H heads, G key heads, Q queries, K keys, D head dim.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_treespec import _compat
from hf_treespec.api.probe import FAILURES, evaluation
from hf_treespec.attention import KERNEL, chooses_keys
from hf_treespec.errors import UnsupportedModelError
from hf_treespec.routes import Route
from hf_treespec.twin import is_twin

__all__ = ["check_kernel", "takes_custom_attention"]

_NAME = "hf_treespec_probe"
_PROMPT = (4, 3, 1, 2, 3, 1, 0, 2, 4, 1)
# What a kernel can be told beside the mask; any other tensor would be a part of the attention that it does not know.
_UNDERSTOOD = frozenset(("s_aux", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k"))
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 0.05
_REMEMBERED = 64
_LOCK = threading.Lock()
_ANSWERS: OrderedDict[tuple[Any, ...], str | None] = OrderedDict()


def check_kernel(model: PreTrainedModel, route: Route) -> None:
    """Refuse a target whose trees the kernel cannot read.

    Raises:
        UnsupportedModelError: naming the reason and what to do.
    """
    reason: str | None
    if not route.masked:
        reason = f"trees enter it by the route {route.value!r}, and the kernel takes all nodes in one row"
    elif route is Route.ALIBI:
        reason = "its attention has a bias by distance"
    elif len(set(_compat.attention_implementations(model).values())) > 1:
        reason = "its parts run different attentions"
    else:
        reason = takes_custom_attention(model)
    if reason is not None:
        raise UnsupportedModelError(
            f"TreeConfig(attention={KERNEL!r}) with {type(model).__name__}: {reason}. Leave attention at 'auto'"
        )


def takes_custom_attention(model: PreTrainedModel) -> str | None:
    """Why an attention function of one's own may not stand in for the model's; None if it may.

    The answer is kept per class, config and dtype. Nothing of the model is changed.

    Args:
        model: with weights; no other thread may run it meanwhile.
    """
    base = getattr(type(model), "_treespec_base", type(model))
    config = model.config.to_json_string(use_diff=False)
    key = base, config, model.dtype, _compat.attention_implementation(model), is_twin(model)
    with _LOCK:
        if key not in _ANSWERS:
            _ANSWERS[key] = _tried(model)
            while len(_ANSWERS) > _REMEMBERED:
                _ANSWERS.popitem(last=False)
        return _ANSWERS[key]


@torch.no_grad()
def _tried(model: PreTrainedModel) -> str | None:
    if _compat.is_encoder_decoder(model):
        return "an encoder and cross-attention share the name of the attention"
    if chooses_keys(model.config):
        return "its attention chooses keys by itself, and only under the names that it knows"
    if _compat.embedding_rows(model) <= max(_PROMPT):
        return f"its vocabulary of {_compat.embedding_rows(model)} ids is too small for the probe"
    own_name = _compat.attention_implementation(model)
    ids = torch.tensor([_PROMPT], device=model.device)
    attend = _Attention(own_name)
    try:
        with evaluation(model):
            own = _logits(model, ids)
            with _compat.custom_attention(model, _NAME, attend, "sdpa"):
                if _compat.attention_implementation(model) != _NAME:
                    return "its attention cannot be chosen by name"
                other = _logits(model, ids)
    except torch.OutOfMemoryError:
        raise  # says nothing about the model, and the answer is kept
    except FAILURES as error:
        return f"the probe forward raised {type(error).__name__}: {error}"
    if not attend.calls:
        return "its attention is not dispatched by name"
    if attend.uneven:
        return "its keys and values differ in size"
    if attend.lost:
        return "its eager attention is no function beside its class"
    if attend.strange:
        return f"its attention is also told {', '.join(sorted(attend.strange))}"
    off, size = float((other - own).abs().max()), float(own.abs().max())
    allowed = _TOLERANCE.get(model.dtype, _LOW_PRECISION_TOLERANCE) * size
    return None if off <= allowed else f"its logits are off by {off:.3g} then, where {allowed:.3g} is allowed"


def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    inputs = _compat.prepare_inputs(model, ids, attention_mask=None, position_ids=positions, use_cache=False)
    return model(**inputs, return_dict=True).logits.double()  # type: ignore[no-any-return]


class _Attention:
    """Attention as a kernel would compute it: grouped heads, a mask, scaling, a soft cap, sinks."""

    def __init__(self, own: str) -> None:
        self._own = own
        self.calls = 0
        self.strange: set[str] = set()
        self.uneven = False
        self.lost = False

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        self.calls += 1
        self.uneven |= key.shape[-1] != value.shape[-1]
        self.lost |= self._own == "eager" and _compat.attention_function_of(self._own, module) is None
        self.strange |= {
            name for name, given in kwargs.items() if isinstance(given, Tensor) and name not in _UNDERSTOOD
        }
        group = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = query @ keys.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        queries, slots = scores.shape[-2:]
        if attention_mask is None:
            # A model may leave out the mask of a plain causal forward.
            lower = torch.ones(queries, slots, dtype=torch.bool, device=scores.device).tril(slots - queries)
            scores = scores.masked_fill(~lower, float("-inf"))
        elif attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask[..., :slots], float("-inf"))
        else:
            scores = scores + attention_mask[..., :slots]
        if s_aux is not None:
            sink = s_aux.reshape(1, -1, 1, 1).to(scores).expand(scores.shape[0], -1, queries, 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return (weights.to(values.dtype) @ values).transpose(1, 2).contiguous(), None
