"""The text of a call while it grows: the only mutable object of the engine besides the caches.

Shapes: B rows, L text length with prompt padding, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.draft import DraftRow

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

__all__ = ["GrowingText", "StopRules"]

# Criteria that judge a row by that row alone, so that rows need not advance in step.
_ROWWISE = (_compat.StopStringCriteria, _compat.MaxTimeCriteria)


@dataclass(frozen=True, slots=True)
class StopRules:
    """The stopping criteria of a call, sorted by how they can be asked.

    Args:
        max_length: text length at which every row ends, or None.
        eos: ids that end a row.
        has_eos: whether ended rows are padded: plain decoding does so if any criterion has an `eos_token_id`.
        others: criteria called with tensors, once per emitted token, in order.
        rowwise: whether all `others` judge each row by itself.
    """

    max_length: int | None
    eos: frozenset[int]
    has_eos: bool
    others: tuple[Any, ...]
    rowwise: bool

    @classmethod
    def of(cls, criteria: Sequence[Any]) -> StopRules:
        """Sort the list that `generate` prepared."""
        lengths = [c.max_length for c in criteria if type(c) is _compat.MaxLengthCriteria]
        eos = [_compat.eos_token_ids(c) for c in criteria if type(c) is _compat.EosTokenCriteria]
        others = tuple(c for c in criteria if type(c) not in (_compat.MaxLengthCriteria, _compat.EosTokenCriteria))
        return cls(
            max_length=min(lengths, default=None),
            eos=frozenset().union(*eos),
            has_eos=any(hasattr(c, "eos_token_id") for c in criteria),
            others=others,
            rowwise=all(type(c) in _ROWWISE for c in others),
        )


class GrowingText:
    """Implements `TextState`: extends rows token by token, consults the criteria, feeds the streamer.

    Args:
        input_ids: int64 `[B, P]`, the prompt with its padding.
        real_tokens: per row how many real tokens the prompt and a passed-in cache hold: the next token's position.
        prompt_tokens: per row the known real prompt ids.
        rules: stopping criteria.
        pad: token emitted by ended rows, if `rules.has_eos`.
        in_step: whether rows always have equal length.
        streamer: gets `[B]` tokens per step; rows must be in step.
        keep_scores: collect processed scores.
        keep_logits: collect raw logits.
    """

    def __init__(
        self,
        input_ids: Tensor,
        *,
        real_tokens: Sequence[int],
        prompt_tokens: Sequence[list[int]],
        rules: StopRules,
        pad: int | None,
        in_step: bool,
        streamer: BaseStreamer | None = None,
        keep_scores: bool = False,
        keep_logits: bool = False,
    ) -> None:
        batch, self.prompt_width = input_ids.shape
        self.rules = rules
        self.finished = [False] * batch
        self.draft_rows = [
            DraftRow(index=row, tokens=list(known), offset=real - len(known))
            for row, (known, real) in enumerate(zip(prompt_tokens, real_tokens, strict=True))
        ]
        self._real = list(real_tokens)
        self._pad = 0 if pad is None else pad
        self._in_step = in_step
        self._streamer = streamer
        self._new: list[list[int]] = [[] for _ in range(batch)]
        self._scores: list[list[Tensor]] | None = [[] for _ in range(batch)] if keep_scores else None
        self._logits: list[list[Tensor]] | None = [[] for _ in range(batch)] if keep_logits else None
        self._steps: tuple[Tensor, ...] | None = () if keep_scores else None
        self._buffer = input_ids.long()
        self._written = [0] * batch

    # -- TextState --

    def length(self, row: int) -> int:
        """Text length of the row, prompt padding included."""
        return self.prompt_width + len(self._new[row])

    def position(self, row: int) -> int:
        """Position of the row's next token, padding not counted."""
        return self._real[row] + len(self._new[row])

    def forced_token(self, row: int) -> int | None:
        """Padding for ended rows, if plain decoding pads them."""
        return self._pad if self.finished[row] and self.rules.has_eos else None

    def text(self, length: int) -> Tensor:
        """int64 `[B, length]`; rows that are shorter are filled with padding."""
        if length > self._buffer.shape[1]:
            # Doubling: the buffer is copied a logarithmic number of times.
            wider = self._buffer.new_full((len(self._new), max(length + 64, 2 * self._buffer.shape[1])), self._pad)
            wider[:, : self._buffer.shape[1]] = self._buffer
            self._buffer = wider
        for row, new in enumerate(self._new):
            done = self._written[row]
            fresh = new[done : max(done, length - self.prompt_width)]
            if fresh:
                start = self.prompt_width + done
                self._buffer[row, start : start + len(fresh)] = torch.tensor(fresh, device=self._buffer.device)
                self._written[row] = done + len(fresh)
        return self._buffer[:, :length].contiguous()

    def emit(self, tokens: dict[int, int], scores: dict[int, Tensor], logits: dict[int, Tensor]) -> set[int]:
        """Append one token to each given row; see `TextState.emit`."""
        for row, token in tokens.items():
            self._new[row].append(token)
            self.draft_rows[row].tokens.append(token)
            if self._scores is not None:
                self._scores[row].append(scores[row])
            if self._logits is not None:
                self._logits[row].append(logits[row].to(torch.float32, copy=True))
        if self._steps is not None and self._in_step and self.rules.others:
            self._steps += (torch.stack([scores[row] for row in range(len(self._new))]),)
        padded = {row for row in tokens if self.finished[row]}
        for row in self._ended(tokens):
            self.finished[row] = True
        if self._streamer is not None:
            _compat.stream(self._streamer, torch.tensor([new[-1] for new in self._new]))
        if self._in_step:
            # Ended rows go on with the others: with padding, or without an eos criterion with text, as in plain.
            return set() if all(self.finished) else set(tokens)
        return {row for row in tokens if not self.finished[row]} | padded

    def _ended(self, tokens: dict[int, int]) -> set[int]:
        rules = self.rules
        ended = {
            row
            for row, token in tokens.items()
            if token in rules.eos or (rules.max_length is not None and self.length(row) >= rules.max_length)
        }
        if not rules.others:
            return ended
        if self._in_step:
            text = self.text(self.length(next(iter(tokens))))
            for criterion in rules.others:
                verdict = criterion(text, self._steps)
                flags = torch.as_tensor(verdict).expand(len(self._new)).tolist()
                ended |= {row for row in tokens if flags[row]}
            return ended
        for row in tokens:
            if not self.finished[row]:
                text = self.text(self.length(row))[row : row + 1]
                verdicts = [bool(criterion(text, None).all()) for criterion in rules.others]
                if any(verdicts):
                    ended.add(row)
        return ended

    # -- results --

    @property
    def device(self) -> torch.device:
        """Where the text lies and tokens are chosen: the device of the call's `input_ids`."""
        return self._buffer.device

    @property
    def new_lengths(self) -> list[int]:
        """Tokens emitted per row, padding of ended rows included."""
        return [len(new) for new in self._new]

    def room(self, row: int) -> int | None:
        """Tokens the row may still emit, or None without a limit."""
        return None if self.rules.max_length is None else self.rules.max_length - self.length(row)

    def sequences(self) -> Tensor:
        """int64 `[B, L]` of all rows, ended rows padded on the right."""
        width = self.prompt_width + max(self.new_lengths)
        return self.text(width).clone()

    def steps(self, kind: str) -> tuple[Tensor, ...] | None:
        """Per emitted token `[B, V]` of "scores" or "logits", or None if they were not kept."""
        kept = self._scores if kind == "scores" else self._logits
        if kept is None:
            return None
        return tuple(torch.stack(step) for step in zip(*kept, strict=True))
