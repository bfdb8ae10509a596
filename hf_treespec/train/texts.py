"""The target's own texts, which a draft is to learn: batches of prompts at several temperatures, written as they end.

A unit is a batch. Its texts depend on seed, prompts and settings alone, so that it does not matter which process
writes it, or whether a run was killed before it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_treespec.errors import TrainError
from hf_treespec.train.shards import ShardWriter, read_shards

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Text", "TextSettings", "read_texts", "write_texts"]

# Prompts are sorted by length among so many batches, so that little of a batch is padding.
_SORTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """How texts are made.

    Args:
        new_tokens: at most so many of each text.
        temperatures: taken in turn, a batch each; 0 is greedy.
        batch: prompts decoded together.
        seed: of the order of the prompts and of the draws.

    Raises:
        TrainError: for values that make no text.
    """

    new_tokens: int = 160
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    batch: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("new_tokens", "batch"):
            if getattr(self, name) < 1:
                raise TrainError(f"{name}={getattr(self, name)}: expected at least 1")
        if not self.temperatures or not all(0 <= t < math.inf for t in self.temperatures):
            raise TrainError(f"temperatures={self.temperatures}: expected one or more, each 0 (greedy) or above")


class Text(NamedTuple):
    """A prompt and what the target made of it.

    Attributes:
        prompt: its ids.
        new: ids of the continuation, with the end token if it came to one.
        temperature: that it was drawn at.
    """

    prompt: tuple[int, ...]
    new: tuple[int, ...]
    temperature: float


class _Unit(NamedTuple):
    number: int
    prompts: list[Sequence[int]]
    temperature: float

    @property
    def key(self) -> str:
        return f"{self.number:06d}"


def _units(prompts: Sequence[Sequence[int]], settings: TextSettings) -> Iterator[_Unit]:
    order = list(prompts)
    random.Random(settings.seed).shuffle(order)
    size, number = settings.batch, 0
    for start in range(0, len(order), size * _SORTED):
        near = sorted(order[start : start + size * _SORTED], key=len)
        for first in range(0, len(near), size):
            yield _Unit(number, near[first : first + size], settings.temperatures[number % len(settings.temperatures)])
            number += 1


def write_texts(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    settings: TextSettings,
    *,
    rank: int = 0,
    world: int = 1,
    tokens: int | None = None,
    report: Callable[[int], None] | None = None,
) -> None:
    """Write the texts of all prompts that are not in the folder yet.

    Args:
        model: the target, in evaluation mode.
        prompts: ids of each; none may be empty.
        folder: of the shards, one for each process; it exists.
        settings: how.
        rank: of this process.
        world: how many processes share the work.
        tokens: end when there are so many new tokens of all processes; None for all prompts. Only units before the
            first one that is not needed are written, so that a run with more tokens later goes on.
        report: called with the new tokens of each unit.

    Raises:
        TrainError: if a prompt is empty.
    """
    if any(not len(prompt) for prompt in prompts):
        raise TrainError("prompts: one of them has no tokens; leave it out, or let the tokenizer add its first token")
    done = read_shards(folder)
    written = sum(len(text["new"]) for record in done.values() for text in record["texts"])
    mean = written / max(1, sum(len(record["texts"]) for record in done.values()))
    with ShardWriter(folder, rank) as shard:
        for unit in _units(prompts, settings):
            if tokens is not None and written >= tokens:
                break
            if unit.key in done:
                continue
            if unit.number % world != rank:
                # What others write meanwhile is guessed from what this one has seen.
                written += int(mean * len(unit.prompts))
                continue
            texts = _texts(model, unit, settings)
            count = sum(len(text.new) for text in texts)
            mean = count / len(texts)
            shard.write({"key": unit.key, "temperature": unit.temperature, "texts": [_told(text) for text in texts]})
            written += count
            if report is not None:
                report(count)


def _told(text: Text) -> dict[str, Any]:
    return {"prompt": list(text.prompt), "new": list(text.new)}


def read_texts(folder: Path) -> list[Text]:
    """All finished texts, in the order of the units."""
    return [
        Text(tuple(text["prompt"]), tuple(text["new"]), record["temperature"])
        for record in read_shards(folder).values()
        for text in record["texts"]
    ]


def _texts(model: PreTrainedModel, unit: _Unit, settings: TextSettings) -> list[Text]:
    width = max(map(len, unit.prompts))
    ids = torch.zeros((len(unit.prompts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(unit.prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    greedy = unit.temperature == 0
    sampling: dict[str, Any] = {} if greedy else {"temperature": unit.temperature, "top_k": 0, "top_p": 1.0}
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode():
        torch.manual_seed(settings.seed * 1_000_003 + unit.number)
        out: Any = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=not greedy,
            max_new_tokens=settings.new_tokens,
            pad_token_id=0,
            **sampling,
        )
    ends = _end_ids(model)
    texts = []
    for prompt, row in zip(unit.prompts, out[:, width:].tolist(), strict=True):
        end = next((place for place, token in enumerate(row, start=1) if token in ends), len(row))
        texts.append(Text(tuple(prompt), tuple(row[:end]), unit.temperature))
    return texts


def _end_ids(model: PreTrainedModel) -> set[int]:
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)


def fingerprint(settings: TextSettings, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What has to be the same for two runs to share a folder."""
    return {**asdict(settings), "prompts": len(prompts)}
