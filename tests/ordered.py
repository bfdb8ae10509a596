"""Tiny random models whose state depends on the order of the tokens, and what the tests of them share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import tiny
from conformance import zoo
from hf_treespec import _compat
from tiny import shared

# Several tokens at once are right; for RWKV where a row is alone.
PATHS = ("lfm2_moe", "bamba", "qwen3_next", "minimax", "xlstm")
ALONE = ("rwkv",)
STEPS = ("mamba", "recurrent_gemma", "reformer")
VOCAB = 96


stock, treed = shared(zoo.build)


def prompt(batch: int) -> tuple[Tensor, Tensor]:
    """Random ids and their mask; a batch of three is left-padded by 4, 0 and 1."""
    ids, mask = tiny.prompt("llama", batch)
    return ids.clamp(max=VOCAB - 1), mask


def returned(output: Any) -> Any:
    """The cache that a call returned."""
    return _compat.returned_cache(dict(output))


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor of a cache of whatever kind, always in the same order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for key in value:
            yield from tensors(value[key])
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)
    elif hasattr(value, "__dict__") and not callable(value) and not isinstance(value, _compat.PreTrainedConfig):
        yield from tensors(vars(value))


def assert_same_state(expected: Any, actual: Any, mask: Tensor) -> None:
    """Equal tensors; of keys and values only the slots that are real in all rows."""
    assert type(actual) is type(expected)
    ours, theirs = list(tensors(actual)), list(tensors(expected))
    assert len(ours) == len(theirs) > 0
    padded = int((mask == 0).sum(-1).max())
    for one, two in zip(theirs, ours, strict=True):
        assert two.shape == one.shape
        if not one.is_floating_point() or not one.numel():
            assert torch.equal(one, two)
            continue
        if one.dim() == 4 and one.shape[-2] >= mask.shape[1]:
            one, two = one[..., padded:, :], two[..., padded:, :]
        torch.testing.assert_close(two, one, atol=1e-4, rtol=1e-4)
