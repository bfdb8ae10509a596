"""Positions of tree nodes: from the row's own position ids and depth, never from the cache length."""

from __future__ import annotations

import re

from torch import Tensor, nn

from hf_treespec import _compat

__all__ = ["learned_position_limit", "node_positions"]

_POSITION_TABLE = re.compile(r"(^|\.)(wpe|[a-z_]*position[a-z_]*)$")


def node_positions(last_B1: Tensor, ahead_B1: Tensor, depths_BN: Tensor) -> Tensor:
    """Position ids of the nodes.

    Args:
        last_B1: `[..., B, 1]`, position of the last prompt token; leading axes (M-RoPE planes) are kept.
        ahead_B1: `[B, 1]`, how far the root lies behind it.
        depths_BN: `[B, N]`.

    Returns:
        `[..., B, N]`.
    """
    return last_B1 + (ahead_B1 + depths_BN).to(last_B1.dtype)


def learned_position_limit(model: nn.Module, max_positions: int | None) -> int | None:
    """First position that the model's learned position table cannot hold; None for a model without such a table.

    Args:
        model: the model, whose text part is searched for the table by name; rotary models have none.
        max_positions: `max_position_embeddings` of its config, if it has one.
    """
    rows = [
        module.num_embeddings
        for name, module in _compat.text_part(model).named_modules()
        if isinstance(module, nn.Embedding) and _POSITION_TABLE.search(name)
    ]
    if not rows:
        return None
    # Some tables (OPT) hold a few rows more than there are positions.
    return min(rows + ([max_positions] if max_positions else []))
