"""What rows look at: texts, whole outputs, caches, streamers, criteria."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from conformance.contract.core import Row, Side
from hf_treespec import _compat
from tiny import WIDTH, prompt, reference, stock

WANTED: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def text(**call: Any) -> Callable[[Side], Any]:
    """The returned ids of a call."""
    return lambda side: side.generate(**call)


def everything(**call: Any) -> Callable[[Side], Any]:
    """Ids, scores, logits and cache of a call."""
    return lambda side: whole(side.generate(**{**WANTED, **call}), call)


def whole(output: Any, call: dict[str, Any]) -> dict[str, Any]:
    """All that plain decoding returns, as values that can be compared."""
    mask = call.get("mask")
    if mask is None and "ids" not in call:
        mask = prompt(call.get("family", "llama"), call.get("batch", 1))[1]
        mask = mask.repeat_interleave(call.get("num_return_sequences", 1), 0)
    return {
        "class": type(output).__name__,
        "fields": sorted(output.keys()),
        "text": output.sequences,
        "scores": output.scores,
        "logits": output.logits,
        "cache": cache_view(_compat.cache_from_outputs(output), mask),
    }


def cache_view(cache: Any, mask: Tensor | None = None) -> dict[str, Any]:
    """Class, lengths and contents of a cache; slots of padding are zeroed."""
    layers = []
    for layer in cache.layers:
        keys, values = layer.keys, layer.values
        if mask is not None:
            length = int(layer.get_seq_length())
            real = torch.cat([mask, mask.new_ones(len(mask), max(0, length - mask.shape[1]))], 1)[:, :length]
            real = real[:, length - keys.shape[2] :, None].bool()[:, None]
            keys, values = keys.where(real, 0.0), values.where(real, 0.0)
        layers.append((type(layer).__name__, int(layer.get_seq_length()), keys, values))
    return {"class": type(cache).__name__, "layers": layers, "defined": _compat.is_user_defined(cache)}


def greedy(family: str = "llama", batch: int = 1, new: int = 14) -> Tensor:
    """The text of plain greedy decoding."""
    ids, mask = prompt(family, batch)
    return reference(stock(family), ids, mask, max_new_tokens=new)


def token(index: int, family: str = "llama", row: int = 0, batch: int = 1) -> int:
    """The `index`-th new token of the greedy text."""
    return int(greedy(family, batch)[row, WIDTH + index])


class Puts(BaseStreamer):
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.puts: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.puts.append((tuple(value.shape), value.tolist()))

    def end(self) -> None:
        self.puts.append("end")


class Asked(StoppingCriteria):
    """A criterion that ends rows by a rule of the text and keeps what it was asked."""

    def __init__(self, rule: Callable[[Tensor], Any]) -> None:
        self.rule = rule
        self.asked: list[Any] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        self.asked.append((input_ids.clone(), None if scores is None else tuple(s.clone() for s in scores)))
        return self.rule(input_ids)


class Banning(LogitsProcessor):
    """A processor with a state: each call bans another residue class. It keeps the lengths that it was called with."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.lengths.append(input_ids.shape[1])
        banned = torch.arange(scores.shape[1]) % 4 == len(self.lengths) % 4
        return scores.masked_fill(banned, -float("inf"))


def section(number: str, *rows: tuple[Any, ...] | Row) -> list[Row]:
    """Rows of one section from (name, call) or (name, call, note)."""
    return [row if isinstance(row, Row) else Row(number, *row) for row in rows]
