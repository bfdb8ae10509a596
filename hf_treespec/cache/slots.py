"""Storage of keys or values that is written in place: dense, or in 8 bits with a scale for each token and head.

Everything is zero where nothing has been written, so that a kernel that reads a whole tile meets no NaN.

Shapes: B rows, H heads, C slots there is room for, Q new tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["BUFFERS", "STORAGES", "DenseSlots", "Place", "QuantizedSlots", "Scratch", "Slots", "make_slots"]

STORAGES = ("dense", "int8", "fp8")
BUFFERS = ("shared", "per_layer")
# The largest code of each format.
_TOP = {"int8": 127.0, "fp8": 448.0}
_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class Place(NamedTuple):
    """Slots of storage: Q of every row from `start` on, or the pairs of `rows` and `slots` one by one.

    Attributes:
        start: first slot, if it is the same in all rows.
        rows: int64 `[n]`.
        slots: int64 `[n]`.
    """

    start: int | None = None
    rows: Tensor | None = None
    slots: Tensor | None = None


class Scratch:
    """One buffer for all layers of a cache, in which the states of a layer are dequantised for its attention.

    What a layer is given is good until the next layer of the same kind asks. Copies and pickles begin empty.
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous tensor of any content."""
        key, size = (name, device, dtype), 1
        for extent in shape:
            size *= extent
        flat = self._flat.get(key)
        if flat is None or flat.numel() < size:
            # Half as much again: it grows with the text.
            self._flat.pop(key, None)
            with torch.inference_mode(False):
                flat = self._flat[key] = torch.empty(size + size // 2, dtype=dtype, device=device)
        return flat[:size].view(shape)

    @property
    def bytes(self) -> int:
        """What the buffers take."""
        return sum(flat.numel() * flat.element_size() for flat in self._flat.values())

    def __getstate__(self) -> dict[str, Any]:
        return {"_flat": {}}


class Slots:
    """Keys or values of one layer.

    Attributes:
        parts: tensors `[B, H, C, ...]` by name; what they hold of a token moves together.
        dtype: of the states as attention reads them.
        head_size: D.
        heads: H.
    """

    # Parts that can be made again from the others.
    derived: tuple[str, ...] = ()

    def __init__(self, like: Tensor) -> None:
        self.parts: dict[str, Tensor] = {}
        self.dtype = like.dtype
        self.heads, self.head_size = int(like.shape[1]), int(like.shape[-1])

    @property
    def capacity(self) -> int:
        """C."""
        return int(next(iter(self.parts.values())).shape[2])

    @property
    def device(self) -> torch.device:
        """Where the parts are."""
        return next(iter(self.parts.values())).device

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        """New states `[B, H, Q, D]` as what the parts hold of them."""
        raise NotImplementedError

    def read(self, first: int, end: int, *, fresh: bool = False) -> Tensor:
        """States `[B, H, end - first, D]` of some slots.

        Args:
            first: the first slot.
            end: behind the last one.
            fresh: not in a buffer that others will use.
        """
        raise NotImplementedError

    def write(self, states: Tensor, place: Place) -> None:
        """Put states `[B, H, Q, D]` into Q slots of every row."""
        for name, new in self.encode(states).items():
            part, new = _bits(self.parts[name]), _bits(new)
            if place.start is not None:
                part.narrow(2, place.start, new.shape[2]).copy_(new)
            else:
                part[place.rows, :, place.slots] = new.transpose(1, 2).flatten(0, 1)

    def move(self, rows: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy slots to other slots of their rows; all are read before any is written.

        Args:
            rows: int64 `[n]`.
            sources: int64 `[n]`.
            targets: int64 `[n]`.
        """
        for part in map(_bits, self.parts.values()):
            part[rows, :, targets] = part[rows, :, sources]

    def move_alike(self, sources: Tensor, first: int) -> None:
        """Copy slots of all rows to those from `first` on; all are read before any is written.

        Args:
            sources: int64 `[n]`.
            first: the first of the n slots that are written.
        """
        for part in map(_bits, self.parts.values()):
            part.narrow(2, first, len(sources)).copy_(part.index_select(2, sources))

    def clear(self, place: Place, count: int = 0) -> None:
        """Make slots zero; `count` of them behind `place.start`."""
        for part in map(_bits, self.parts.values()):
            if place.start is not None:
                part.narrow(2, place.start, count).zero_()
            else:
                part[place.rows, :, place.slots] = 0

    def grow(self, capacity: int) -> None:
        """Have room for `capacity` slots; those there were are copied."""
        for name, part in self.parts.items():
            self.parts[name] = _zeros(part, capacity)
            _bits(self.parts[name]).narrow(2, 0, part.shape[2]).copy_(_bits(part))

    def adopt(self, parts: Mapping[str, Tensor]) -> None:
        """Take these tensors, of `held`, as all there is."""
        with torch.inference_mode(False):
            for name, part in parts.items():
                self.parts[name] = part.clone()

    def held(self, end: int) -> dict[str, Tensor]:
        """The parts up to a slot, without those that are derived."""
        return {name: part[:, :, :end] for name, part in self.parts.items() if name not in self.derived}

    def each_row(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every part by `change(part)`, which picks or repeats rows."""
        for name, part in self.parts.items():
            with torch.inference_mode(False):
                self.parts[name] = change(_bits(part)).view(part.dtype)

    def bytes_of(self, slots: int) -> int:
        """What so many slots of every row take, without parts that are derived."""
        kept = [part for name, part in self.parts.items() if name not in self.derived]
        return sum(_slot_bytes(part) for part in kept) * slots

    def derived_bytes(self) -> int:
        """What derived parts take."""
        return sum(_slot_bytes(self.parts[name]) for name in self.derived if name in self.parts) * self.capacity


class DenseSlots(Slots):
    """States as they are: part `states`, `[B, H, C, D]`."""

    def __init__(self, like: Tensor) -> None:
        super().__init__(like)
        self.parts["states"] = _zeros(like, 0)

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        """See `Slots.encode`."""
        return {"states": states}

    def read(self, first: int, end: int, *, fresh: bool = False) -> Tensor:
        """See `Slots.read`; a view, which later tokens are written behind."""
        return self.parts["states"].narrow(2, first, end - first)


class QuantizedSlots(Slots):
    """States in 8 bits: a state is its code times the scale of its token and head, rounded to `dtype`.

    Parts: `codes`, int8 or float8_e4m3fn `[B, H, C, D]`, and `scales`, bfloat16 `[B, H, C]`: the largest magnitude of
    the token's head over 127 or 448, rounded up to 16 bits, so that no code is clipped.

    Args:
        like: states `[B, H, Q, D]` of the shape and dtype that will come.
        kind: "int8" or "fp8".
        name: "keys" or "values".
        scratch: where states are dequantised; None to keep a dense copy of all, part `copy`, which only what is new
            is added to.
    """

    def __init__(self, like: Tensor, kind: str, name: str, scratch: Scratch | None) -> None:
        super().__init__(like)
        self._kind, self._name, self._scratch = kind, name, scratch
        self.parts["codes"] = _zeros(like, 0, _CODES[kind])
        self.parts["scales"] = _zeros(like[..., 0] if like.shape[-1] else like.sum(-1), 0, torch.bfloat16)
        if scratch is None:
            self.parts["copy"] = _zeros(like, 0)
            self.derived = ("copy",)

    def __getstate__(self) -> dict[str, Any]:
        # Plain pickles know no float8.
        return {**self.__dict__, "parts": {name: _bits(part) for name, part in self.parts.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.parts["codes"] = self.parts["codes"].view(_CODES[self._kind])

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        """See `Slots.encode`."""
        codes, scales = quantize(states, self._kind)
        parts = {"codes": codes, "scales": scales}
        if self._scratch is None:
            parts["copy"] = dequantize(
                codes, scales, torch.empty(states.shape, dtype=self.dtype, device=states.device)
            )
        return parts

    def adopt(self, parts: Mapping[str, Tensor]) -> None:
        """See `Slots.adopt`."""
        super().adopt(parts)
        if self._scratch is None:
            codes = self.parts["codes"]
            copy = torch.empty(codes.shape, dtype=self.dtype, device=codes.device)
            self.parts["copy"] = dequantize(codes, self.parts["scales"], copy)

    def read(self, first: int, end: int, *, fresh: bool = False) -> Tensor:
        """See `Slots.read`."""
        if self._scratch is None:
            copy = self.parts["copy"].narrow(2, first, end - first)
            return copy.clone() if fresh else copy
        codes, scales = (self.parts[name].narrow(2, first, end - first) for name in ("codes", "scales"))
        shape = tuple(codes.shape)
        if fresh:
            return dequantize(codes, scales, torch.empty(shape, dtype=self.dtype, device=codes.device))
        return dequantize(codes, scales, self._scratch.tensor(self._name, shape, self.dtype, codes.device))


def quantize(states: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Codes `[..., D]` and bfloat16 scales `[...]` of states `[..., D]`, for each vector by itself.

    Args:
        states: of any floating dtype.
        kind: "int8" (round to nearest, symmetric) or "fp8" (e4m3).
    """
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    if wide.shape[-1]:
        scales = _rounded_up(wide.abs().amax(-1).float() / _TOP[kind])
    else:
        scales = wide.new_zeros(wide.shape[:-1], dtype=torch.bfloat16)
    # A vector of zeros has no scale. One with a NaN keeps it in its scale.
    steps = torch.where(scales > 0, scales, 1.0)[..., None].to(wide.dtype)
    codes = (wide / steps).clamp(-_TOP[kind], _TOP[kind])
    if kind == "int8":
        codes = codes.round()
    return codes.float().to(_CODES[kind]), scales


def dequantize(codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """Write `codes * scales` into `out`, which is contiguous, and return it."""
    if codes.dtype == torch.float8_e4m3fn and codes.device.type == "cpu":
        # There, a cast of e4m3 takes several times as long as a table.
        torch.index_select(_e4m3(out.dtype), 0, _bits(codes).reshape(-1).int(), out=out.view(-1))
    else:
        out.copy_(codes)
    return out.mul_(scales[..., None])


@lru_cache(maxsize=8)
def _e4m3(dtype: torch.dtype) -> Tensor:
    """The values of all 256 codes."""
    with torch.inference_mode(False):
        return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)


def make_slots(storage: str, like: Tensor, name: str, scratch: Scratch | None) -> Slots:
    """Empty storage of one of `STORAGES`; see `QuantizedSlots` for the arguments."""
    return DenseSlots(like) if storage == "dense" else QuantizedSlots(like, storage, name, scratch)


def _rounded_up(values: Tensor) -> Tensor:
    """Magnitudes as bfloat16, none smaller than it was."""
    values = values.float().contiguous()
    up = ((values.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), up, values).to(torch.bfloat16)


def _bits(tensor: Tensor) -> Tensor:
    """The same storage in a type that can be indexed."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _zeros(like: Tensor, slots: int, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros of the shape of `like` but for the number of its slots."""
    shape = (*like.shape[:2], slots, *like.shape[3:])
    # No inference tensor: the cache may outlive an inference mode, and is written to afterwards.
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype or like.dtype, device=like.device)


def _slot_bytes(part: Tensor) -> int:
    """What one slot of all rows takes."""
    count = part.shape[0] * part.shape[1]
    for extent in part.shape[3:]:
        count *= extent
    return count * part.element_size()
