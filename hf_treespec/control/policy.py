"""The size policy: a tree of the configured size, or none while trees do not pay.

The decision for a round looks at earlier rounds only, never at the tokens it is about, so it cannot bias the text
(and under coupled verification the text does not depend on it anyway).
"""

from __future__ import annotations

from hf_treespec.control.estimates import RoundEstimates
from hf_treespec.tree import TreeLimits

__all__ = ["SizePolicy"]

_TRIAL_ROUNDS = 8  # tree rounds before the first judgement, enough for the mean to settle
_PROBE_ROUNDS = 4  # tree rounds that test whether drafting pays again
_PLAIN_SAMPLES = 2  # plain rounds timed when a judgement lacks them
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 128  # plain rounds between probes; doubles while probes fail
_CLEARLY_GOOD = 3.0  # tokens a round from which a missing plain timing is not worth two plain rounds


class SizePolicy:
    """Chooses the limits of each round.

    Args:
        limits: the configured size.
        fallback: whether plain decoding may take over ("auto") or not ("off").
    """

    def __init__(self, limits: TreeLimits, *, fallback: str) -> None:
        self._limits = limits
        self._plain = TreeLimits(max_nodes=0, max_depth=limits.max_depth, max_children=limits.max_children)
        self._active = fallback == "auto" and limits.max_nodes > 0
        self.estimates = RoundEstimates()
        self._trial = _TRIAL_ROUNDS
        self._pause = 0
        self._next_pause = _FIRST_PAUSE

    @property
    def paused(self) -> bool:
        """Whether the next round is plain by decision of the fallback."""
        return self._pause > 0

    def limits(self) -> TreeLimits:
        """Limits of the next round."""
        return self._plain if self.paused else self._limits

    def observe(self, *, drafted: bool, seconds: float, tokens: float) -> None:
        """Learn from a round; see `RoundEstimates.observe`."""
        self.estimates.observe(drafted=drafted, seconds=seconds, tokens=tokens)
        if not self._active:
            return
        if self._pause:
            self._pause -= 1
            if not self._pause and self._trial <= 0:
                self._trial = _PROBE_ROUNDS
            return
        self._trial -= drafted
        if self._trial > 0:
            return
        missing = _PLAIN_SAMPLES - self.estimates.plain_seconds.count
        if missing > 0 and self.estimates.tree_tokens.value < _CLEARLY_GOOD:
            # Time plain rounds first; the trial stays at 1 so that one more tree round leads back here.
            self._pause, self._trial = missing, 1
            return
        gain = self.estimates.gain
        if gain is not None and gain < 1.0:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, _LONGEST_PAUSE)
            self._trial = 0
        else:
            self._next_pause = _FIRST_PAUSE
            self._trial = 1
