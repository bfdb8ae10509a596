"""Batches of examples: in an order that seed and epoch fix, each of about as many tokens, shared by all processes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_treespec.train.features import Example, Examples

__all__ = ["Batch", "batches", "share", "stacked"]

# Texts are sorted by length among so many batches.
_SORTED = 16


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples side by side, padded on the right; B texts of T tokens.

    Attributes:
        tokens_BT: int64 ids.
        new_BT: bool, tokens that the target wrote itself: those that a draft is to learn.
        features_BTF: hidden states of the target.
        likely_BTK: ids of the most likely tokens behind each.
        logp_BTK: float32 natural logarithms of their probabilities.
    """

    tokens_BT: Tensor
    new_BT: Tensor
    features_BTF: Tensor
    likely_BTK: Tensor
    logp_BTK: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(
            self.tokens_BT.to(device),
            self.new_BT.to(device),
            self.features_BTF.to(device),
            self.likely_BTK.to(device),
            self.logp_BTK.to(device),
        )


def stacked(examples: Sequence[Example]) -> Batch:
    """Examples as a batch."""
    padded = torch.nn.utils.rnn.pad_sequence
    tokens = padded([one.tokens_T for one in examples], batch_first=True)
    place = torch.arange(tokens.shape[1])
    new = torch.stack([(place >= one.prompt) & (place < len(one.tokens_T)) for one in examples])
    return Batch(
        tokens,
        new,
        padded([one.features_TF for one in examples], batch_first=True),
        padded([one.likely_TK for one in examples], batch_first=True),
        padded([one.logp_TK for one in examples], batch_first=True),
    )


def batches(examples: Examples, tokens: int, *, seed: int, epoch: int) -> list[list[int]]:
    """Indices of the examples of each batch of an epoch.

    Args:
        examples: all.
        tokens: at most so many in a batch, padding counted, unless one text alone has more.
        seed: of the run.
        epoch: from 0.
    """
    dice = random.Random(f"{seed}.{epoch}")
    order = list(range(len(examples)))
    dice.shuffle(order)
    found = list(_cut(examples, order, tokens))
    dice.shuffle(found)
    return found


def share(examples: Examples, batch: Sequence[int], rank: int, world: int) -> Batch:
    """What one of several processes reads of a batch; where there are too few, a text of which nothing is learnt."""
    mine = batch[rank::world]
    if mine:
        return stacked([examples[index] for index in mine])
    nothing = stacked([examples[batch[0]]])
    return replace(nothing, new_BT=torch.zeros_like(nothing.new_BT))


def _cut(examples: Examples, order: list[int], tokens: int) -> Iterator[list[int]]:
    mean = max(1, sum(map(examples.length, order)) // len(order))
    window = max(1, _SORTED * tokens // mean)
    for start in range(0, len(order), window):
        batch: list[int] = []
        for index in sorted(order[start : start + window], key=examples.length):
            if batch and (len(batch) + 1) * examples.length(index) > tokens:
                yield batch
                batch = []
            batch.append(index)
        yield batch
