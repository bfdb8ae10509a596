"""Classifier-free guidance at tree nodes: two laws of the next token, mixed (Sanchez et al. 2023, arXiv 2306.17806).

transformers' processor keeps a second stream of the text, without the prompt, and reads one token of it per call. Here
the second stream is read by the engine, a whole tree at a time; what is left for the list of processors is the mixing,
a function of the two rows of logits at the node that the walk stands at.

Shapes: B batch rows, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["NodeGuidance"]


class NodeGuidance:
    """Stands in the list of processors where transformers' own guidance stood, and gives the same numbers.

    Args:
        scale: 1 leaves the law as it is, more moves it away from the unconditional one.
        first_BV: unconditional logits before the first token.
    """

    def __init__(self, scale: float, first_BV: Tensor) -> None:
        self.scale = scale
        self._logits_BNV = first_BV[:, None]
        self._at = [0] * int(first_BV.shape[0])

    def score(self, logits_BNV: Tensor) -> None:
        """Take the unconditional logits of a new tree; every row stands at its root."""
        self._logits_BNV = logits_BNV
        self._at = [0] * len(self._at)

    def stand(self, row: int, node: int) -> None:
        """The next call is about this node of the row."""
        self._at[row] = node

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Guided scores `[B, V]` from conditional ones; see `LogitsProcessor`."""
        scores = torch.nn.functional.log_softmax(scores, dim=-1)
        here_BV = torch.stack([self._logits_BNV[row, node] for row, node in enumerate(self._at)])
        # In the dtype of the model, as the processor does it.
        unconditional = torch.nn.functional.log_softmax(here_BV, dim=-1).to(scores.device)
        return self.scale * (scores - unconditional) + unconditional
