"""The stem of a round: what is read before the paths, once for each row, if that is sooner than once for each path.

The stem is what no walk can reject: the accepted tokens that an order-bound state has yet to read, and the root. So a
state that has read it needs never go back behind it. A chain below the root is left to the paths though they may all
share it: a state goes back to before or after a forward, not into its middle, so that one rejected node of the chain
would have the root and all that was pending read once more. A tree of one path, the usual one that begins with a
chain, has nothing to share.
"""

from __future__ import annotations

__all__ = ["StemChoice"]

# Reading so many tokens again is never cheap, whatever the times say: on a GPU they are those of the launches only.
_LONGEST_PENDING = 16
_DECAY = 0.9


class StemChoice:
    """Chooses between one more forward and more tokens in the forward of the paths, by the time both take.

    It lays a line through the seconds of the latest forwards by the tokens that they read.

    Attributes:
        forced: the answer for trees of any shape; None to choose.
    """

    def __init__(self) -> None:
        self.forced: bool | None = None
        self._sums = [0.0] * 5

    def pays(self, *, paths: int, rows: int, pending: int = 0) -> bool:
        """Whether the stem is to be read in a forward of its own.

        Args:
            paths: of the trees of all rows.
            rows: of the batch.
            pending: tokens of each row that are read before its root.
        """
        if self.forced is not None:
            return self.forced
        if pending >= _LONGEST_PENDING:
            return True
        # Every path of a row but one is spared the stem. And what is pending had been read and was lost: likely it
        # would be lost, and read, once more.
        return self._worth_a_forward((paths - rows) * (pending + 1) + rows * pending)

    def add(self, tokens: int, seconds: float) -> None:
        """Take in one forward, of either kind."""
        sample = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        self._sums = [_DECAY * past + new for past, new in zip(self._sums, sample, strict=True)]

    def _worth_a_forward(self, tokens: int) -> bool:
        """Whether that many tokens take longer than one more forward does besides its tokens."""
        n, x, xx, y, xy = self._sums
        spread = n * xx - x * x
        if spread <= n * n:
            return False
        slope = (n * xy - x * y) / spread
        fixed = (y - slope * x) / n
        return slope * tokens > max(fixed, 0.0)
