"""Controllers of the depth of trees, by name: `TreeConfig(depth_control=...)`.

Each is told what became of earlier rounds, and says before a round how deep its trees may be (`depth`) and, where
children are not drawn at random, before each level whether it is drafted (`goes_on`). None sees a token whose
acceptance it decides about. The default, "cost", is `LevelPlan` with `pays`; it has no constant to set. The others
are those that are in use elsewhere, as they are defined there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from math import exp, log, sqrt
from typing import Any, NamedTuple

from hf_treespec.control.confidence import PathChances
from hf_treespec.tree import TreeBuilder

__all__ = ["ConfidenceStop", "DepthControl", "KLStop", "PIDControl", "Reached", "divergence", "make_depth_control"]

_LEAST = 1e-6


class Reached(NamedTuple):
    """What became of the tree of one row.

    Attributes:
        drafted: depth of the tree as it was proposed, whatever was scored of it.
        accepted: depth of the deepest accepted node.
        divergences: KL divergence between target and draft at the accepted nodes that had children, the root first;
            empty where it is not asked for.
    """

    drafted: int
    accepted: int
    divergences: Sequence[float] = ()


class DepthControl(ABC):
    """What a controller does.

    Args:
        max_depth: the deepest tree.

    Attributes:
        wants_divergences: whether `Reached.divergences` is needed.
    """

    wants_divergences = False

    def __init__(self, max_depth: int) -> None:
        self._deepest = max(1, max_depth)

    @property
    @abstractmethod
    def depth(self) -> int:
        """Levels of the next round, at least 1."""

    def goes_on(self, builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]) -> bool:
        """Whether one more level is drafted; see `TreeLimits.goes_on`."""
        return True

    @abstractmethod
    def observe(self, rows: Sequence[Reached]) -> None:
        """Learn from a round in which trees were scored."""


class PIDControl(DepthControl):
    """Holds the share of drafted levels that are accepted at a set point (Astrom and Haegglund 1995, chapter 3).

    With the mean over the last `window` row rounds of accepted over drafted depth, e = mean - set point:
    depth = middle + kp e + ki sum(e) + kd (e - e of the round before), clipped to [1, max_depth]. The sum is held
    while the depth is clipped and e would drive it further (anti-windup by conditional integration), and the depth
    moves when it differs from that of the round before by a level at least (hysteresis).

    Args:
        max_depth: the deepest tree.
        setpoint: share of drafted levels to be accepted.
        kp: levels for an error of 1.
        ki: the same for each round that it lasts.
        kd: levels for a change of the error by 1.
        window: row rounds of the mean.
    """

    def __init__(self, max_depth: int, *, setpoint: float, kp: float, ki: float, kd: float, window: int) -> None:
        super().__init__(max_depth)
        self._setpoint, self._kp, self._ki, self._kd = setpoint, kp, ki, kd
        self._window: deque[float] = deque(maxlen=window)
        self._sum = 0.0
        self._error: float | None = None
        self._middle = (1 + self._deepest) / 2
        self._depth = round(self._middle)

    @property
    def depth(self) -> int:
        """See `DepthControl`."""
        return self._depth

    def observe(self, rows: Sequence[Reached]) -> None:
        """See `DepthControl`."""
        self._window.extend(row.accepted / row.drafted for row in rows if row.drafted)
        if not self._window:
            return
        error = sum(self._window) / len(self._window) - self._setpoint
        change = 0.0 if self._error is None else error - self._error
        self._error = error
        wanted = self._middle + self._kp * error + self._ki * (self._sum + error) + self._kd * change
        clipped = min(max(wanted, 1.0), float(self._deepest))
        if wanted == clipped or (wanted > clipped) != (error > 0.0):
            self._sum += error
        if abs(clipped - self._depth) >= 1.0 or clipped in (1.0, float(self._deepest)):
            self._depth = round(clipped)


class ConfidenceStop(DepthControl):
    """Stops where the best path is confident no more (SpecDec++, Huang et al. 2024).

    There a level is the last once the predicted probability that some token of the chain is rejected exceeds h; that
    is once the product of the acceptances along the chain, as they are predicted, falls below 1 - h, the threshold.
    Of a tree the best path counts. Acceptance is predicted from the draft's confidence by the map that is learnt
    while decoding (there: by a trained head).

    Args:
        max_depth: the deepest tree.
        threshold: 1 - h.
        chances: of the nodes, by the map.
    """

    def __init__(self, max_depth: int, *, threshold: float, chances: PathChances) -> None:
        super().__init__(max_depth)
        self._threshold = threshold
        self._chances = chances

    @property
    def depth(self) -> int:
        """The deepest: levels end one by one."""
        return self._deepest

    def goes_on(self, builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]) -> bool:
        """See `DepthControl`."""
        return any(
            self._chances.of(builders, row, node) >= self._threshold
            for row, nodes in enumerate(frontier)
            for node in nodes
        )

    def observe(self, rows: Sequence[Reached]) -> None:
        """Nothing to learn beyond the map."""


class KLStop(DepthControl):
    """Stops where draft and target have lately diverged too far.

    The divergence of the two laws at the nodes that were accepted is known after a round; as a signal for how deep to
    draft next it is used in DSDE (Yang et al. 2025), which goes by its variance. Here it is its mean at each depth,
    and what follows from it: by the inequality of Bretagnolle and Huber (1979) two laws agree with probability
    1 - TV >= 1 - sqrt(1 - exp(-KL)). The depth is the largest at which the product of these bounds is at least the
    threshold. Depths that were not reached are taken to diverge as the deepest that was.

    Args:
        max_depth: the deepest tree.
        threshold: of the product.
        decay: weight of the past in the mean.
    """

    wants_divergences = True

    def __init__(self, max_depth: int, *, threshold: float, decay: float) -> None:
        super().__init__(max_depth)
        self._threshold, self._decay = threshold, decay
        self._mean: list[float] = []

    @property
    def depth(self) -> int:
        """See `DepthControl`."""
        if not self._mean:
            return self._deepest
        product, depth = 1.0, 0
        for level in range(self._deepest):
            mean = self._mean[min(level, len(self._mean) - 1)]
            product *= 1.0 - sqrt(max(0.0, 1.0 - exp(-mean)))
            if product < self._threshold:
                break
            depth += 1
        return max(1, depth)

    def observe(self, rows: Sequence[Reached]) -> None:
        """See `DepthControl`."""
        for row in rows:
            for level, value in enumerate(row.divergences[: self._deepest]):
                if level == len(self._mean):
                    self._mean.append(value)
                else:
                    self._mean[level] = self._decay * self._mean[level] + (1.0 - self._decay) * value


def make_depth_control(
    name: str, max_depth: int, options: Mapping[str, Any], chances: PathChances
) -> DepthControl | None:
    """The controller of that name; None for "cost", which `SizePolicy` is itself.

    Args:
        name: `TreeConfig.depth_control`.
        max_depth: the deepest tree.
        options: all that the controller has.
        chances: of nodes of the call's trees.
    """
    if name == "pid":
        return PIDControl(max_depth, **options)
    if name == "confidence":
        return ConfidenceStop(max_depth, **options, chances=chances)
    return KLStop(max_depth, **options) if name == "kl" else None


def divergence(target: Sequence[float], draft: Sequence[float]) -> float:
    """KL divergence of two laws over some tokens and the rest in one: at most that of the laws themselves.

    Args:
        target: probabilities of the tokens; their sum is at most 1.
        draft: likewise.
    """
    total = 0.0
    for p, q in zip(target, draft, strict=True):
        if p > 0.0:
            total += p * log(p / max(q, _LEAST))
    rest = max(0.0, 1.0 - sum(target))
    if rest > 0.0:
        total += rest * log(rest / max(1.0 - sum(draft), _LEAST))
    return max(0.0, total)
