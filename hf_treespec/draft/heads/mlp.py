"""The recurrent MLP head of IBM's speculators (Wertheimer et al. 2024), `mlp_speculator` in vLLM and SGLang.

Its state goes through one small layer a token, together with the embedding of that token. So each guess knows the
guesses before it, for hardly more than Medusa's price.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hf_treespec.draft.base import Features
from hf_treespec.draft.heads.base import DraftHead

__all__ = ["MLPHead"]


class _ScaledNorm(nn.Module):
    """By the root of the mean square, with a weight and a shift."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, state: Tensor) -> Tensor:
        return self.weight * _normed(state) + self.bias


def _normed(state: Tensor) -> Tensor:
    return state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + 1e-6)


class MLPHead(DraftHead):
    """A stage for each token ahead.

    Args:
        hidden_size: of the target.
        vocab_size: ids of the target.
        inner_size: width of the head's own state; the target's by default.
        stages: tokens that it can look ahead.
        tied: whether all stages have the same weights; only the first projection is always its own.
        scale_input: whether the target's hidden state is normalised first.
        ids_V: see `DraftHead`. The embeddings then have a row for each of these ids, and one for all others.
    """

    kind = "mlp"

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        inner_size: int | None = None,
        stages: int = 3,
        tied: bool = False,
        scale_input: bool = False,
        ids_V: Tensor | None = None,
    ) -> None:
        super().__init__(hidden_size, vocab_size, ids_V)
        inner = inner_size or hidden_size
        self.inner_size = inner
        self.max_depth: int = stages
        self.tied = tied
        self.scale_input = scale_input
        own = 1 if tied else stages
        rest = stages // own
        rows = vocab_size if ids_V is None else self.draft_vocab + 1
        self.emb = nn.ModuleList([nn.Embedding(rows, inner) for _ in range(own)] * rest)
        # Row of the embeddings of each id of the target.
        row_of = None if ids_V is None else torch.full((vocab_size,), self.draft_vocab)
        if row_of is not None and ids_V is not None:
            row_of[ids_V.to(row_of.device)] = torch.arange(self.draft_vocab)
        self.register_buffer("row_of", row_of, persistent=False)
        first = nn.Linear(hidden_size, inner, bias=False)
        others = [nn.Linear(inner, inner, bias=False) for _ in range(min(1, stages - 1) if tied else stages - 1)]
        self.proj = nn.ModuleList([first, *(others * (stages - 1) if tied else others)])
        self.head = nn.ModuleList([nn.Linear(inner, self.draft_vocab, bias=False) for _ in range(own)] * rest)
        self.ln = nn.ModuleList([_ScaledNorm(inner) for _ in range(own)] * rest)
        # By the last stage half of the state is the target's still.
        self.state_weight = 0.5 ** (0.5 / stages)
        self.token_weight = math.sqrt((1 - self.state_weight**2) * inner / 2)

    def features(self, target_layers: int) -> Features:
        """The last hidden state."""
        return Features(last=True)

    def start(self, states: Tensor) -> Tensor:
        """What the first stage takes as its state.

        Args:
            states: `[..., H]`, last hidden states of the target.
        """
        return _normed(states) / math.sqrt(2) if self.scale_input else states

    def step(self, stage: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """One token.

        Args:
            stage: from 0.
            state: `[..., H]` of the stage before, or of `start`.
            tokens: int64 `[...]`, behind it.

        Returns:
            The new state `[..., I]`, and logits `[..., V]` of the token behind those.
        """
        new = self.mix(stage, state, tokens)
        return new, self.law(stage, new)

    def mix(self, stage: int, state: Tensor, tokens: Tensor) -> Tensor:
        """The new state `[..., I]`, see `step`."""
        rows = tokens if self.row_of is None else self.row_of[tokens]  # type: ignore[index]
        mixed = self.proj[stage](state) * self.state_weight + self.emb[stage](rows) * self.token_weight
        return nn.functional.gelu(self.ln[stage](mixed))

    def law(self, stage: int, state: Tensor) -> Tensor:
        """Logits `[..., V]` of the token behind a state that `mix` gave."""
        out: Tensor = self.head[stage](state)
        return out

    def forward(self, states_BTH: Tensor, tokens_BS: Tensor) -> Tensor:
        """Logits of all stages behind true tokens.

        Args:
            states_BTH: last hidden states of the target at tokens i.
            tokens_BS: int64, S = T + stages - 1: the tokens i + 1 and on.

        Returns:
            `[B, T, stages, V]`: at k the logits of token i + 2 + k.
        """
        length = states_BTH.shape[1]
        state, logits = self.start(states_BTH), []
        for stage in range(self.max_depth):
            state, out = self.step(stage, state, tokens_BS[:, stage : stage + length])
            logits.append(out)
        return torch.stack(logits, dim=2)
