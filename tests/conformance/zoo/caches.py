"""Whether two calls return the same cache, whatever its layers hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# The axis along which the tokens of a text lie, for states that have one.
_TOKEN_AXIS = {"keys": -2, "values": -2, "idx_keys": -2, "indexer_keys": 1, "indexer_position_ids": -1}
# Share of the largest entry. Forwards of other widths round otherwise; a state of another token is off by the whole.
_TOLERANCE = 1e-3


def cache_difference(expected: Any, actual: Any, mask: Tensor) -> str:
    """Where the caches in two outputs of generate() differ; empty if nowhere.

    Args:
        expected: of plain decoding.
        actual: of the call with trees.
        mask: `[B, P]` of the prompt, whose padding is left out.
    """
    for name in ("cache", "past_key_values", "state", "cache_params", "past_buckets_states", "mems"):
        if (expected.get(name) is None) != (actual.get(name) is None):
            return f"only one output has {name!r}"
        if expected.get(name) is not None:
            padding = (mask == 0).sum(-1).tolist()
            return _difference(name, expected[name], actual[name], padding, set())
    return ""


def _difference(name: str, one: Any, two: Any, padding: list[int], seen: set[int]) -> str:
    if type(one) is not type(two):
        return f"{name}: {type(one).__name__} and {type(two).__name__}"
    if isinstance(one, Tensor):
        return _tensor_difference(name, one, two, padding)
    if isinstance(one, Mapping):
        if list(one) != list(two):
            return f"{name}: keys {list(one)} and {list(two)}"
        pairs = [(str(key), one[key], two[key]) for key in one]
    elif isinstance(one, list | tuple):
        if len(one) != len(two):
            return f"{name}: {len(one)} and {len(two)} entries"
        pairs = [(str(place), a, b) for place, (a, b) in enumerate(zip(one, two, strict=True))]
    elif hasattr(one, "__dict__") and type(one).__module__.startswith(("transformers.", "conformance.")):
        if id(one) in seen or "config" in type(one).__module__.rpartition(".")[2]:
            return ""
        seen.add(id(one))
        if set(vars(one)) != set(vars(two)):
            return f"{name}: attributes {sorted(set(vars(one)) ^ set(vars(two)))} appeared or are missing"
        pairs = [(key, value, vars(two)[key]) for key, value in vars(one).items()]
    else:
        return "" if callable(one) or one == two else f"{name}: {one!r} and {two!r}"
    return next((d for key, a, b in pairs if (d := _difference(f"{name}.{key}", a, b, padding, seen))), "")


def _tensor_difference(name: str, one: Tensor, two: Tensor, padding: list[int]) -> str:
    if one.shape != two.shape or one.dtype != two.dtype:
        return f"{name}: {one.dtype}{tuple(one.shape)} and {two.dtype}{tuple(two.shape)}"
    if not one.numel():
        return ""
    axis = _TOKEN_AXIS.get(name.rpartition(".")[2])
    scale = float(one[one.isfinite()].abs().double().max()) if bool(one.isfinite().any()) else 1.0
    apart = (one.double() - two.double()).abs().nan_to_num(0.0 if torch.equal(one.isnan(), two.isnan()) else 1e9)
    if axis is not None and len(one) == len(padding) and any(padding):
        # Windows drop from the left what is old, padding first.
        for row, pads in enumerate(padding):
            apart[row].narrow(axis if axis < 0 else axis - 1, 0, min(pads, apart.shape[axis])).zero_()
    worst = float(apart.max())
    if worst <= _TOLERANCE * max(scale, 1e-6):
        return ""
    return f"cache {name} differs by {worst:.3g} where its largest entry is {scale:.3g}"
