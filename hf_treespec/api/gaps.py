"""Whether a model heeds the padding of a 2D mask behind its cache, tried on the user's own model.

Rows that accept less than others are kept right-aligned in the cache, with a gap at their left that the mask covers.
Most models look past it. Git does not without a picture: it widens the mask by the picture's tokens, so that all flags
slip to the right and plain decoding sees its padding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_treespec import _compat
from hf_treespec.api.outliers import without_shared_outliers
from hf_treespec.api.probe import FAILURES, evaluation
from hf_treespec.attention import attention_for_probes

__all__ = ["heeds_gaps"]

# What lies in the gap differs, what follows does not.
_GAPS = ((4, 3, 1), (2, 4, 3))
_SEEN, _NEXT = (1, 2, 3), 2
# Share of the largest logit; a token that is seen changes far more, one that is not seen nothing.
_TOLERANCE = 1e-3


@torch.no_grad()
def heeds_gaps(model: PreTrainedModel) -> bool:
    """Whether tokens that a mask hides, once they lie in the cache, leave the next token's logits alone.

    Where that cannot be told, it is no.
    """
    try:
        # As calls with trees run it: under another attention a first forward may cost a compilation.
        with evaluation(model), without_shared_outliers(model), attention_for_probes(model):
            one, two = (_logits(model, gap) for gap in _GAPS)
    except torch.OutOfMemoryError:
        raise
    except FAILURES:
        return False
    return float((one - two).abs().max()) <= _TOLERANCE * float(one.abs().max())


def _logits(model: PreTrainedModel, gap: tuple[int, ...]) -> Tensor:
    """Logits `[V]` behind a prompt whose first tokens are hidden."""
    cache, hidden = _compat.make_cache(model.config), len(gap)
    text = torch.tensor([(*gap, *_SEEN, _NEXT)], device=model.device)
    mask = (torch.arange(text.shape[1], device=model.device) >= hidden).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for first, last in ((0, text.shape[1] - 1), (text.shape[1] - 1, text.shape[1])):
        given = {_compat.cache_kwarg(model): cache, "use_cache": True, "position_ids": positions[:, first:last]}
        inputs = _compat.prepare_inputs(model, text[:, first:last], attention_mask=mask[:, :last], **given)
        logits = model(**inputs, return_dict=True).logits
    return logits[0, -1].double()  # type: ignore[no-any-return]
