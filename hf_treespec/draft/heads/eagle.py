"""EAGLE heads: a small decoder that reads each token beside what the target made of the token before it.

EAGLE-1 and -2 (Li et al. 2024; they differ in how trees grow only) fuse the last hidden state with the embedding in
front of the decoder and use the target's LM head. EAGLE-3 (Li et al. 2025) fuses hidden states of several layers, lets
its first layer attend over embedding and state side by side, and has an LM head of its own, often of fewer ids.

A pair is a token and the hidden state of the token before it; pair i stands at position i. Where the target has not
read yet, the decoder's own output takes the state's place.

Shapes: B rows, T pairs, F features side by side, E width of the decoder, V ids of the head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_treespec import _compat
from hf_treespec.draft.base import Features
from hf_treespec.draft.heads.base import Borrowed, DraftHead
from hf_treespec.draft.heads.decoder import make_decoder
from hf_treespec.errors import TreeConfigError, UnsupportedCallError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["EagleHead"]


class EagleHead(DraftHead):
    """EAGLE-1, -2 or -3.

    Args:
        config: of the decoder, of transformers' own kind; `hidden_size` is E.
        hidden_size: of the target.
        vocab_size: ids of the target.
        version: 3, or 1 for EAGLE-1 and -2.
        layers: hidden states of the target that EAGLE-3 reads, see `Features`; None for the usual three of the
            target: 2, the middle, and the third from the end.
        feature_count: how many they are.
        embeddings: whether it has its own; else it uses the target's.
        lm_head: whether it has its own.
        ids_V: see `DraftHead`; only with an own LM head.
        fusion_bias: of the linear map over the features.
        norm_before_fusion: whether the features are normalised first.
        norm_before_residual: whether the first layer adds its attention to the normalised state.
        norm_output: whether what it made is read again behind its final norm (EAGLE-3).

    Raises:
        TreeConfigError: for a decoder of a kind that no head is known to have.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        hidden_size: int,
        vocab_size: int,
        version: int = 3,
        layers: tuple[int, ...] | None = None,
        feature_count: int = 3,
        embeddings: bool = False,
        lm_head: bool = True,
        ids_V: Tensor | None = None,
        fusion_bias: bool = False,
        norm_before_fusion: bool = False,
        norm_before_residual: bool = False,
        norm_output: bool = False,
    ) -> None:
        super().__init__(hidden_size, vocab_size, ids_V)
        width = int(config.hidden_size)
        if version == 1 and width != hidden_size:
            raise TreeConfigError(
                f"an EAGLE-1 head of width {width} for a target of {hidden_size}: expected the same width"
            )
        self.version = version
        self.kind = "eagle3" if version == 3 else "eagle"
        self.config = config
        self.layers = layers
        self.decoder = make_decoder(config, side_by_side=version == 3, norm_before_residual=norm_before_residual)
        count = feature_count if version == 3 else 1
        inputs = count * hidden_size if version == 3 else 2 * width
        self.fc = nn.Linear(inputs, width, bias=fusion_bias)
        eps = float(config.rms_norm_eps)
        self.input_norm = nn.RMSNorm(inputs, eps=eps) if norm_before_fusion else None
        self.norm = nn.RMSNorm(width, eps=eps) if version == 3 else None
        self.norm_output = norm_output and version == 3
        self.embed_tokens = nn.Embedding(vocab_size, width) if embeddings else None
        self.lm_head = nn.Linear(width, self.draft_vocab, bias=False) if lm_head else None

    @property
    def width(self) -> int:
        """E."""
        return int(self.config.hidden_size)

    def features(self, target_layers: int) -> Features:
        """The last hidden state for EAGLE-1; layers for EAGLE-3."""
        if self.version == 1:
            return Features(last=True)
        usual = (2, target_layers // 2, target_layers - 3)
        return Features(layers=usual if self.layers is None else tuple(self.layers))

    def check(self, target: PreTrainedModel) -> None:
        """See `DraftHead.check`; a head without embeddings or LM head needs a target that can lend its own."""
        super().check(target)
        if self.version == 3 and self.features(len(_compat.decoder_layers(target))).count * self.hidden_size != (
            self.fc.in_features
        ):
            raise UnsupportedCallError(
                f"assistant_model is an eagle3 head that reads {self.fc.in_features} values a token, and its config "
                f"names the hidden states {self.layers} of {self.hidden_size} values"
            )
        lent = Borrowed.of(target)
        if self.embed_tokens is None and self.width != (size := _compat.embedding_size(target)):
            raise UnsupportedCallError(
                f"assistant_model is an {self.kind} head of width {self.width} without embeddings, and the target's "
                f"have {size} values: its checkpoint needs embed_tokens.weight"
            )
        if self.lm_head is None and lent.lm_head is None:
            raise UnsupportedCallError(
                f"assistant_model is an {self.kind} head without an LM head, and {type(target).__name__} names none "
                "by get_output_embeddings()"
            )
        if self.lm_head is None and self.width != (size := _compat.lm_head_size(target)):
            raise UnsupportedCallError(
                f"assistant_model is an {self.kind} head of width {self.width} without an LM head, and the target's "
                f"reads {size} values: its checkpoint needs lm_head.weight"
            )

    def embed(self, tokens: Tensor, lent: Borrowed) -> Tensor:
        """Embeddings `[..., E]` of ids of the target."""
        table = lent.embeddings if self.embed_tokens is None else self.embed_tokens
        return self.placed(table(tokens.to(next(table.parameters()).device)))

    def fuse(self, features: Tensor) -> Tensor:
        """States `[..., E]` of features `[..., F]` of the target."""
        if self.version == 1:
            return features
        out: Tensor = self.fc(features if self.input_norm is None else self.input_norm(features))
        return out

    def read(
        self,
        embeddings: Tensor,
        states: Tensor,
        *,
        positions: Tensor,
        mask: Tensor | None,
        cache: _compat.Cache | None,
    ) -> Tensor:
        """One forward of the decoder over pairs; returns the states `[B, T, E]` that come out.

        Args:
            embeddings: `[B, T, E]` of the tokens.
            states: `[B, T, E]` of the tokens before them: from `fuse`, or what this gave.
            positions: int64 `[B, T]`.
            mask: as transformers takes them: int64 `[B, L + T]`, or bool `[B, 1, T, L + T]`; None for none.
            cache: extended in place.
        """
        inputs = torch.cat([embeddings, states], dim=-1)
        extra: dict[str, Any] = {} if cache is None else {_compat.cache_kwarg(self.decoder): cache}
        outputs = self.decoder(
            inputs_embeds=self.fc(inputs) if self.version == 1 else inputs,
            position_ids=positions,
            attention_mask=mask,
            use_cache=cache is not None,
            **extra,
        )
        out: Tensor = outputs.last_hidden_state
        return self.norm(out) if self.norm is not None and self.norm_output else out

    def logits(self, states: Tensor, lent: Borrowed) -> Tensor:
        """Logits `[..., V]` of the tokens behind the pairs with these outputs."""
        if self.norm is not None and not self.norm_output:
            states = self.norm(states)
        if self.lm_head is not None:
            out: Tensor = self.lm_head(states)
            return out
        return self.placed(lent.logits(states))

    def forward(self, features_BTF: Tensor, tokens_BT: Tensor, lent: Borrowed, *, steps: int = 1) -> list[Tensor]:
        """Logits of several steps ahead at every pair, see `unroll`.

        Returns:
            Per step j logits `[B, T, V]`; at pair i those of token i + j + 1. The last j pairs of step j have no
            token to read and mean nothing.
        """
        return [self.logits(states, lent) for states in self.unroll(features_BTF, tokens_BT, lent, steps=steps)]

    def unroll(
        self,
        features_BTF: Tensor,
        tokens_BT: Tensor,
        lent: Borrowed,
        *,
        steps: int,
        pairs_BM: Tensor | None = None,
    ) -> list[Tensor]:
        """States of several steps ahead at every pair, for training.

        Step 0 reads the target's features. Step j is what drafting does j tokens later: at pair i it reads token i + j
        with what step j - 1 gave at pair i, and sees the true pairs up to i and the drafted ones behind them. Tokens
        are the true ones in all steps.

        Args:
            features_BTF: of the target, of the token before each.
            tokens_BT: int64, ids of the target.
            lent: parts of the target.
            steps: how many.
            pairs_BM: int64, the pairs at which steps after the first are wanted; ones past the end mean nothing. None
                for all.

        Returns:
            Per step states, which `logits` takes: `[B, T, E]` of step 0, `[B, M, E]` of each other.
        """
        length = tokens_BT.shape[1]
        states = self.fuse(self.placed(features_BTF))
        device = states.device
        every = torch.arange(length, device=device).expand(len(tokens_BT), -1)
        pairs = every if pairs_BM is None else pairs_BM.to(device)
        own = torch.eye(pairs.shape[1], dtype=torch.bool, device=device).expand(len(pairs), -1, -1)
        cache = _compat.make_cache(self.config)
        made: list[Tensor] = []
        for step in range(steps):
            if step == 1 and pairs_BM is not None:
                at = pairs.clamp(max=length - 1)[..., None].expand(-1, -1, states.shape[2])
                states = states.gather(1, at)
            asked = pairs if step else every
            # Behind the end the last token is read again: such pairs mean nothing.
            tokens = tokens_BT.gather(1, (asked + step).clamp(max=length - 1).to(tokens_BT.device))
            mask = torch.cat([asked[..., None] >= every[:, None], *[own] * step], dim=2)[:, None]
            states = self.read(self.embed(tokens, lent), states, positions=asked + step, mask=mask, cache=cache)
            made.append(states)
        return made
