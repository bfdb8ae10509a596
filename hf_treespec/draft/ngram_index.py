"""An index of a growing text: what followed each context, kept up to date token by token.

Lengths are in tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from hf_treespec.errors import TreeSpecError

__all__ = ["Match", "NgramIndex", "require_growth"]


class _Context:
    """A context that has been seen, and what followed it.

    Args:
        place: position of its first follower.
        token: that follower.

    Attributes:
        counts: how often each token followed; the most recent follower is last.
        total: sum of `counts`.
        longer: by the token before this context, the context longer by one; filled from the second visit on.
        only: `place` while the context has been seen once, then -1.
    """

    __slots__ = ("counts", "longer", "only", "total")

    def __init__(self, place: int, token: int) -> None:
        self.counts = {token: 1}
        self.total = 1
        self.longer: dict[int, _Context] | None = None
        self.only = place


class Match(NamedTuple):
    """Followers of one context.

    Args:
        length: of the context, in tokens.
        counts: how often each token followed; the most recent follower is last. Not to be written to.
    """

    length: int
    counts: Mapping[int, int]


def require_growth(index: str, tokens: Sequence[int], seen: int, tail: list[int]) -> None:
    """See that a text has only been appended to.

    Args:
        index: what reads it.
        tokens: the whole text.
        seen: tokens of it that were read before.
        tail: the last of these. They are enough to notice a row that was cut, refilled or mixed up, at a cost
            independent of L.

    Raises:
        TreeSpecError: if the text shrank or its last known tokens changed.
    """
    if list(tokens[max(0, seen - len(tail)) : seen]) != tail:
        raise TreeSpecError(
            f"internal error: {index} has read {seen} tokens ending in {tail}, but now the row "
            f"has {len(tokens)} tokens that do not begin with them; rows may only be appended to"
        )


class NgramIndex:
    """Followers of every context of a text that grows at its end.

    A trie of contexts, read backwards from the follower. Adding a token visits at most `max_match` contexts,
    whatever the length of the text, and nothing is ever scanned again. A context that has been seen once keeps its
    place only, and what lies before is read from the text: most contexts are of that kind, and a chain of longer
    ones below each would be `max_match` objects per token.

    Args:
        max_match: longest context, in tokens.

    Attributes:
        spread: by token, how many different tokens it has followed; the most recent token is last.
    """

    __slots__ = ("_roots", "_seen", "_tail", "_text", "max_match", "spread")

    def __init__(self, max_match: int) -> None:
        self.max_match = max_match
        self.spread: dict[int, int] = {}
        # contexts of length 1
        self._roots: dict[int, _Context] = {}
        self._text: Sequence[int] = ()
        self._seen = 0
        self._tail: list[int] = []

    def __len__(self) -> int:
        """Tokens read so far."""
        return self._seen

    def update(self, tokens: Sequence[int]) -> None:
        """Read the tokens that were appended since the last call, in O(max_match) each.

        Args:
            tokens: the whole text; its first `len(self)` tokens must be those of the last call. It is kept by
                reference.

        Raises:
            TreeSpecError: if the text shrank or its last known tokens changed.
        """
        seen = self._seen
        require_growth("an n-gram index", tokens, seen, self._tail)
        self._text = tokens
        for place in range(seen, len(tokens)):
            self._add(place, tokens[place])
        self._seen = len(tokens)
        self._tail = list(tokens[max(0, len(tokens) - self.max_match) :])

    def _add(self, place: int, token: int) -> None:
        """Count the token at `place` as a follower of every context before it."""
        text = self._text
        level: dict[int, _Context] = self._roots
        first = place == 0 or text[place - 1] not in level or token not in level[text[place - 1]].counts
        # Taking a token out first moves it to the end: the dict stays ordered by recency.
        self.spread[token] = self.spread.pop(token, 0) + first
        for start in range(place - 1, max(place - 1 - self.max_match, -1), -1):
            context = level.get(text[start])
            if context is None:
                level[text[start]] = _Context(place, token)
                return
            if context.longer is None:
                # The second visit: from here on the place of the first one is kept by a longer context.
                context.longer = {}
                before = context.only - (place - start) - 1
                if before >= 0 and place - start < self.max_match:
                    context.longer[text[before]] = _Context(context.only, text[context.only])
                context.only = -1
            context.counts[token] = context.counts.pop(token, 0) + 1
            context.total += 1
            level = context.longer

    def after(self, path: Sequence[int]) -> Iterable[Match]:
        """Matches of the text followed by `path`, the longest first; see `match`."""
        return reversed(self.match(chain(reversed(path), reversed(self._text))))

    def match(self, backwards: Iterable[int]) -> list[Match]:
        """Contexts of a position that have been seen, each with other occurrences than the one before it.

        Args:
            backwards: the tokens before the position, nearest first; read only as far as they match.

        Returns:
            Matches by rising length, at most `max_match`; of contexts with the same occurrences only the longest.
        """
        found: list[Match] = []
        level: dict[int, _Context] | None = self._roots
        counts: dict[int, int] = {}
        length, total, only = 0, 0, -1
        for token in islice(backwards, self.max_match):
            if level is None:
                # Seen once: compare with the text before that one place.
                before = only - length - 1
                if before < 0 or self._text[before] != token:
                    break
            else:
                context = level.get(token)
                if context is None:
                    break
                if length and context.total != total:
                    found.append(Match(length, counts))
                counts, total, level, only = context.counts, context.total, context.longer, context.only
            length += 1
        if length:
            found.append(Match(length, counts))
        return found
