"""Drawing the children of nodes for verification by independent draws, and keeping the laws they were drawn from.

Shapes: R nodes, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_treespec.rules import Draws, Rule
from hf_treespec.tree import Candidate
from hf_treespec.verify import DraftLaws, RoundNoise

__all__ = ["ChildSampler"]

# Guess of how often a random child is accepted, where nothing is known yet; it only ranks nodes.
_PRIOR = 0.7


class ChildSampler:
    """Draws children by a rule, from the laws that it keeps.

    Args:
        rule: how children are drawn.
        random_children: random ones among the children of a node, for `Draws.HYBRID`.
        noise: random numbers.
    """

    def __init__(self, rule: Rule, random_children: int, noise: RoundNoise) -> None:
        self.rule = rule
        self._random = random_children
        self._noise = noise
        self._laws: list[Tensor] = []
        self._rows: dict[int, dict[int, int]] = {}

    def begin(self) -> None:
        """Forget the laws of the last round."""
        self._laws, self._rows = [], {}

    def laws(self, batch: int) -> DraftLaws | None:
        """Laws of the nodes with random children, or None if there are none."""
        if not self._laws:
            return None
        return DraftLaws(torch.stack(self._laws), [self._rows.get(row, {}) for row in range(batch)])

    def draw(
        self, row: int, position: int, nodes: Sequence[int], counts: Sequence[int], laws_RV: Tensor
    ) -> list[list[Candidate]]:
        """Children of some nodes of a row, in the order in which they are to be verified.

        Args:
            row: batch row.
            position: of the root.
            nodes: R nodes.
            counts: children wanted of each; decided before anything of them was drawn.
            laws_RV: the draft's law at each, probabilities. One that holds a NaN gives no children.
        """
        lawful = laws_RV.isfinite().all(-1).tolist()
        return [
            self._draw(row, position, node, count, law_V) if sound else []
            for node, count, law_V, sound in zip(nodes, counts, laws_RV, lawful, strict=True)
        ]

    def _draw(self, row: int, position: int, node: int, count: int, law_V: Tensor) -> list[Candidate]:
        draws = self.rule.draws
        # How many are random is settled before any is drawn.
        random = {Draws.TOP: 0, Draws.HYBRID: min(self._random, count)}.get(draws, count)
        best = law_V.topk(min(count - random, law_V.shape[0]))
        chosen = [
            Candidate(token, value)
            for token, value in zip(best.indices.tolist(), best.values.log().tolist(), strict=True)
            if value > -torch.inf
        ]
        if not random:
            return chosen
        rest_V = law_V.to(self._noise.dtype).index_fill(0, best.indices, 0.0)
        if draws is Draws.IID:
            drawn = self._iid(row, position, node, random, rest_V)
        else:
            drawn = self._distinct(row, position, node, random, rest_V)
        if not drawn:
            return chosen
        self._rows.setdefault(row, {})[node] = len(self._laws)
        self._laws.append(law_V)
        # Rounded: the last bits differ between batch shapes, and must not decide where a tree grows.
        first = max(round(float(rest_V.sum()), 3), 1e-3) * _PRIOR
        guesses = [math.log(first) + place * math.log1p(-_PRIOR) for place in range(len(drawn))]
        return [Candidate(token, guess, sampled=True) for token, guess in zip(drawn, guesses, strict=True)] + chosen

    def _iid(self, row: int, position: int, node: int, count: int, rest_V: Tensor) -> list[int]:
        noise = torch.stack([self._noise.of_child(row, position, node, draw) for draw in range(count)])
        return (rest_V.log() + noise.to(rest_V.device)).argmax(-1).tolist()

    def _distinct(self, row: int, position: int, node: int, count: int, rest_V: Tensor) -> list[int]:
        # The order of the perturbed scores is that of draws without replacement (Gumbel-top-k, Kool et al. 2019).
        scores = rest_V.log() + self._noise.of_child(row, position, node, 0).to(rest_V.device)
        best = scores.topk(min(count, scores.shape[0]))
        found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [token for token, score in found if score > -torch.inf]
