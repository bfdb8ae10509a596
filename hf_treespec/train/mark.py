"""Which model is it? A short mark of its class and weights, to tell runs of one from runs of another."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

__all__ = ["weights_mark"]

# How many weights of a tensor say which model it is.
_MARKED = 64


def weights_mark(model: nn.Module) -> str:
    """A short name for the class of a model and its weights: of these their types, and a few numbers of each.

    Args:
        model: any module; weights on the meta device count by their types alone.

    Returns:
        12 hexadecimal digits. The same weights give the same mark on any device.
    """
    told = hashlib.sha256(type(model).__name__.encode())
    for name, tensor in model.state_dict().items():
        told.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.device.type != "meta":
            flat = tensor.detach().flatten()
            some = flat[:: max(1, len(flat) // _MARKED)][:_MARKED]
            told.update(repr(some.to("cpu", torch.float64).tolist()).encode())
    return told.hexdigest()[:12]
