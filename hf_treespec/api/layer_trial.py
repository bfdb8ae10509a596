"""Cache layers of classes that nobody has named, tried on the user's own model.

How they are called is watched in a few tiny plain forwards; what a commit leaves in them is compared with what plain
decoding leaves there. So a class is proven or refused by what it does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_treespec import _compat
from hf_treespec.cache import CallTrial, forget, is_named, layer_kind
from hf_treespec.errors import TreeSpecError

__all__ = ["check_states", "forget_layers", "has_unnamed_layers", "read_behind", "try_layers", "unknown_classes"]

# Rows and tokens of the forwards: both must differ. The second sequence goes on, behind a cache.
_FORWARDS = ((3, (5,)), (1, (7, 4)))
_TOKENS = (4, 3, 1, 2, 3, 1, 0)
# Error allowed in a layer's state, as a share of its largest element; a wrong token is far beyond it.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 0.1


def unknown_layers(cache: Any) -> list[Any]:
    """Layers of a cache that neither a name nor a trial tells about, and that a trial could."""
    return [
        layer
        for layer in getattr(cache, "layers", ())
        if layer_kind(layer) is None and not is_named(type(layer)) and not _compat.is_linear_attention(layer)
    ]


def has_unnamed_layers(model: PreTrainedModel) -> bool:
    """Whether all that is known of some layers of its cache is what a trial has found, or will."""
    return not all(is_named(type(layer)) for layer in getattr(_compat.make_cache(model.config), "layers", ()))


def try_layers(model: PreTrainedModel) -> str | None:
    """Try the unknown layers of the cache that `generate` would make.

    Returns:
        The reason why they cannot take a tree, or None.
    """
    if not unknown_layers(_compat.make_cache(model.config)):
        return None
    trial = CallTrial()
    for batch, widths in _FORWARDS:
        cache, first = _compat.make_cache(model.config), 0
        for width in widths:
            with trial.watching(unknown_layers(cache), batch=batch, tokens=width):
                read_behind(model, _TOKENS[:width], cache, first=first, batch=batch)
            first += width
    return trial.conclude()


def forget_layers(classes: Collection[type]) -> None:
    """Unlearn what a trial has found about layers of a model that then did not pass the probe.

    Args:
        classes: those that were unknown before; others have been proven on another model.
    """
    for cls in classes:
        forget(cls)


def unknown_classes(model: PreTrainedModel) -> set[type]:
    """Classes of the model's layers that a trial would have to find out about."""
    return {type(layer) for layer in unknown_layers(_compat.make_cache(model.config))}


def check_states(cache: _compat.Cache, plain: Callable[[], _compat.Cache]) -> None:
    """Compare the layers that are known by trial alone with what plain decoding leaves in them.

    Args:
        cache: after a commit.
        plain: makes the cache after plain decoding of the same tokens.

    Raises:
        TreeSpecError: if they differ, naming the class and the attribute.
    """
    if all(is_named(type(layer)) for layer in cache.layers):
        return
    for layer, right in zip(cache.layers, plain().layers, strict=True):
        if not is_named(type(layer)) and (place := _difference(vars(layer), vars(right), "")):
            raise TreeSpecError(
                f"its cache layers of class {type(layer).__name__} hold something else in {place} after a commit than "
                "after plain decoding"
            )


def read_behind(
    model: PreTrainedModel, tokens: Sequence[int], cache: _compat.Cache, *, first: int, batch: int = 1
) -> Tensor:
    """Logits `[B, Q, V]` of a plain forward, by the model's own rules for inputs: some shift their positions.

    Args:
        model: the model.
        tokens: of every row.
        cache: holds the tokens before them; extended in place.
        first: position of the first token.
        batch: B.
    """
    given: dict[str, Any] = {_compat.cache_kwarg(model): cache, "use_cache": True}
    if _compat.accepts_position_ids(model):
        given["position_ids"] = torch.arange(first, first + len(tokens), device=model.device).expand(batch, -1)
    ids = torch.tensor([tuple(tokens)] * batch, device=model.device)
    inputs = _compat.prepare_inputs(model, ids, attention_mask=None, **given)
    logits: Tensor = model(**inputs, return_dict=True).logits
    return logits


def _difference(one: Any, two: Any, place: str) -> str | None:
    """Where two states of a layer differ, or None."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return None if _close(one, two) else place
    if isinstance(one, dict) and isinstance(two, dict):
        if one.keys() != two.keys():
            return place
        pairs = [(f"{place}.{key}".lstrip("."), one[key], two[key]) for key in one]
    elif isinstance(one, (list, tuple)) and type(one) is type(two):
        if len(one) != len(two):
            return place
        pairs = [(f"{place}[{at}]", *pair) for at, pair in enumerate(zip(one, two, strict=True))]
    else:
        return None if type(one) is type(two) and (one is two or one == two) else place
    return next((found for at, left, right in pairs if (found := _difference(left, right, at))), None)


def _close(one: Tensor, two: Tensor) -> bool:
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, two)
    allowed = _TOLERANCE.get(one.dtype, _LOW_PRECISION_TOLERANCE) * float(two.abs().max())
    return float((one - two).abs().max()) <= allowed
