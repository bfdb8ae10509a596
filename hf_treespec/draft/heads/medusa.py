"""Medusa: heads that each guess one more token ahead, from the last hidden state alone (Cai et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_treespec.draft.base import Features
from hf_treespec.draft.heads.base import DraftHead

__all__ = ["MedusaHead"]


class _Residual(nn.Module):
    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=bias)

    def forward(self, state: Tensor) -> Tensor:
        return state + nn.functional.silu(self.linear(state))


class MedusaHead(DraftHead):
    """K stacks of residual layers, each with a linear map to the vocabulary.

    Args:
        hidden_size: of the target.
        vocab_size: ids of the target.
        heads: K. Head k guesses the token k + 2 places behind the one whose hidden state it reads.
        layers: residual layers of each stack.
        bias: of those.
        shared: whether one linear map serves all stacks.
        ids_V: see `DraftHead`.
        scale: of the logits.
    """

    kind = "medusa"

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        heads: int = 4,
        layers: int = 1,
        bias: bool = True,
        shared: bool = False,
        ids_V: Tensor | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__(hidden_size, vocab_size, ids_V)
        self.max_depth: int = heads
        self.layers = layers
        self.scale = scale
        self.shared = shared
        self.blocks = nn.ModuleList(
            nn.ModuleList(_Residual(hidden_size, bias) for _ in range(layers)) for _ in range(heads)
        )
        maps = [nn.Linear(hidden_size, self.draft_vocab, bias=False) for _ in range(1 if shared else heads)]
        self.heads = nn.ModuleList(maps * heads if shared else maps)

    def features(self, target_layers: int) -> Features:
        """The last hidden state."""
        return Features(last=True)

    def forward(self, states: Tensor, *, depths: int | None = None) -> Tensor:
        """Logits of the tokens ahead.

        Args:
            states: `[..., H]`, last hidden states of the target at tokens i.
            depths: only the first so many heads.

        Returns:
            `[..., depths, V]`: at k those of token i + 2 + k.
        """
        count = self.max_depth if depths is None else depths
        return torch.stack([self.law(states, depth) for depth in range(count)], dim=-2)

    def law(self, states: Tensor, depth: int) -> Tensor:
        """Logits `[..., V]` of one head."""
        for layer in self.blocks[depth]:  # type: ignore[attr-defined]
            states = layer(states)
        out: Tensor = self.heads[depth](states) * self.scale
        return out
