"""A small tree on the user's own model, compared with its paths: the proof that the mask route holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_treespec import _compat
from hf_treespec.api.outliers import without_shared_outliers
from hf_treespec.attention import attention_for_trees, tree_masks
from hf_treespec.cache import RowCache
from hf_treespec.engine import TargetForward
from hf_treespec.tree import TokenTree

__all__ = ["probe"]

_PROMPT = (4, 3, 1, 2, 3, 1)
# Root 2 with children 3 and 1; 1 has children 4 and 3. The path of the last node skips its neighbours in the cache.
_TREE = TokenTree((2, 3, 1, 4, 3), (-1, 0, 0, 2, 2))
_RIGHT_PATH = (2, 1, 3)
_WRONG_PATH = (2, 3, 3)
# Error allowed, as a share of what one wrong ancestor changes.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-2}
_LOW_PRECISION_TOLERANCE = 0.2
# Rounding errors of the largest logit that are no error of the mask, and the share at which nothing would be proven.
_ROUNDINGS = 8
_MOST_ROUNDING = 0.25


@contextmanager
def _evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Dropout off for the probe, module by module as it was afterwards."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def probe(model: PreTrainedModel) -> tuple[str | None, bool]:
    """Compare a tree forward with plain decoding along one of its paths.

    Returns:
        None if they agree, else the reason why the model cannot take a tree; and whether that is final: an exception
        may have come from the state of the machine.
    """
    if _compat.embedding_rows(model) <= max(_PROMPT + _TREE.tokens):
        return f"its vocabulary of {_compat.embedding_rows(model)} ids is too small for the probe", True
    attention = _compat.attention_implementation(model)
    wanted = "auto" if attention in _compat.MASK_IMPLEMENTATIONS else "sdpa"
    try:
        with _evaluation(model), without_shared_outliers(model), attention_for_trees(model, wanted), tree_masks():
            tree = _tree_logits(model)
            right, wrong = (_path_logits(model, path) for path in (_RIGHT_PATH, _WRONG_PATH))
    except torch.OutOfMemoryError:
        raise  # says nothing about the model
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, KeyError, IndexError) as error:
        return f"the probe forward raised {type(error).__name__}: {error}", False
    scale = float((right - wrong).abs().max())
    off = float((tree - right).abs().max())
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    # Sharp attention may leave a wrong ancestor so little to change that rounding is no small share of it.
    rounding = _ROUNDINGS * torch.finfo(dtype).eps * float(right.abs().max())
    allowed = max(_TOLERANCE.get(dtype, _LOW_PRECISION_TOLERANCE) * scale, min(rounding, _MOST_ROUNDING * scale))
    if not off <= allowed:
        return (
            f"in a probe its logits at a tree node are off by {off:.3g} from the node's own path, where {allowed:.3g} "
            f"is allowed ({scale:.3g} is what a wrong ancestor changes): it does not build its masks or positions "
            "from the mask registry and position_ids"
        ), True
    return None, True


def _tree_logits(model: PreTrainedModel) -> Tensor:
    cache = _compat.make_cache(model.config)
    _read(model, _PROMPT, cache, first=0)
    rows = RowCache(cache, [len(_PROMPT)])
    last = torch.tensor([[len(_PROMPT) - 1]], device=model.device)
    forward = TargetForward(model, rows, last, None, {"use_cache": True})
    with rows.transaction():
        logits = forward([_TREE], [1])
    return logits[0, -1].double()


def _path_logits(model: PreTrainedModel, path: tuple[int, ...]) -> Tensor:
    """Token by token, as plain decoding reads it: some models look ahead in what they are given at once."""
    cache = _compat.make_cache(model.config)
    _read(model, _PROMPT, cache, first=0)
    for place, token in enumerate(path, len(_PROMPT)):
        logits = _read(model, (token,), cache, first=place)
    return logits[0, -1].double()


def _read(model: PreTrainedModel, tokens: tuple[int, ...], cache: _compat.Cache, *, first: int) -> Tensor:
    """Logits `[1, Q, V]` of a plain forward, by the model's own rules for inputs: some shift their positions."""
    ids = torch.tensor([tokens], device=model.device)
    positions = torch.arange(first, first + len(tokens), device=model.device)[None]
    given = {_compat.cache_kwarg(model): cache, "use_cache": True}
    inputs = _compat.prepare_inputs(model, ids, attention_mask=None, position_ids=positions, **given)
    logits: Tensor = model(**inputs, return_dict=True).logits
    return logits
