"""Gumbel noise attached to absolute positions: the coupling between target, draft and plain decoding.

The noise of (seed, stream of the row, position) is one stream of a counter-based generator, with the token id as the
counter. So it is the same whenever, wherever and in whatever batch shape it is asked for, on every device with
float64. The generator is SplitMix64 (Steele, Lea and Flood 2014), whose n-th output is a mix of key + n * gamma.

Sampling with it: argmax(log p + G) follows p if G is i.i.d. standard Gumbel (the Gumbel-max trick).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import log

import torch
from torch import Tensor

__all__ = ["GumbelNoise", "RoundNoise", "text_streams"]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix(value: int) -> int:
    """SplitMix64's finaliser on one 64-bit integer."""
    value = ((value ^ (value >> 30)) * _MIX1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX2) & _MASK
    return value ^ (value >> 31)


def _key(*parts: int) -> int:
    key = 0
    for part in parts:
        key = _mix((key + (part & _MASK) + _GAMMA) & _MASK)
    return key


def text_streams(prompts: Sequence[Sequence[int]]) -> list[int]:
    """One stream of noise per row: by the row's prompt, and by how many rows before it have the same prompt.

    So a row's text depends on neither its place in the batch nor its neighbours nor its padding, while copies of one
    prompt (`num_return_sequences`) differ, by their order. So do rows that show the same ids, or none, for other
    reasons: embeddings alone, or the decoder prompts of an encoder-decoder.

    Args:
        prompts: real prompt tokens of each row.

    Returns:
        A 64-bit key per row.
    """
    seen: Counter[int] = Counter()
    streams = []
    for prompt in prompts:
        key = _key(*prompt)
        streams.append(_key(key, seen[key]))
        seen[key] += 1
    return streams


def _shift_xor_(bits: Tensor, shift: int, scratch: Tensor) -> Tensor:
    # int64 shifts are arithmetic: the copies of the sign bit are masked off.
    torch.bitwise_right_shift(bits, shift, out=scratch)
    scratch.bitwise_and_((1 << (64 - shift)) - 1)
    return bits.bitwise_xor_(scratch)


class _Lanes:
    """Random numbers of one stream: lane i is the i-th output of the generator.

    Args:
        count: lanes.
        device: where they are made.
    """

    def __init__(self, count: int, device: torch.device | str) -> None:
        self.count = count
        self.device = torch.device(device)
        self.dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self._counters = torch.arange(1, count + 1, device=self.device) * _signed(_GAMMA)

    def uniform(self, key: int) -> Tensor:
        """In (0, 1), from 52 random bits each; 23 where there is no float64."""
        bits = self._counters + _signed(key)
        scratch = torch.empty_like(bits)
        _shift_xor_(bits, 30, scratch).mul_(_signed(_MIX1))
        _shift_xor_(bits, 27, scratch).mul_(_signed(_MIX2))
        _shift_xor_(bits, 31, scratch)
        # 52 bits and a half: the largest value still differs from 1 in float64, so that no log is infinite.
        bits.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
        if self.dtype == torch.float64:
            return bits.double().add_(0.5).mul_(2.0**-52)
        return bits.bitwise_right_shift_(29).float().add_(0.5).mul_(2.0**-23)

    def gumbel(self, key: int) -> Tensor:
        """Standard Gumbel."""
        return self.uniform(key).log_().neg_().log_().neg_()


class GumbelNoise:
    """Standard Gumbel noise keyed by (seed, stream of the row, position).

    Args:
        seed: integer in [0, 2**63).
        vocab_size: V, the number of lanes.
        device: where the noise is made.
        streams: key of each row, see `text_streams`; None takes the row's index.

    Positions count real tokens of the row from 0, padding not included. Values are float64 from 52 random bits each: a
    24-bit grid biases rare tokens (total variation about 5e-4 at 50,000 tokens). MPS has no float64 and gets just
    that, float32 from 23 bits.
    """

    def __init__(
        self,
        seed: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        streams: Sequence[int] | None = None,
    ) -> None:
        self.seed = seed
        self._streams = streams
        self.vocab_size = vocab_size
        self._lanes = _Lanes(vocab_size, device)
        self.device = self._lanes.device
        self.dtype = self._lanes.dtype
        self._kept: dict[tuple[int, int], Tensor] = {}

    def at(self, row: int, position: int) -> Tensor:
        """Noise `[V]` for the token at `position` of `row`; kept until `forget` passes it. Do not write to it."""
        place = (row, position)
        noise = self._kept.get(place)
        if noise is None:
            noise = self._kept[place] = self._lanes.gumbel(_key(self.seed, self.stream(row), position))
        return noise

    def of(self, row: int, position: int, tokens: Sequence[int]) -> list[float]:
        """Noise of single tokens, made on the host: that of `at` up to the rounding of a logarithm."""
        key = _key(self.seed, self.stream(row), position)
        bits = (_mix((key + (token + 1) * _GAMMA) & _MASK) >> 12 for token in tokens)
        return [-log(-log((value + 0.5) * 2.0**-52)) for value in bits]

    def stream(self, row: int) -> int:
        """Key of the row's stream."""
        return row if self._streams is None else self._streams[row]

    def forget(self, row: int, position: int) -> None:
        """Drop what is kept of `row` before `position`."""
        for place in [p for p in self._kept if p[0] == row and p[1] < position]:
            del self._kept[place]


_DRAFT, _COIN, _LAST = 1, 2, 3


class RoundNoise:
    """Independent random numbers of verification by independent draws, none of which is used twice.

    Keyed by (seed, stream of the row, position of the root, purpose, node, draw): rounds of a row begin at different
    positions. So a row's text depends on neither its place in the batch nor its neighbours.

    Args:
        noise: gives seed, streams, vocabulary and device; its own numbers are others.
    """

    def __init__(self, noise: GumbelNoise) -> None:
        self._noise = noise
        self.dtype = noise.dtype
        self._lanes = _Lanes(noise.vocab_size, noise.device)
        self._coins = _Lanes(64, noise.device)

    def _key(self, row: int, position: int, *parts: int) -> int:
        return _key(self._noise.seed, self._noise.stream(row), position, *parts)

    def of_child(self, row: int, position: int, node: int, draw: int) -> Tensor:
        """Gumbel noise `[V]` for a draw among the children of `node`; `position` is that of the root."""
        return self._lanes.gumbel(self._key(row, position, _DRAFT, node, draw))

    def of_last(self, row: int, position: int) -> Tensor:
        """Gumbel noise `[V]` for the token behind the last accepted node."""
        return self._lanes.gumbel(self._key(row, position, _LAST))

    def coins(self, row: int, position: int, count: int) -> Tensor:
        """Uniform numbers `[count]`, one for each node; the first ones do not depend on `count`."""
        if count > self._coins.count:
            self._coins = _Lanes(2 * count, self._noise.device)
        return self._coins.uniform(self._key(row, position, _COIN))[:count]
