"""What all draft heads have in common: sizes, what they read of the target, and where they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_treespec import _compat
from hf_treespec.draft.base import Features
from hf_treespec.errors import TreeConfigError, UnsupportedCallError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Borrowed", "DraftHead", "Source", "check_ids", "scaled"]


def scaled(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Logits times a factor, and then inside of the bound of a tanh if there is one."""
    out = logits if scale == 1.0 else logits * scale
    return out if softcap is None else torch.tanh(out / softcap) * softcap


class Borrowed(NamedTuple):
    """Parts of the target that heads without their own use; they are called and never changed.

    Attributes:
        embeddings: of tokens.
        lm_head: None if the target names none.
        scale: by which the target multiplies what comes out of its LM head.
        softcap: bound of the tanh that it puts behind it; None without one.
    """

    embeddings: nn.Module
    lm_head: nn.Module | None
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, target: PreTrainedModel) -> Borrowed:
        """Those of a loaded model."""
        return cls(*_compat.target_parts(target), *_compat.lm_scaling(target))

    def raw_logits(self, states: Tensor) -> Tensor:
        """What the LM head itself makes of states `[..., H]`: `[..., V]`, in its type and on its device."""
        assert self.lm_head is not None
        weights = next(self.lm_head.parameters())
        out: Tensor = self.lm_head(states.to(weights.device, weights.dtype))
        return out

    def logits(self, states: Tensor) -> Tensor:
        """Logits as the target gives them."""
        return scaled(self.raw_logits(states), self.scale, self.softcap)


@dataclass(slots=True)
class Source:
    """Where a head was read from, so that it can be written back as it was.

    Args:
        layout: name of the layout, see `hf_treespec.draft.heads.formats`.
        config: its `config.json`.
        tensors: names of its tensors, and those that the head does not use.
    """

    layout: str
    config: Mapping[str, Any]
    tensors: tuple[str, ...] = ()
    unused: dict[str, Tensor] = field(default_factory=dict)


def check_ids(name: str, ids_V: Tensor, vocab_size: int) -> None:
    """Refuse ids of a reduced vocabulary that no law over the target's can be spread to.

    Raises:
        TreeConfigError: if some are the same, or none of the target's.
    """
    ids = ids_V.tolist()
    if len(set(ids)) < len(ids) or not all(0 <= token < vocab_size for token in ids):
        raise TreeConfigError(f"{name}: expected {len(ids)} different ids of the {vocab_size} of the target")


class DraftHead(nn.Module):
    """A draft that reads the target's hidden states. An ordinary module: `forward` is for training.

    Args:
        hidden_size: of the target's hidden states.
        vocab_size: ids of the target; 0 where that hangs on the target alone.
        ids_V: int64, the target's id of each id that the head knows, all different; None if it knows all of them.

    Attributes:
        kind: what the statistics call it.
        max_depth: how far ahead it can draft; None without a bound.
        source: where it was read from, if it was.

    Raises:
        TreeConfigError: for ids that are not so.
    """

    kind = "head"
    max_depth: int | None = None

    def __init__(self, hidden_size: int, vocab_size: int, ids_V: Tensor | None = None) -> None:
        super().__init__()
        if ids_V is not None:
            check_ids("ids of the head", ids_V, vocab_size)
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.source: Source | None = None
        self.register_buffer("draft_ids", ids_V, persistent=False)

    @property
    def drafter(self) -> PreTrainedModel | None:
        """A model of transformers inside, whose attention must take the masks of trees."""
        return None

    @property
    def ids(self) -> Tensor | None:
        """int64 `[V]`, the target's id of each id that the head knows; None if they are the same."""
        ids = self.draft_ids
        return ids if isinstance(ids, Tensor) else None

    @property
    def draft_vocab(self) -> int:
        """V: ids that the head knows."""
        return self.vocab_size if self.ids is None else len(self.ids)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.float32)

    def features(self, target_layers: int) -> Features:
        """The hidden states that the head reads of a target with so many layers."""
        raise NotImplementedError

    def placed(self, states: Tensor) -> Tensor:
        """Hidden states of the target on the head's device, in its type."""
        return states.to(self.device, self.dtype)

    def check(self, target: PreTrainedModel) -> None:
        """Refuse a target that the head was not made for, by its sizes.

        Raises:
            UnsupportedCallError: naming the sizes of both.
        """
        layers = len(_compat.decoder_layers(target))
        wanted = self.features(layers).layers
        # Of the last hidden state the LM head may read fewer values than layers give (OPT-350m).
        projected = not wanted and self.hidden_size == _compat.lm_head_size(target)
        size = self.hidden_size if projected else _compat.hidden_size(target)
        sizes = {
            "hidden states of": (self.hidden_size, size, "values"),
            "a vocabulary of": (self.vocab_size, _compat.vocabulary_size(target), "ids"),
        }
        for what, (own, theirs, unit) in sizes.items():
            if own and own != theirs:
                raise UnsupportedCallError(
                    f"assistant_model is a {self.kind} head for {what} {own} {unit}, and {type(target).__name__} has "
                    f"{theirs}: pass the head that was trained for this target"
                )
        if not all(0 <= layer < layers for layer in wanted) or len(set(wanted)) < len(wanted):
            raise UnsupportedCallError(
                f"assistant_model is a {self.kind} head that reads the hidden states {wanted} of its target, and "
                f"{type(target).__name__} has {layers} layers: expected different ones from 0 to {layers - 1}. Pass "
                "the head that was trained for this target, or name the layers in its config"
            )
