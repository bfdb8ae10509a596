"""Quantized layers: a tree lies beside the store, and only accepted tokens enter it, in plain decoding's own order.

Attention sees every state of an FP8 layer rounded, the newest ones too; the tree's states are rounded in the same way
with the scale that the layer fixed at its first update. A layer that quantizes in groups holds new states exactly,
until there are so many that it quantizes all it has: a node behind such a place would see the states of its path
otherwise than in plain decoding, so no path may go beyond one (`path_limit`).

Shapes: B rows, H heads, M tree slots, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.cache.snapshot import LayerState

__all__ = ["QuantizedRecorder", "path_limit"]


def path_limit(layers: Iterable[Any]) -> int | None:
    """Depth of the deepest node that no layer would quantize anew before; None if no layer does."""
    left = [
        int(layer.residual_length) - 1 - _compat.exact_tokens(layer)
        for layer in layers
        if _compat.quantizes_in_groups(layer)
    ]
    return max(0, min(left)) if left else None


class QuantizedRecorder:
    """Stands in for the `update` of one quantized layer between a snapshot and its commit.

    Args:
        layer: the layer; it is shadowed on the instance until `remove`.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._state = LayerState(layer)
        self._before = int(layer.get_seq_length())
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._seen: list[tuple[Tensor, Tensor]] = [_compat.dequantized(layer)] if layer.is_initialized else []
        layer.update = self._update

    def _update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._parts.append((key_states, value_states))
        if self.layer.is_initialized:
            key_states, value_states = _compat.through_quantization(self.layer, key_states, value_states)
        self._seen.append((key_states, value_states))
        self.layer.cumulative_length = self._before + sum(int(keys.shape[-2]) for keys, _ in self._parts)
        keys, values = zip(*self._seen, strict=True)
        return torch.cat(keys, dim=-2), torch.cat(values, dim=-2)

    def remove(self) -> None:
        """Give the layer back as it was at the snapshot."""
        self._state.restore()

    def commit(self, slots: Sequence[Sequence[int]]) -> None:
        """Update the layer with the accepted rows only.

        Args:
            slots: per row equally many tree slots in path order.
        """
        self.remove()
        if not self._parts:
            return
        keys, values = (torch.cat(states, dim=-2) for states in zip(*self._parts, strict=True))
        index = torch.tensor([list(row) for row in slots], device=keys.device)[:, None, :, None]
        accepted = [
            states.gather(2, index.to(states.device).expand(-1, states.shape[1], -1, states.shape[3]))
            for states in (keys, values)
        ]
        if not _compat.quantizes_in_groups(self.layer):
            self.layer.update(accepted[0], accepted[1])
            return
        # What is quantized together depends on the number of updates.
        for step in range(index.shape[2]):
            self.layer.update(accepted[0][:, :, step : step + 1], accepted[1][:, :, step : step + 1])
