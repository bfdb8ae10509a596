"""How far the draft's own prediction of a tree is to be trusted, by tree size."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["GainCurve"]

_DECAY = 0.9  # weight of the past
_PRIOR_TOKENS = 1.0  # predicted and accepted tokens that trust in the draft starts from; forgotten like any sample


class GainCurve:
    """Accepted over predicted tokens of trees, by size.

    Args:
        sizes: the ladder.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        # Decayed sums, which start from full trust.
        self._right = [_PRIOR_TOKENS] * len(sizes)
        self._predicted = [_PRIOR_TOKENS] * len(sizes)

    def add(self, place: int, accepted: int, predicted: float) -> None:
        """Take in one round of the ladder's size number `place`, scored or not.

        Args:
            place: index into the ladder.
            accepted: drafted tokens that the target agreed with.
            predicted: how many the draft expected: the sum of its node probabilities.
        """
        if not accepted and not predicted:
            # A tree of nothing tells nothing, and many of them would wear away what is known.
            return
        self._right[place] = _DECAY * self._right[place] + accepted
        self._predicted[place] = _DECAY * self._predicted[place] + predicted

    def expected(self, place: int, predicted: float) -> float:
        """The draft's prediction for a tree at hand, corrected by how earlier predictions turned out."""
        return predicted * self._right[place] / self._predicted[place]
