"""From the confidence of a draft to the probability that it is right: a monotone map, learnt while decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, log, log1p

import numpy as np

from hf_treespec.control.acceptance import falling
from hf_treespec.control.samples import Sample
from hf_treespec.tree import TokenTree, TreeBuilder

__all__ = ["ConfidenceMap", "PathChances", "confidences_of"]

_DECAY = 0.98  # weight of the past, per sample of a step
_TRUST = 4.0  # samples that each step of the map begins with, in which the draft is right as often as it says
_EDGE = 6.0  # log odds of the outermost steps
_STEPS = 13
_DEPTHS = 8  # that have a map of their own; deeper ones share that of all
_LEAST = 1e-4
_SURE = -log1p(exp(-_EDGE))  # log confidence at the last step
_NEVER = _SURE - _EDGE  # and at the first
_A_STEP = (_STEPS - 1) / (2.0 * _EDGE)


def confidences_of(tree: TokenTree) -> list[float]:
    """Per node the log of the draft's confidence in it where its parent is right; empty for trees without scores."""
    if tree.scores is None:
        return []
    return [0.0, *(tree.scores[node] - tree.scores[tree.parents[node]] for node in range(1, len(tree)))]


class _Steps:
    """Samples at the steps of a map."""

    def __init__(self) -> None:
        self.seen = [0.0] * _STEPS
        self.right = [0.0] * _STEPS

    def add(self, place: float, weight: float, hit: float) -> None:
        """Take in a sample; between two steps it counts for both, by how near they are."""
        step = min(int(place), _STEPS - 2)
        for one, share in ((step, (1.0 - place + step) * weight), (step + 1, (place - step) * weight)):
            kept = 1.0 - (1.0 - _DECAY) * share
            self.seen[one] = kept * self.seen[one] + share
            self.right[one] = kept * self.right[one] + share * hit


def _values(steps: Sequence[_Steps], before: Sequence[float]) -> list[list[float]]:
    """Of each its averages, non-decreasing, that begin with those of `before`."""
    mass = np.array([one.seen for one in steps]) + _TRUST
    mean = (np.array([one.right for one in steps]) + _TRUST * np.array(before)) / mass
    rising: list[list[float]] = falling(mean[:, ::-1], mass[:, ::-1])[:, ::-1].tolist()
    return rising


class ConfidenceMap:
    """Acceptance by confidence: averages at steps of the log odds, made non-decreasing (isotonic), and interpolated.

    Each depth has its own, which begins with that of all depths, which begins with the draft's own word. A map changes
    by `learn` alone, so that all of a round is judged by one.
    """

    def __init__(self) -> None:
        self._told = [1.0 / (1.0 + exp(-_EDGE * (2.0 * step / (_STEPS - 1) - 1.0))) for step in range(_STEPS)]
        self._all, self._own = _Steps(), [_Steps() for _ in range(_DEPTHS)]
        self._changed = False
        self._values = [self._told for _ in range(_DEPTHS + 1)]

    def add(self, samples: Iterable[Sample], confidences: Sequence[float]) -> None:
        """Take in a judged tree; what it says counts from the next `learn` on.

        Args:
            samples: of its nodes.
            confidences: see `confidences_of`.
        """
        if not confidences:
            return
        for sample in samples:
            self._changed = True
            place = self._place(confidences[sample.node])
            self._all.add(place, sample.weight, sample.hit)
            if sample.depth < _DEPTHS:
                self._own[sample.depth].add(place, sample.weight, sample.hit)

    def learn(self) -> None:
        """Have all that was added count."""
        if not self._changed:
            return
        self._changed = False
        (everywhere,) = _values([self._all], self._told)
        self._values = [*_values(self._own, everywhere), everywhere]

    def __call__(self, confidence: float, depth: int) -> float:
        """Probability that a child is right where its parent is.

        Args:
            confidence: log of the draft's confidence in the child.
            depth: of the parent.
        """
        values, place = self._values[depth if depth < _DEPTHS else _DEPTHS], self._place(confidence)
        step = int(place)
        if step > _STEPS - 2:
            step = _STEPS - 2
        return values[step] + (values[step + 1] - values[step]) * (place - step)

    def rescored(self, tree: TokenTree) -> TokenTree:
        """The tree with scores by the map; as it is if it has none."""
        if tree.scores is None or not tree.drafted:
            return tree
        parents, depths = tree.parents, tree.depths
        scores = [0.0]
        for node, confidence in enumerate(confidences_of(tree)[1:], start=1):
            chance = self(confidence, depths[node] - 1)
            scores.append(scores[parents[node]] + log(chance if chance > _LEAST else _LEAST))
        return tree.with_scores(scores)

    def _place(self, confidence: float) -> float:
        """Where on the steps a log confidence lies, between the first and the last."""
        if confidence >= _SURE:
            return _STEPS - 1.0
        if confidence <= _NEVER:
            return 0.0
        return (confidence - log1p(-exp(confidence)) + _EDGE) * _A_STEP


class PathChances:
    """How likely all nodes down to one are right, in trees that still grow.

    Args:
        confidence: the map.
    """

    def __init__(self, confidence: ConfidenceMap) -> None:
        self._map = confidence
        self._builders: Sequence[TreeBuilder] | None = None
        self._known: list[dict[int, float]] = []

    def of(self, builders: Sequence[TreeBuilder], row: int, node: int) -> float:
        """That of a node of a row.

        Args:
            builders: the trees of a round; the same list in all of its levels.
            row: place among them.
            node: of its tree.
        """
        if self._builders is not builders:
            self._builders = builders
            self._known = [{0: 1.0} for _ in builders]
        known = self._known[row]
        if node not in known:
            builder = builders[row]
            parent = builder.parents[node]
            above = self.of(builders, row, parent)
            known[node] = above * self._map(builder.scores[node] - builder.scores[parent], builder.depths[parent])
        return known[node]
