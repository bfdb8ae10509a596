"""Between tokens and text: what a tokenizer does in mid-text, and which special tokens two of them share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["REPLACEMENT", "TextCodec", "shared_specials"]

# What decoders write for bytes that are no whole character (yet).
REPLACEMENT = "\ufffd"
# Texts that rarely merge with what follows them.
_NEUTRAL = ("\n", ".")


class TextCodec:
    """Encodes and decodes pieces out of the middle of a text.

    Args:
        tokenizer: of transformers; it is not changed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self.specials: dict[int, str] = {
            token_id: str(token) for token_id, token in self._tokenizer.added_tokens_decoder.items() if token.special
        }
        for token, token_id in zip(self._tokenizer.all_special_tokens, self._tokenizer.all_special_ids, strict=True):
            self.specials[token_id] = token
        self.unknown: int | None = self._tokenizer.unk_token_id
        self._neutral: list[list[int]] | None = None
        self._widths: dict[int, int] = {}

    @property
    def opening(self) -> list[int]:
        """The bos id, if the tokenizer puts one in front of every text."""
        bos = self._tokenizer.bos_token_id
        ids = self._tokenizer("", verbose=False)["input_ids"]
        return [bos] if bos is not None and list(ids[:1]) == [bos] else []

    def id_of(self, token: str) -> int | None:
        """The id of a special token by its text, or None."""
        return next((token_id for token_id, text in self.specials.items() if text == token), None)

    def role(self, name: str) -> int | None:
        """The id of "bos" or "eos", or None."""
        token_id: int | None = getattr(self._tokenizer, f"{name}_token_id")
        return token_id

    def decode(self, pieces: Sequence[Sequence[int]]) -> list[str]:
        """Text of each list of ids, special tokens included, spaces as they are."""
        return [
            self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if ids
            else ""
            for ids in pieces
        ]

    def width(self, token: int) -> int:
        """Characters of one token, give or take the space in front of a word."""
        width = self._widths.get(token)
        if width is None:
            width = self._widths[token] = len(self.decode([[token]])[0])
        return width

    def run_before(self, tokens: Sequence[int], end: int, count: int) -> list[int]:
        """Up to `count` tokens before index `end`, none of them special: the context of what comes there."""
        start = end
        while start > max(0, end - count) and tokens[start - 1] not in self.specials:
            start -= 1
        return list(tokens[start:end])

    def split_partial(self, context: Sequence[int]) -> tuple[list[int], str, list[int]]:
        """Split off the tokens at the end that are bytes of a character still to be completed.

        Returns:
            The tokens before, their text, and the tokens split off.
        """
        for cut in range(len(context), -1, -1):
            text = self.decode([context[:cut]])[0]
            if not text.endswith(REPLACEMENT):
                return list(context[:cut]), text, list(context[cut:])
        return [], "", list(context)

    def encode_after(self, context: Sequence[int], context_text: str, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of each text where it follows the context.

        Encoding context and text together is tried first: it gets spaces and merges right. If the context comes out
        in other tokens than it has (the text merges into it, or the context was never how the tokenizer would write
        it), the text is encoded behind a neutral one, else alone.

        Args:
            context: tokens in front; may be empty at the start of a text.
            context_text: their text.
            texts: continuations.

        Returns:
            Ids per text.
        """
        found: list[list[int] | None] = [None] * len(texts)
        for before, ids_before in [(context_text, list(context)), *self._neutral_contexts()]:
            left = [place for place, ids in enumerate(found) if ids is None]
            if not left:
                break
            encoded = self._encode([before + texts[place] for place in left])
            for place, ids in zip(left, encoded, strict=True):
                if ids[: len(ids_before)] == ids_before:
                    found[place] = ids[len(ids_before) :]
        return [self._encode([text])[0] if ids is None else ids for text, ids in zip(texts, found, strict=True)]

    def _neutral_contexts(self) -> list[tuple[str, list[int]]]:
        if self._neutral is None:
            self._neutral = self._encode(list(_NEUTRAL))
        return list(zip(_NEUTRAL, self._neutral, strict=True))

    def _encode(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def shared_specials(source: TextCodec, target: TextCodec) -> dict[int, int]:
    """Special ids of `source` and their counterparts: the same text, else the same role (bos, eos)."""
    shared: dict[int, int] = {}
    for token_id, text in source.specials.items():
        same = target.id_of(text)
        if same is not None:
            shared[token_id] = same
    for name in ("eos", "bos"):
        ours, theirs = source.role(name), target.role(name)
        if ours is not None and theirs is not None:
            shared.setdefault(ours, theirs)
    return shared
