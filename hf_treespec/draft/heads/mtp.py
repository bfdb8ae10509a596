"""Multi-token prediction modules that came with the target, as a draft head.

Module j reads, for every token, its embedding beside what module j - 1 made of the token before it (the first: the
target's last hidden state), attends over the tokens before, and predicts the next one. So one module is one level of a
tree. That is how DeepSeek-V3 (2024) trains them, and how transformers drafts with them.

Shapes: B rows, T tokens, H hidden size, V ids of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.cache import DENSE, SLIDING, layer_kind
from hf_treespec.draft.base import Features
from hf_treespec.draft.heads.base import DraftHead
from hf_treespec.errors import UnsupportedCallError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["MtpHead", "check_states"]


def check_states(layers: Sequence[object], target: PreTrainedModel) -> None:
    """Refuse modules that keep more than keys and values: they cannot read several branches.

    Args:
        layers: of their cache.
        target: whose modules they are.

    Raises:
        UnsupportedCallError: naming the class of what they keep.
    """
    odd = sorted({type(layer).__name__ for layer in layers if layer_kind(layer) not in (DENSE, SLIDING)})
    if odd:
        raise UnsupportedCallError(
            f"the MTP modules of {type(target).__name__} keep states of class {', '.join(odd)}, which only go "
            "forward: they cannot read the branches of a tree. Leave use_mtp out and use draft='ngram', or leave "
            "tree_config out"
        )


class MtpHead(DraftHead):
    """The modules of one target; they share its embeddings and its LM head.

    Args:
        modules: an `MtpModel` of transformers; it is not changed.
        depth: how far ahead to draft. Behind the last module it is run again on what it made itself. None for one
            level a module.
    """

    kind = "mtp"

    def __init__(self, modules: PreTrainedModel, depth: int | None = None) -> None:
        super().__init__(_compat.hidden_size(modules), _compat.vocabulary_size(modules))
        self.all = modules
        self.count = _compat.mtp_count(modules)
        self.max_depth: int = depth or self.count

    @property
    def drafter(self) -> PreTrainedModel:
        """The modules."""
        return self.all

    @property
    def device(self) -> torch.device:
        """Where the modules are; embeddings and head may be elsewhere."""
        return _compat.mtp_place(self.all)[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of their weights."""
        return _compat.mtp_place(self.all)[1]

    def features(self, target_layers: int) -> Features:
        """The last hidden state."""
        return Features(last=True)

    def check(self, target: PreTrainedModel) -> None:
        """See `DraftHead.check` and `check_states`."""
        super().check(target)
        check_states(_compat.make_mtp_cache(self.all.config).layers, target)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings `[..., H]` of ids of the target."""
        return self.placed(_compat.mtp_embed(self.all, tokens))

    def read(
        self,
        number: int,
        tokens: Tensor,
        states: Tensor,
        *,
        positions: Tensor,
        mask: Tensor | None,
        cache: _compat.Cache,
    ) -> Tensor:
        """One forward of one module; returns `[B, T, H]`, what it made of the tokens.

        Args:
            number: of the module.
            tokens: int64 `[B, T]`.
            states: `[B, T, H]`, what was made of the tokens in front of them.
            positions: int64 `[B, T]`.
            mask: int64 `[B, L + T]`, or None.
            cache: with a layer for each module; extended in place.
        """
        return _compat.read_mtp(
            self.all,
            number,
            self.embed(tokens),
            states,
            positions=positions.to(self.device),
            mask=None if mask is None else mask.to(self.device),
            cache=cache,
        )

    def logits(self, states: Tensor) -> Tensor:
        """Logits `[..., V]` of the tokens behind those of which these states were made."""
        return _compat.mtp_logits(self.all, states)
