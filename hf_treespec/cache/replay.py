"""The universal commit: undo the tree, then update the layer again with the accepted rows only.

It asks nothing of a layer but `update`, so it is right for any class whose state lives in its `__dict__` and is not
written in place. It is the reference that every fast path must equal bit for bit, and what sliding layers use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Recorder", "replay_commit"]


class Recorder:
    """Stands in for a layer's `update` between a snapshot and its commit, and keeps what the layer was given.

    Several updates may follow one another (a draft model reads its tree level by level). A sliding layer would trim
    after each and lose committed slots that later levels still need, so the recorder answers for it: each update
    returns the states before the tree and all of the tree so far, and `get_mask_sizes` speaks of just those.

    Args:
        layer: a cache layer; its `update` and `get_mask_sizes` are shadowed on the instance until `remove`.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.snapshot: dict[str, Any] = dict(layer.__dict__)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._before = int(layer.get_seq_length())
        self._rows: Tensor | None = None
        layer.update = self._update
        layer.get_mask_sizes = self._get_mask_sizes

    @property
    def stored(self) -> int:
        """Slots that the layer held before the tree."""
        keys = self.snapshot.get("keys")
        return 0 if keys is None or keys.numel() == 0 else int(keys.shape[-2])

    @property
    def seen(self) -> int:
        """Tree slots recorded so far."""
        return sum(int(keys.shape[-2]) for keys in self.keys)

    def _update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys.append(key_states)
        self.values.append(value_states)
        # The layer's own length is what positions and mask offsets are read from.
        self.layer.cumulative_length = self._before + self.seen
        return self.joined()

    def _get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.stored + self.seen + query_length, self._before - self.stored

    def joined(self) -> tuple[Tensor, Tensor]:
        """Keys and values: stored slots, then all tree slots, `[B, H, stored + seen, D]`."""
        parts = []
        for name, new in (("keys", self.keys), ("values", self.values)):
            old = []
            if self.stored:
                stored = self.snapshot[name]
                old = [stored if self._rows is None else stored.index_select(0, self._rows.to(stored.device))]
            parts.append(torch.cat([*old, *new], dim=-2))
        return parts[0], parts[1]

    def spread(self, rows_P: Tensor) -> None:
        """Show row `rows_P[p]` of the stored states as row p to the updates that follow.

        Args:
            rows_P: int64 `[P]`.
        """
        self._rows = rows_P

    def gather(self, chosen_B: Tensor) -> None:
        """End `spread`: of the tree slots keep, as row b, those of row `chosen_B[b]`.

        Args:
            chosen_B: int64 `[B]`.
        """
        self._rows = None
        self.keys = [keys.index_select(0, chosen_B.to(keys.device)) for keys in self.keys]
        self.values = [values.index_select(0, chosen_B.to(values.device)) for values in self.values]

    def remove(self) -> None:
        """Give the layer back as it was at the snapshot."""
        self.layer.__dict__.clear()
        self.layer.__dict__.update(self.snapshot)


def replay_commit(layer: Any, keys: Tensor, values: Tensor, slots: Sequence[int]) -> None:
    """Update a layer, which is back at its snapshot, with the accepted rows of a tree.

    Args:
        layer: the cache layer.
        keys: `[B, H, M, D]`, keys of all tree slots.
        values: `[B, H, M, D]`.
        slots: accepted tree slots in path order, the same for all rows.
    """
    if slots:
        index = torch.tensor(list(slots), device=keys.device)
        layer.update(keys.index_select(-2, index), values.index_select(-2, index.to(values.device)))
