"""Sliding layers: a tree lies beside the window until it is known what of it stays.

Shapes: B rows, H heads, M tree slots, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_treespec.cache.accepted import Accepted
from hf_treespec.cache.snapshot import LayerState
from hf_treespec.cache.states import Axes

__all__ = ["SlidingRecorder"]

_AXES = Axes(0, -2)


class SlidingRecorder:
    """Stands in for a layer's `update` between a snapshot and its commit, and keeps what the layer was given.

    Several updates may follow one another (a draft model reads its tree level by level). A sliding layer would trim
    after each and lose committed slots that later levels still need, so the recorder answers for it: each update
    returns the states before the tree and all of the tree so far, and `get_mask_sizes` speaks of just those.

    Args:
        layer: a cache layer; its `update` and `get_mask_sizes` are shadowed on the instance until `remove`.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._state = LayerState(layer)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._before = int(layer.get_seq_length())
        self._rows: Tensor | None = None
        layer.update = self._update
        layer.get_mask_sizes = self._get_mask_sizes

    @property
    def _stored(self) -> int:
        """Slots that the layer held before the tree."""
        keys = self._state.attributes.get("keys")
        return 0 if keys is None or keys.numel() == 0 else int(keys.shape[-2])

    @property
    def _seen(self) -> int:
        """Tree slots recorded so far."""
        return sum(int(keys.shape[-2]) for keys in self._keys)

    def _update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._keys.append(key_states)
        self._values.append(value_states)
        # The layer's own length is what positions and mask offsets are read from.
        self.layer.cumulative_length = self._before + self._seen
        return self._joined()

    def _get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._stored + self._seen + query_length, self._before - self._stored

    def _joined(self) -> tuple[Tensor, Tensor]:
        """Keys and values: stored slots, then all tree slots, `[B, H, stored + seen, D]`."""
        parts = []
        for name, new in (("keys", self._keys), ("values", self._values)):
            old = []
            if self._stored:
                stored = self._state.attributes[name]
                old = [stored if self._rows is None else stored.index_select(0, self._rows.to(stored.device))]
            parts.append(torch.cat([*old, *new], dim=-2))
        return parts[0], parts[1]

    def spread(self, rows_P: Tensor) -> None:
        """Show row `rows_P[p]` of the states so far as row p to the updates that follow.

        Args:
            rows_P: int64 `[P]`.
        """
        self._rows = rows_P
        self._take(rows_P)

    def gather(self, chosen_B: Tensor) -> None:
        """End `spread`: of the tree slots keep, as row b, those of row `chosen_B[b]`.

        Args:
            chosen_B: int64 `[B]`.
        """
        self._rows = None
        self._take(chosen_B)

    def _take(self, rows: Tensor) -> None:
        self._keys = [keys.index_select(0, rows.to(keys.device)) for keys in self._keys]
        self._values = [values.index_select(0, rows.to(values.device)) for values in self._values]

    def remove(self) -> None:
        """Give the layer back as it was at the snapshot."""
        self._state.restore()

    def commit(self, accepted: Accepted) -> None:
        """Leave in the layer the window that ends with the accepted slots."""
        layer = self.layer
        if not self._keys:
            self.remove()
        elif accepted.same:
            self.remove()
            new = (torch.cat(parts, dim=-2) for parts in (self._keys, self._values))
            kept = [states.index_select(-2, accepted.picks(states.device)) for states in new]
            if accepted.slots[0]:
                layer.update(*kept)
        else:
            first, joined = self._before - self._stored, self._joined()
            self.remove()
            if not layer.is_initialized:
                layer.lazy_initialization(*joined)
            window = int(layer.sliding_window) - 1
            layer.keys, layer.values = (
                accepted.gathered(states, _AXES, first=first, keep=window) for states in joined
            )
            layer.cumulative_length = accepted.after
