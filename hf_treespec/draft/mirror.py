"""The text of a row in the tokens of another tokenizer, kept up to date as the row grows.

Only a window at the end of the text is encoded anew as it grows, behind a few tokens of context; what lies before the
window is settled for good. So the cost of a round does not depend on the length of the text. A tokenizer that would
write settled text differently in the light of what follows costs acceptance, never correctness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_treespec.draft.base import DraftRow
from hf_treespec.draft.codec import REPLACEMENT, TextCodec

__all__ = ["Mirror"]

# Tokens in front of a piece of text that decide how it is encoded or decoded.
_CONTEXT = 4
# Tokens at the end of the text that may still change.
_WINDOW = 8
# Tokens of the window's front that are tried as the end of what is settled.
_TRIES = 8


class Mirror:
    """One row's text for the draft.

    Args:
        index: batch row.
        source: codec of the tokens read.
        target: codec of the tokens written.
        specials: special ids of `source` that have a counterpart in `target`; the others are left out.

    `row` is what a draft model reads: its tokens, of which the first `row.settled` never change.
    """

    def __init__(self, index: int, source: TextCodec, target: TextCodec, specials: Mapping[int, int]) -> None:
        self.row = DraftRow(index=index, tokens=target.opening, settled=0)
        self.read = 0
        self._source = source
        self._target = target
        self._specials = specials
        # Decoding: source tokens from here on are decoded together, and this much of their text has been taken.
        self._from = 0
        self._taken = ""
        # Encoding: target tokens from here on are those of the window.
        self._cut = len(self.row.tokens)
        self._window = ""

    def update(self, tokens: Sequence[int]) -> None:
        """Take in what `tokens` holds more than last time."""
        start = self.read
        for place in range(self.read, len(tokens)):
            if tokens[place] in self._source.specials:
                self._extend(tokens[start:place], tokens[self._from : place])
                self._close(self._specials.get(tokens[place]))
                start = self._from = place + 1
        self._extend(tokens[start:], tokens[self._from :])
        self.read = len(tokens)
        self._forget(tokens)
        self.row.settled = max(0, min(self._cut, len(self.row.tokens) - 1))

    def _extend(self, fresh: Sequence[int], run: Sequence[int]) -> None:
        if not fresh:
            return
        # Bytes of a character that is not complete wait for the rest of it.
        text = self._source.decode([run])[0].rstrip(REPLACEMENT)
        # One missing byte may make a decoder give up whole characters in front of it, which it gave before.
        if len(text) > len(self._taken):
            self._window += text[len(self._taken) :]
            self._taken = text
        context = self._target.run_before(self.row.tokens, self._cut, _CONTEXT)
        before = self._target.decode([context])[0]
        ids = self._target.encode_after(context, before, [self._window])[0] if self._window else []
        if ids:
            self.row.tokens[self._cut :] = ids
        self._settle(context, before)

    def _settle(self, context: list[int], before: str) -> None:
        """Move the window's front up to a place where tokens and text both end."""
        ids = self.row.tokens[self._cut :]
        if len(ids) <= 2 * _WINDOW:
            return
        for count in range(len(ids) - _WINDOW, max(0, len(ids) - _WINDOW - _TRIES), -1):
            whole = self._target.decode([[*context, *ids[:count]]])[0]
            text = whole[len(before) :]
            if whole.startswith(before) and self._window.startswith(text):
                self._cut += count
                self._window = self._window[len(text) :]
                return
        if len(ids) > 4 * _WINDOW:
            # The tokenizer does not give the text back as it was: take its tokens for it.
            self._close(None)

    def _close(self, special: int | None) -> None:
        """Settle everything so far; a special token ends the run of text."""
        # The bos in front of the text may have been written already.
        if special is not None and [special] != self.row.tokens:
            self.row.tokens.append(special)
        self._cut = len(self.row.tokens)
        self._window = self._taken = ""

    def _forget(self, tokens: Sequence[int]) -> None:
        """Decode less the next time, from a place where the text is whole."""
        if len(tokens) - self._from <= 4 * _CONTEXT:
            return
        later = len(tokens) - _CONTEXT
        text = self._source.decode([tokens[later:]])[0]
        if text and REPLACEMENT not in text:
            self._from, self._taken = later, text
