"""Hidden states that come round by round and are read together, maybe much later."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Pieces"]


class Pieces:
    """States of one row that were not read yet, joined only when somebody looks.

    Args:
        whole: `[tokens, F]`, the first of them.
    """

    def __init__(self, whole: Tensor) -> None:
        self._whole = whole
        self._new: list[Tensor] = []
        self._count = len(whole)

    def __len__(self) -> int:
        return self._count

    def add(self, states: Tensor) -> None:
        """Put states `[tokens, F]` behind the others."""
        if len(states):
            self._new.append(states)
            self._count += len(states)

    def drop(self, count: int) -> None:
        """Forget the first `count` states."""
        if count:
            self._whole = self.whole[count:]
            self._count = len(self._whole)

    @property
    def whole(self) -> Tensor:
        """All of them, `[tokens, F]`."""
        if self._new:
            self._whole = torch.cat([self._whole, *self._new])
            self._new = []
        return self._whole
