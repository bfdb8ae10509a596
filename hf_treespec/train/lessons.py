"""What each kind of draft is shown, and what it should have said: the target's law of each token, not only the token.

A law is compared at its *target place*: the token that it is about. Depth j of a draft is about the token j + 1 places
behind the root of a tree, as when it drafts, with the true tokens in between.

Shapes: B texts of T tokens, V ids of the draft, M laws of a depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_treespec.draft import Borrowed, DraftHead, EagleHead, Features, MedusaHead, MLPHead
from hf_treespec.train.batches import Batch

__all__ = ["EagleLesson", "Lesson", "MLPLesson", "MedusaLesson", "ModelLesson", "head_lesson"]


class Laws(NamedTuple):
    """What a draft says at one depth.

    Attributes:
        places_BT: bool, the tokens that it says something of.
        logits_MV: in the order of those.
    """

    places_BT: Tensor
    logits_MV: Tensor


class Lesson(nn.Module):
    """A draft and how it is trained.

    Args:
        draft: the module with the weights.
        features: hidden states of the target that it reads.
        depths: how many tokens ahead.
        ids_V: the target's ids of what the draft says; None for all.
        vocab_size: of the target.
        decay: each depth counts so much less than the one before.
    """

    def __init__(
        self,
        draft: nn.Module,
        features: Features,
        *,
        depths: int,
        ids_V: Tensor | None,
        vocab_size: int,
        decay: float = 0.8,
    ) -> None:
        super().__init__()
        self.draft = draft
        self.features = features
        self.depths = depths
        self.decay = decay
        places = torch.arange(vocab_size) if ids_V is None else torch.full((vocab_size,), -1)
        if ids_V is not None:
            places[ids_V.cpu()] = torch.arange(len(ids_V))
        # Of each id of the target its place in the draft's laws, -1 if it has none.
        self.register_buffer("place_of", places, persistent=False)

    def laws(self, batch: Batch) -> Iterator[Laws]:
        """Depth by depth, of tokens that the target wrote."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross entropy of the target's laws and the draft's, summed over depths and tokens, and the sum of weights.

        Both are compared on the ids that the draft knows and that are among the likely ones.
        """
        place_of = self.get_buffer("place_of")
        # The law of a token stands at the token before it.
        likely = place_of[batch.likely_BTK.roll(1, dims=1)]
        chances = batch.logp_BTK.roll(1, dims=1).exp() * (likely >= 0)
        known = chances.sum(-1)
        chances = chances / known.clamp(min=1e-6)[..., None]
        # A token whose law the draft mostly cannot say counts for less.
        weight_BT = known.clamp(max=1.0)
        total = batch.logp_BTK.new_zeros(())
        count = batch.logp_BTK.new_zeros(())
        for depth, (places, logits) in enumerate(self.laws(batch)):
            logits = logits.float()
            said = logits.gather(-1, likely[places].clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
            weight = weight_BT[places] * self.decay**depth
            total = total - ((chances[places] * said).sum(-1) * weight).sum()
            count = count + weight.sum()
        return total, count

    @torch.no_grad()
    def runs(self, batch: Batch) -> Tensor:
        """Of each token, as the root of a greedy chain, how many drafted tokens would be accepted.

        Returns:
            int64 `[B, T]`; -1 where no round with `depths` tokens of the target's own behind the root could begin: a
            root is a token that the target wrote itself, since the prefill gives the first.
        """
        truth = self.get_buffer("place_of")[batch.tokens_BT]
        length = batch.tokens_BT.shape[1]
        roots = max(0, length - self.depths)
        alive = batch.new_BT[:, :roots]
        for depth in range(1, self.depths + 1):
            alive = alive & batch.new_BT[:, depth : roots + depth]
        found = torch.full_like(truth, -1)
        found[:, :roots][alive] = 0
        for depth, (places, logits) in enumerate(self._by_depth(batch), start=1):
            right = torch.zeros_like(batch.new_BT)
            right[places] = logits.argmax(-1) == truth[places]
            alive = alive & right[:, depth : roots + depth]
            found[:, :roots] += alive
        return found

    def accepted(self, batch: Batch) -> tuple[int, int]:
        """Sum over the roots of `runs`, and how many roots there are."""
        found = self.runs(batch)
        roots = found >= 0
        return int(found[roots].sum()), int(roots.sum())

    def _by_depth(self, batch: Batch) -> Iterator[Laws]:
        return self.laws(batch)


def _shifted(new_BT: Tensor, first: int) -> Tensor:
    """Tokens of the target that have at least so many tokens before them."""
    kept = new_BT.clone()
    kept[:, :first] = False
    return kept


class EagleLesson(Lesson):
    """EAGLE-1 or -3: several steps of the decoder over its own output.

    Args:
        draft: the head.
        lent: parts of the target.
        target_layers: of the target.
        options: see `Lesson`.
    """

    draft: EagleHead

    def __init__(
        self, draft: EagleHead, lent: Borrowed, target_layers: int, *, depths: int, decay: float = 0.8
    ) -> None:
        super().__init__(
            draft,
            draft.features(target_layers),
            depths=depths,
            ids_V=draft.ids,
            vocab_size=draft.vocab_size,
            decay=decay,
        )
        # In a tuple, so that it is no part of what is trained.
        self._lent = (lent,)

    def laws(self, batch: Batch) -> Iterator[Laws]:
        """See `Lesson.laws`."""
        (lent,) = self._lent
        length = batch.tokens_BT.shape[1]
        pairs = self._pairs(batch.new_BT)
        made = self.draft.unroll(
            batch.features_BTF[:, :-1], batch.tokens_BT[:, 1:], lent, steps=self.depths, pairs_BM=pairs
        )
        for step, states in enumerate(made):
            # Pair i of step j is about token i + j + 2.
            first = step + 2
            about = first + (pairs if step else torch.arange(length - 1, device=pairs.device).expand(len(pairs), -1))
            asked = batch.new_BT.gather(1, about.clamp(max=length - 1)) & (about < length)
            yield Laws(_shifted(batch.new_BT, first), self.draft.logits(states[asked], lent))

    def _pairs(self, new_BT: Tensor) -> Tensor:
        """Pairs of each text that the steps after the first need; prompts are a good part of most texts."""
        first = new_BT.int().argmax(1)
        # Of the target's own tokens the last step is about the first one at pair `first - depths - 1`, and step 1
        # about the last one at `end - 4`.
        start = (first - self.depths - 1).clamp(min=0)
        end = first + new_BT.sum(1)
        width = max(1, int((end - 3 - start).max()))
        return start[:, None] + torch.arange(width, device=new_BT.device)


class _LastStateLesson(Lesson):
    """A head that looks so many tokens ahead of the last hidden state alone."""

    def __init__(self, draft: MedusaHead | MLPHead, *, decay: float = 0.8) -> None:
        super().__init__(
            draft,
            Features(last=True),
            depths=draft.max_depth,
            ids_V=draft.ids,
            vocab_size=draft.vocab_size,
            decay=decay,
        )


class MedusaLesson(_LastStateLesson):
    """Medusa: one law for each depth, from the hidden state of the token before the root."""

    draft: MedusaHead

    def laws(self, batch: Batch) -> Iterator[Laws]:
        """See `Lesson.laws`."""
        states = self.draft.placed(batch.features_BTF)
        for depth in range(self.depths):
            # The state of token i is about token i + depth + 2.
            first = depth + 2
            places = _shifted(batch.new_BT, first)
            chosen = states[:, : max(0, states.shape[1] - first)][places[:, first:]]
            yield Laws(places, self.draft.law(chosen, depth))


class MLPLesson(_LastStateLesson):
    """Recurrent MLP: a small state that reads a token a depth."""

    draft: MLPHead

    def laws(self, batch: Batch) -> Iterator[Laws]:
        """See `Lesson.laws`."""
        length = batch.tokens_BT.shape[1]
        state = self.draft.start(self.draft.placed(batch.features_BTF))
        for depth in range(self.depths):
            first = depth + 2
            width = max(0, length - first)
            state = self.draft.mix(depth, state[:, :width], batch.tokens_BT[:, depth + 1 : depth + 1 + width])
            places = _shifted(batch.new_BT, first)
            yield Laws(places, self.draft.law(depth, state[places[:, first:]]))


class ModelLesson(Lesson):
    """A causal LM by itself, which reads tokens alone."""

    def __init__(self, draft: nn.Module, *, depths: int, vocab_size: int) -> None:
        super().__init__(draft, Features(), depths=depths, ids_V=None, vocab_size=vocab_size)

    def laws(self, batch: Batch) -> Iterator[Laws]:
        """See `Lesson.laws`; what it says of a token is the same at each depth, so there is one."""
        logits = self.draft(batch.tokens_BT, use_cache=False).logits
        places = _shifted(batch.new_BT, 1)
        yield Laws(places, logits[:, :-1][places[:, 1:]])

    def _by_depth(self, batch: Batch) -> Iterator[Laws]:
        (laws,) = self.laws(batch)
        for _ in range(self.depths):
            yield laws


def head_lesson(head: DraftHead, lent: Borrowed, target_layers: int, *, depths: int, decay: float = 0.8) -> Lesson:
    """The lesson of a head.

    Args:
        head: of any kind.
        lent: parts of the target.
        target_layers: of the target.
        depths: for an EAGLE head, which has no depth of its own.
        decay: see `Lesson`.
    """
    if isinstance(head, EagleHead):
        return EagleLesson(head, lent, target_layers, depths=depths, decay=decay)
    if isinstance(head, MedusaHead):
        return MedusaLesson(head, decay=decay)
    assert isinstance(head, MLPHead)
    return MLPLesson(head, decay=decay)
