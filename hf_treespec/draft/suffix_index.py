"""An index of a growing text over contexts of any length: a suffix automaton with counts.

The automaton (Blumer et al. 1985) has one state for all contexts that occur at the same places. It grows online: a
token adds a state and perhaps a copy of one, in amortised constant time. A state's transitions are the tokens that
followed its contexts; how often one did is the number of occurrences of the state that it leads to. A suffix link
leads to the longest context that occurs at more places, so the links from a match are its shorter matches.

Lengths are in tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hf_treespec.draft.ngram_index import Match, require_growth

__all__ = ["SuffixIndex"]

# Tokens at the end of the text by which a row that did not merely grow is noticed.
_WINDOW = 8


class _Followers(Mapping[int, int]):
    """How often each token followed the contexts of a state; the most recent follower is last."""

    __slots__ = ("_sizes", "_targets")

    def __init__(self, targets: dict[int, int], sizes: list[int]) -> None:
        self._targets = targets
        self._sizes = sizes

    def __getitem__(self, token: int) -> int:
        return self._sizes[self._targets[token]]

    def get(self, token: int, default: int = 0) -> int:  # type: ignore[override]
        """As of a dict, where what never followed counts 0."""
        target = self._targets.get(token)
        return default if target is None else self._sizes[target]

    def __iter__(self) -> Iterator[int]:
        return iter(self._targets)

    def __reversed__(self) -> Iterator[int]:
        return reversed(self._targets)

    def __len__(self) -> int:
        return len(self._targets)


class SuffixIndex:
    """Followers of every context of a text that grows at its end, without a bound on the length of contexts.

    Takes some 400 bytes a token. A token counts at the `max_updates` longest contexts that it follows, and a position
    is matched by the `max_matches` longest; more there are only in texts that repeat themselves many times over, whose
    long contexts leave nothing to the short ones.

    Args:
        max_updates: contexts whose counts one token raises.
        max_matches: contexts that a match tells.

    Attributes:
        spread: by token, how many different tokens it has followed; the most recent token is last.
    """

    __slots__ = (
        "_lengths",
        "_links",
        "_next",
        "_last",
        "_seen",
        "_sizes",
        "_tail",
        "max_matches",
        "max_updates",
        "spread",
    )

    def __init__(self, max_updates: int = 32, max_matches: int = 32) -> None:
        self.max_updates = max_updates
        self.max_matches = max_matches
        self.spread: dict[int, int] = {}
        # Per state: longest context, suffix link, occurrences, and by token the state that it leads to. State 0 is
        # the empty context.
        self._lengths = [0]
        self._links = [-1]
        self._sizes = [0]
        self._next: list[dict[int, int]] = [{}]
        self._last = 0
        self._seen = 0
        self._tail: list[int] = []

    def __len__(self) -> int:
        """Tokens read so far."""
        return self._seen

    @property
    def states(self) -> int:
        """States of the automaton: less than two a token."""
        return len(self._next)

    def update(self, tokens: Sequence[int]) -> None:
        """Read the tokens that were appended since the last call.

        Args:
            tokens: the whole text; its first `len(self)` tokens must be those of the last call.

        Raises:
            TreeSpecError: if the text shrank or its last known tokens changed.
        """
        seen = self._seen
        require_growth("a suffix index", tokens, seen, self._tail)
        before = tokens[seen - 1] if seen else None
        for token in tokens[seen:]:
            known = before is not None and token in self._next[self._next[0][before]]
            # Taking a token out first moves it to the end: the dict stays ordered by recency.
            self.spread[token] = self.spread.pop(token, 0) + (not known)
            self._add(token)
            before = token
        self._seen = len(tokens)
        self._tail = list(tokens[max(0, len(tokens) - _WINDOW) :])

    def _state(self, length: int, link: int, size: int, targets: dict[int, int]) -> int:
        self._lengths.append(length)
        self._links.append(link)
        self._sizes.append(size)
        self._next.append(targets)
        return len(self._next) - 1

    def _add(self, token: int) -> None:
        lengths, links, following = self._lengths, self._links, self._next
        new = self._state(lengths[self._last] + 1, 0, 1, {})
        # Contexts before the token, the longest first, that it has never followed.
        state = self._last
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = links[state]
        self._last = new
        if state < 0:
            return
        target = following[state][token]
        if lengths[target] != lengths[state] + 1:
            # The target stands for longer contexts too, which do not end here: they part.
            part = self._state(lengths[state] + 1, links[target], self._sizes[target], dict(following[target]))
            links[target] = part
            above = state
            while above >= 0 and following[above].get(token) == target:
                following[above][token] = part
                above = links[above]
            target = part
        links[new] = target
        self._count(state, token)

    def _count(self, state: int, token: int) -> None:
        """Count one more occurrence of the token after a context that knows it, and after all shorter ones."""
        following, links, sizes = self._next, self._links, self._sizes
        counted = -1
        for _ in range(self.max_updates):
            if state < 0:
                return
            target = following[state].pop(token)
            following[state][token] = target
            # Contexts of several states may lead to one.
            if target != counted:
                sizes[target] += 1
                counted = target
            state = links[state]

    def after(self, path: Sequence[int]) -> Iterator[Match]:
        """Contexts of the text followed by `path` that something has followed, the longest first.

        Args:
            path: tokens behind the text.

        Yields:
            At most `max_matches` matches. Of contexts with the same occurrences the longest is told.
        """
        following, links, lengths = self._next, self._links, self._lengths
        state, length = self._last, lengths[self._last]
        for token in path:
            while state >= 0 and token not in following[state]:
                state = links[state]
                length = lengths[state] if state >= 0 else 0
            if state < 0:
                state = 0
            else:
                state = following[state][token]
                length += 1
        told = 0
        while state > 0 and told < self.max_matches:
            if following[state]:
                yield Match(length, _Followers(following[state], self._sizes))
                told += 1
            state = links[state]
            length = lengths[state]
