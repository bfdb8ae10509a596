"""Keys and values that a block draft has made of the target's hidden states.

They never change and nothing that was guessed is among them: what a token gives depends on that token alone. The block
of a round is written behind them and overwritten in the next.

Shapes: B rows, C new tokens at most, S tokens of a block, G key heads, D their width, P slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["BlockContext"]


class BlockContext:
    """Per layer and row the context from slot 0 on, in place of a cache of transformers.

    Args:
        batch: B.
    """

    def __init__(self, batch: int) -> None:
        self.lengths = [0] * batch
        self._counts = [0] * batch
        self._block = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @property
    def ends(self) -> list[int]:
        """Per row the slot of the first token of its block, in the round that was begun."""
        return [length + count for length, count in zip(self.lengths, self._counts, strict=True)]

    @property
    def width(self) -> int:
        """Slots that the round reaches over."""
        return max(self.ends) + self._block

    def begin(self, counts: Sequence[int], block: int) -> None:
        """Announce a forward: of each row the last so many of its C new tokens are real, and S follow."""
        self._counts, self._block = list(counts), block

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What a layer calls with `[B, G, C + S, D]` each; returns `[B, G, width, D]` each."""
        return self._put(self._keys, layer, keys), self._put(self._values, layer, values)

    def end(self) -> None:
        """Keep the new context: the forward is done."""
        self.lengths = self.ends

    def _put(self, store: dict[int, Tensor], layer: int, new: Tensor) -> Tensor:
        kept = store.get(layer)
        if kept is None or kept.shape[2] < self.width:
            # Zeros: a masked slot is multiplied all the same.
            grown = new.new_zeros((*new.shape[:2], self.width + max(64, self.width // 2), new.shape[3]))
            if kept is not None:
                grown[:, :, : kept.shape[2]] = kept
            store[layer] = kept = grown
        for row, (length, count) in enumerate(zip(self.lengths, self._counts, strict=True)):
            fresh = count + self._block
            kept[row, :, length : length + fresh] = new[row, :, new.shape[2] - fresh :]
        return kept[:, :, : self.width]
