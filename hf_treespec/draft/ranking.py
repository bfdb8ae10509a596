"""From a draft's logits to the children of its nodes: shaped like the target's scores, ranked with its noise.

Shapes: R nodes, V ids of the draft, T ids of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.draft.sampling import ChildSampler
from hf_treespec.tree import Candidate
from hf_treespec.verify import DraftLaws

if TYPE_CHECKING:
    from transformers import LogitsProcessorList

__all__ = ["Ranker"]


class Ranker:
    """Chooses children.

    Args:
        target_vocab: T.
        processors: processors to shape the draft's law like the target's. Only those that look at logits alone may be
            given. They change how much is accepted, never the text.
        device: where the processors' tensors lie, if the draft may lie elsewhere.
        sampler: draws children at random, for verification by independent draws; they are ranked without one.
        ids_V: int64, the target's id of each id of the draft, all different; None if they are the same.
    """

    def __init__(
        self,
        target_vocab: int,
        *,
        processors: LogitsProcessorList | None = None,
        device: torch.device | None = None,
        sampler: ChildSampler | None = None,
        ids_V: Tensor | None = None,
    ) -> None:
        self.sampler = sampler
        self._target_vocab = target_vocab
        self._processors = processors
        self._device = device
        self._ids = ids_V
        self._names = None if ids_V is None else ids_V.tolist()

    def rank(self, logits_RV: Tensor, noise: Sequence[Tensor | None], count: int) -> list[list[Candidate]]:
        """The `count` best children of each of R nodes, best first, with their confidence.

        Under sampling children are the Gumbel-top-k: the best by log q plus the noise that the target will add. Then
        the confidence is the softmax of the perturbed scores, else of the logits.

        Args:
            logits_RV: raw logits.
            noise: per node the Gumbel noise `[T]` of its children's position, or None.
            count: children wanted.

        Returns:
            Candidates per node, in ids of the target.
        """
        scores = self._shaped(logits_RV)
        if any(n is not None for n in noise):
            scores = scores + torch.stack(
                [scores.new_zeros(scores.shape[1]) if n is None else self._own(n, scores) for n in noise]
            )
        count = min(count, scores.shape[1])
        top, tokens = scores.topk(count, dim=-1)
        confidence = top - scores.logsumexp(-1, keepdim=True)
        return [
            [Candidate(self._name(token), conf) for token, conf in zip(ts, cs, strict=True) if conf > float("-inf")]
            for ts, cs in zip(tokens.tolist(), confidence.tolist(), strict=True)
        ]

    def sample(
        self, row: int, position: int, nodes: Sequence[int], counts: Sequence[int], logits_RV: Tensor
    ) -> list[list[Candidate]] | None:
        """Random children of nodes of a row whose root has this position, or None without a sampler."""
        if self.sampler is None:
            return None
        # Ids that only the target knows are never drawn.
        laws_RT = self._spread(self._shaped(logits_RV).softmax(-1), 0.0)
        return self.sampler.draw(row, position, nodes, counts, laws_RT)

    def laws(self, batch: int) -> DraftLaws | None:
        """The laws that the random children of the trees last proposed were drawn from."""
        return None if self.sampler is None else self.sampler.laws(batch)

    def _name(self, token: int) -> int:
        return token if self._names is None else int(self._names[token])

    def _own(self, noise_T: Tensor, scores_RV: Tensor) -> Tensor:
        if self._ids is None:
            return noise_T[: scores_RV.shape[1]].to(scores_RV)
        return noise_T[self._ids.to(noise_T.device)].to(scores_RV)

    def _spread(self, scores_RV: Tensor, filler: float) -> Tensor:
        """`[R, T]` with a filler where the draft knows no id."""
        if self._ids is None:
            # A negative padding would cut the law, and what is left of it is no law.
            assert scores_RV.shape[-1] <= self._target_vocab, "a draft's ids beyond the target's are cut before"
            return torch.nn.functional.pad(scores_RV, (0, self._target_vocab - scores_RV.shape[-1]), value=filler)
        wide = scores_RV.new_full((len(scores_RV), self._target_vocab), filler)
        return wide.index_copy_(1, self._ids.to(wide.device), scores_RV)

    def _shaped(self, logits_RV: Tensor) -> Tensor:
        """Scores after the processors, float32."""
        scores = logits_RV.to(torch.float32, copy=True)
        if self._processors:
            scores = scores.to(self._device)
            if self._ids is not None:
                # Processors may name ids of the target.
                scores = self._spread(scores, float("-inf"))
            ids = torch.zeros((scores.shape[0], 1), dtype=torch.long, device=scores.device)
            scores = _compat.process_logits(self._processors, ids, scores)
            if self._ids is not None:
                scores = scores[:, self._ids.to(scores.device)]
        return scores
