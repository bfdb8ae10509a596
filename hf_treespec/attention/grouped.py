"""Trees under sdpa on a CPU, without a copy of the keys and values for each query head that shares them.

Where there is a mask and more than one query, transformers repeats shared keys and values before it calls sdpa: each
layer copies the whole cache in every round, several times over. Torch's kernel for CPUs reads them as they are, and
gives the same bits. Kernels for GPUs do so without a mask only, and are left alone.

Shapes: B rows, H query heads, G key heads, Q queries, K keys, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.attention.masks import active_tree
from hf_treespec.attention.shared import held, replaced

__all__ = ["shared_heads_as_they_are"]

# What sdpa's function in transformers treats in a way of its own.
_SPECIAL = ("position_bias", "softcap", "output_attentions")


@contextmanager
def shared_heads_as_they_are() -> Iterator[None]:
    """Have tree forwards of any model that runs sdpa read shared keys and values in place, if they lie on a CPU."""
    with held(("attention", "shared heads"), _wrap):
        yield


def _wrap() -> Callable[[], None]:
    own = _registered("sdpa")
    if getattr(own, "__module__", None) != "transformers.integrations.sdpa_attention":
        # Somebody's own function, which may do more than sdpa: it stays as it is.
        return lambda: None
    return replaced("sdpa", _registered, _compat.register_attention_function, partial(_attend, own))


def _registered(name: str) -> Any:
    return _compat.attention_function_of(name, None)


def _attend(
    own: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """An attention function of transformers: `[B, Q, H, D]`, and no weights."""
    if (
        torch.compiler.is_compiling()
        or args
        or active_tree() is None
        or attention_mask is None
        or query.device.type != "cpu"
        or query.shape[1] == key.shape[1]
        or query.shape[2] == 1
        or (key.stride(-1), value.stride(-1)) != (1, 1)
        or key.shape != value.shape
        or not all(kwargs.get(name) is None or kwargs[name] is False for name in _SPECIAL)
    ):
        return own(module, query, key, value, attention_mask, *args, **kwargs)
    dropout, scale = kwargs.get("dropout", 0.0), kwargs.get("scaling")
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None
