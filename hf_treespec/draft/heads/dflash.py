"""DFlash (Chen et al. 2026): a small model that denoises a block of tokens beside the target's hidden states.

Its queries are a block: the last token of the text, the anchor, and mask tokens behind it. They attend to one another,
both ways, and to keys and values that each layer makes of hidden states of the target at the tokens before the anchor.
So one forward gives a law for each of the next tokens, none of which knows what the others became.

The layers are those of a model of transformers (`DFlashHead.around`), or of the same kind made for a published
checkpoint.

Shapes: B rows, C tokens of context, S tokens of a block, F features side by side, E width, V ids of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hf_treespec import _compat
from hf_treespec.draft.base import Features
from hf_treespec.draft.heads.base import Borrowed, DraftHead, scaled
from hf_treespec.draft.heads.block_context import BlockContext
from hf_treespec.errors import TreeConfigError, UnsupportedCallError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["DFlashHead"]

_SLIDING = "sliding_attention"


class DFlashHead(DraftHead):
    """A block draft.

    Args:
        decoder: its layers, see `hf_treespec._compat.is_block_draft`; its config says how long a block is, which id
            the mask tokens have, and (`target_layer_ids`, from 0) the outputs of which layers of the target it reads.
        vocab_size: ids of the target; 0 for those of any target that it drafts for.
        hidden_size: of the target; default is E.
        embeddings: whether it has its own table of them; else it uses the target's.
        lm_head: whether it has its own LM head; else it uses the target's.
        ids_V: see `DraftHead`; only with an own LM head.
        from_anchor: whether the anchor's place already guesses the token behind it; else that of the first mask does.
        normed_last: whether the last layer of the target counts as what comes out of the final norm, as in the hidden
            states of transformers; else it cannot be read.
        causal_windows: whether layers with a sliding window attend to the left only.
        window_edge: tokens less than the window that such a layer sees back: 0 as transformers counts it, 1 else.
        embedding_scale: of the rows of the target's table; None for what the target makes of them.
        logit_scale: of the logits; None for what the target does to those of its LM head.
        softcap: bound of a tanh behind it, or None; only with a `logit_scale`.

    Raises:
        TreeConfigError: for sizes that do not go together.
    """

    kind = "dflash"
    decoder: PreTrainedModel

    def __init__(
        self,
        decoder: PreTrainedModel,
        *,
        vocab_size: int = 0,
        hidden_size: int | None = None,
        embeddings: bool = False,
        lm_head: bool = False,
        ids_V: Tensor | None = None,
        from_anchor: bool = False,
        normed_last: bool = True,
        causal_windows: bool = False,
        window_edge: int = 0,
        embedding_scale: float | None = None,
        logit_scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        config = decoder.config
        super().__init__(hidden_size or int(config.hidden_size), vocab_size, ids_V)
        settings = _compat.block_settings(config)
        self.block_size = int(settings["block_size"])
        self.mask_token_id = int(settings["mask_token_id"])
        self.layers = tuple(int(layer) + 1 for layer in settings["target_layer_ids"])
        self.from_anchor = from_anchor
        self.max_depth: int = self.block_size - (not from_anchor)
        if self.max_depth < 1 or not self.layers:
            raise TreeConfigError(
                f"a DFlash head with block_size={self.block_size} and layers {settings['target_layer_ids']}: expected "
                "blocks of at least 2 tokens, and a layer"
            )
        if ids_V is not None and not lm_head:
            raise TreeConfigError("a DFlash head of fewer ids than its target needs an LM head of its own")
        self.normed_last = normed_last
        self.causal_windows = causal_windows
        self.window_edge = window_edge
        self.embedding_scale = embedding_scale
        self.logit_scale = logit_scale
        self.softcap = softcap
        self.decoder = decoder
        self.embed_tokens = nn.Embedding(vocab_size, self.width) if embeddings else None
        self.lm_head = nn.Linear(self.width, self.draft_vocab, bias=False) if lm_head else None

    @classmethod
    def around(cls, model: PreTrainedModel) -> DFlashHead:
        """A head that runs a model of transformers as it is."""
        return cls(model)

    @property
    def width(self) -> int:
        """E."""
        return int(self.decoder.config.hidden_size)

    @property
    def drafter(self) -> PreTrainedModel:
        """Its layers."""
        return self.decoder

    @property
    def feature_size(self) -> int:
        """F."""
        return self.hidden_size * len(self.layers)

    def features(self, target_layers: int) -> Features:
        """The layers that it names."""
        last = self.normed_last and self.layers[-1] == target_layers
        return Features(layers=self.layers[:-1] if last else self.layers, last=last)

    def check(self, target: PreTrainedModel) -> None:
        """See `DraftHead.check`; the target must be able to lend what the head has not."""
        super().check(target)
        if _compat.weights_place(self.decoder) != "here":
            raise UnsupportedCallError(
                "assistant_model is a dflash draft whose weights are offloaded, or nowhere: load it whole on a device"
            )
        lent = Borrowed.of(target)
        for what, own, part, size in (
            ("embeddings", self.embed_tokens, "embed_tokens.weight", _compat.embedding_size(target)),
            ("an LM head", self.lm_head, "lm_head.weight", _compat.lm_head_size(target)),
        ):
            if own is None and self.width != size:
                raise UnsupportedCallError(
                    f"assistant_model is a dflash head of width {self.width} without {what} of its own, and the "
                    f"target's have {size} values: its checkpoint needs {part}"
                )
        if self.lm_head is None and lent.lm_head is None:
            raise UnsupportedCallError(
                f"assistant_model is a dflash head without an LM head, and {type(target).__name__} names none by "
                "get_output_embeddings()"
            )
        rows = _compat.embedding_rows(target) if self.embed_tokens is None else self.vocab_size
        if not 0 <= self.mask_token_id < rows:
            raise UnsupportedCallError(
                f"assistant_model is a dflash head with mask_token_id={self.mask_token_id}, and the embeddings have "
                f"{rows} rows: pass the head that was trained for this target"
            )

    def embed(self, tokens: Tensor, lent: Borrowed) -> Tensor:
        """Embeddings `[..., E]` of ids of the target."""
        if self.embed_tokens is not None:
            out = _compat.raw_embeddings(self.embed_tokens, tokens, self.embedding_scale or 1.0)
        else:
            out = _compat.raw_embeddings(lent.embeddings, tokens, self.embedding_scale)
        return self.placed(out)

    def logits(self, states: Tensor, lent: Borrowed) -> Tensor:
        """Logits `[..., V]` of states `[..., E]`."""
        out = self.placed(lent.raw_logits(states)) if self.lm_head is None else self.lm_head(states)
        own = self.logit_scale
        return scaled(out, *((lent.scale, lent.softcap) if own is None else (own, self.softcap)))

    def read(
        self, tokens_BS: Tensor, context_BCF: Tensor, roots: Sequence[int], kept: BlockContext, lent: Borrowed
    ) -> Tensor:
        """One forward; returns the logits `[B, max_depth, V]` of the tokens behind the anchors.

        Args:
            tokens_BS: the blocks.
            context_BCF: features that were not read before, right-aligned, as `kept` was told of.
            roots: positions of the anchors.
            kept: the context so far; the new one is added.
            lent: parts of the target.
        """
        size = self.block_size
        count = context_BCF.shape[1]
        ends = torch.tensor(kept.ends)
        place_BS, slots_P = ends[:, None] + torch.arange(size), torch.arange(kept.width)
        real_BP = slots_P < ends[:, None] + size
        masks: dict[str, Tensor | None] = {}
        for kind in self._kinds:
            seen = self._visible(kind, place_BS, slots_P.expand(len(ends), -1)) & real_BP[:, None]
            masks[kind] = None if bool(seen.all()) else seen[:, None].to(self.device)
        positions = torch.tensor(roots)[:, None] + torch.arange(-count, size)
        states = _compat.block_forward(
            self.decoder,
            noise=self.embed(tokens_BS, lent),
            context=context_BCF,
            masks=masks,
            positions=positions.clamp(min=0).to(self.device),
            cache=kept,
        )
        kept.end()
        return self.logits(states[:, size - self.max_depth :], lent)

    def forward(self, features_BTF: Tensor, tokens_BT: Tensor, lent: Borrowed, anchors: Sequence[int]) -> Tensor:
        """Logits of the blocks behind some tokens, for training.

        Args:
            features_BTF: of the target, of these tokens.
            tokens_BT: int64, ids of the target.
            lent: parts of the target.
            anchors: places of tokens, A of them.

        Returns:
            `[B, A, max_depth, V]`: at d those of token anchor + 1 + d.
        """
        batch, length = tokens_BT.shape
        size, device = self.block_size, self.device
        blocks = torch.full((batch, len(anchors), size), self.mask_token_id, device=tokens_BT.device)
        blocks[:, :, 0] = tokens_BT[:, list(anchors)]
        start = torch.tensor(list(anchors)).repeat_interleave(size)
        place_Q = start + torch.arange(size).repeat(len(anchors))
        keys_K = torch.cat([torch.arange(length), place_Q])
        of_block = torch.cat([torch.full((length,), -1), start])
        seen_QK = (of_block == start[:, None]) | ((of_block < 0) & (keys_K < start[:, None]))
        masks = {
            kind: (self._visible(kind, place_Q, keys_K) & seen_QK).expand(batch, 1, -1, -1).to(device)
            for kind in self._kinds
        }
        states = _compat.block_forward(
            self.decoder,
            noise=self.embed(blocks.flatten(1), lent),
            context=self.placed(features_BTF),
            masks=masks,
            positions=keys_K.expand(batch, -1).to(device),
            cache=None,
        )
        states = states.view(batch, len(anchors), size, -1)
        return self.logits(states[:, :, size - self.max_depth :], lent)

    @property
    def _kinds(self) -> set[str]:
        """The kinds of its layers."""
        return set(self.decoder.config.layer_types)

    def _visible(self, kind: str, place_Q: Tensor, keys_K: Tensor) -> Tensor:
        """Bool `[..., Q, K]`: what a layer lets places of a block see of the context and of its own block."""
        apart = place_Q[..., :, None] - keys_K[..., None, :]
        if kind != _SLIDING:
            return torch.ones_like(apart, dtype=torch.bool)
        back = int(self.decoder.config.sliding_window) - self.window_edge
        return (apart <= back) & (apart >= (0 if self.causal_windows else -back))
