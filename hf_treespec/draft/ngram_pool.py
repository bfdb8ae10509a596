"""The n-gram pool of lookahead decoding: by their first token, the latest n-grams that begin with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Continuation", "NgramPool"]


class Continuation(NamedTuple):
    """A token that the pool has seen after the end of a context.

    Attributes:
        token: its id.
        matched: leading tokens of the n-gram that the context ends with; of several n-grams the most.
        rank: 0 for the latest one of those that match so many.
        guessed: whether none of the n-grams that match so many is of a text.
    """

    token: int
    matched: int
    rank: int
    guessed: bool


class NgramPool:
    """Holds at most `candidates` n-grams of each first token; a new one takes the place of the oldest.

    An n-gram that comes again is as good as new.

    Args:
        ngram: N, tokens of the longest n-gram; at least 2.
        candidates: G.
    """

    def __init__(self, ngram: int, candidates: int) -> None:
        self.ngram = ngram
        self.candidates = candidates
        # First token -> the others -> whether it is only guessed; the latest is last.
        self._tails: dict[int, dict[tuple[int, ...], bool]] = {}

    def add(self, gram: Sequence[int], *, guessed: bool) -> None:
        """Take in an n-gram of 2 to N tokens.

        Args:
            gram: its tokens.
            guessed: whether it stands in no text.
        """
        known = self._tails.setdefault(gram[0], {})
        tail = tuple(gram[1:])
        known[tail] = known.pop(tail, True) and guessed
        if len(known) > self.candidates:
            del known[next(iter(known))]

    def of(self, token: int) -> list[tuple[int, ...]]:
        """What follows a token, the latest first."""
        return list(reversed(self._tails.get(token, {})))

    def after(self, context: Sequence[int]) -> list[Continuation]:
        """What may follow a context: by how much of it the n-gram begins with, then the latest first.

        Args:
            context: any number of tokens; the last N - 1 count.
        """
        found: dict[int, Continuation] = {}
        for matched in range(min(self.ngram - 1, len(context)), 0, -1):
            known = self._tails.get(context[-matched])
            if known is None:
                continue
            rest = tuple(context[len(context) - matched + 1 :])
            rank = 0
            for tail in reversed(known):
                if len(tail) < matched or tail[: matched - 1] != rest:
                    continue
                token, guessed = tail[matched - 1], known[tail]
                if token not in found:
                    found[token] = Continuation(token, matched, rank, guessed)
                    rank += 1
                elif found[token].matched == matched and not guessed:
                    found[token] = found[token]._replace(guessed=False)
        return list(found.values())
