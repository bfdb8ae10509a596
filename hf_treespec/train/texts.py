"""The target's own texts, which a draft is to learn: batches of prompts at several temperatures, written as they end.

A unit is a batch. Its texts depend on seed, prompts and settings alone, so that it does not matter which process
writes it, or whether a run was killed before it. Who asks for so many tokens gets the first units that have them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor

from hf_treespec import _compat
from hf_treespec.api.kv_probe import kv_cache_fault
from hf_treespec.cache import TreeCache
from hf_treespec.errors import TrainError
from hf_treespec.train.shards import BrokenRunError, ShardWriter, read_shards

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Text", "TextSettings", "count_units", "read_texts", "write_texts"]

# Prompts are sorted by length among so many batches, so that little of a batch is padding.
_SORTED = 8
# What a generation config may ask for that makes no single text of each prompt.
_SINGLE: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """How texts are made.

    Args:
        new_tokens: at most so many of each text.
        temperatures: taken in turn, a batch each; 0 is greedy.
        batch: prompts decoded together.
        passes: over the prompts; each shuffles them anew, so that a prompt comes to another temperature.
        seed: of the order of the prompts and of the draws.

    Raises:
        TrainError: for values that make no text.
    """

    new_tokens: int = 160
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    batch: int = 32
    passes: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("new_tokens", "batch", "passes"):
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
        return _key(self.number)


def _key(number: int) -> str:
    return f"{number:06d}"


def _units(prompts: Sequence[Sequence[int]], settings: TextSettings) -> Iterator[_Unit]:
    size, number = settings.batch, 0
    for turn in range(settings.passes):
        order = list(prompts)
        random.Random(f"{settings.seed}.{turn}" if turn else settings.seed).shuffle(order)
        for start in range(0, len(order), size * _SORTED):
            near = sorted(order[start : start + size * _SORTED], key=len)
            for first in range(0, len(near), size):
                temperature = settings.temperatures[number % len(settings.temperatures)]
                yield _Unit(number, near[first : first + size], temperature)
                number += 1


def count_units(prompts: Sequence[Sequence[int]], settings: TextSettings) -> int:
    """Units of all prompts."""
    return sum(1 for _ in _units(prompts, settings))


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

    They are what `generate` gives with the model's own generation config, penalties included, but for temperature and
    what else cuts or bends a law for sampling (`top_k`, `top_p`, `min_p` and so on), and without beams.

    Args:
        model: the target, in evaluation mode.
        prompts: ids of each; none may be empty.
        folder: of the shards, one for each process, which all of them see; it exists.
        settings: how.
        rank: of this process.
        world: how many processes share the work.
        tokens: end when the units so far have so many new tokens; None for all prompts. Several processes may write a
            few units more. A run with more tokens later goes on.
        report: called with the new tokens of all processes so far, after each unit.

    Raises:
        TrainError: if a prompt is empty.
    """
    if any(not len(prompt) for prompt in prompts):
        raise TrainError("prompts: one of them has no tokens; leave it out, or let the tokenizer add its first token")
    counts = _counts(read_shards(folder))
    with ShardWriter(folder, rank) as shard:
        for unit in _units(prompts, settings):
            if unit.number % world != rank or unit.key in counts:
                continue
            if world > 1:
                counts |= _counts(read_shards(folder))
            # What others have yet to write can only make it more.
            if tokens is not None and sum(count for key, count in counts.items() if key < unit.key) >= tokens:
                break
            if unit.key in counts:
                continue
            texts = _texts(model, unit, settings)
            shard.write({"key": unit.key, "temperature": unit.temperature, "texts": [_told(text) for text in texts]})
            counts[unit.key] = sum(len(text.new) for text in texts)
            if report is not None:
                report(sum(counts.values()))


def _counts(records: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    return {key: sum(len(text["new"]) for text in record["texts"]) for key, record in records.items()}


def _told(text: Text) -> dict[str, Any]:
    return {"prompt": list(text.prompt), "new": list(text.new)}


def read_texts(folder: Path, units: int | None = None, tokens: int | None = None) -> list[Text]:
    """The texts of the first units, in their order.

    Args:
        folder: of the shards.
        units: how many at most, see `count_units`; None for those that are there.
        tokens: only the first units that have so many new tokens together.

    Raises:
        BrokenRunError: if one of those is missing.
    """
    records = read_shards(folder)
    found: list[Text] = []
    count = 0
    units = len(records) if units is None else units
    for number in range(units):
        if tokens is not None and count >= tokens:
            break
        record = records.get(_key(number))
        if record is None:
            raise BrokenRunError(f"{folder}: unit {number} of {units} is missing; let the texts be written again")
        made = [Text(tuple(text["prompt"]), tuple(text["new"]), record["temperature"]) for text in record["texts"]]
        count += sum(len(text.new) for text in made)
        found += made
    return found


def _texts(model: PreTrainedModel, unit: _Unit, settings: TextSettings) -> list[Text]:
    width = max(map(len, unit.prompts))
    ids = torch.zeros((len(unit.prompts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(unit.prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    draws = []
    if unit.temperature > 0:
        draws.append(_Draw(unit.temperature, settings.seed * 1_000_003 + unit.number))
    generating: Any = model
    with torch.inference_mode():
        out = generating.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=False,
            max_new_tokens=settings.new_tokens,
            pad_token_id=0,
            logits_processor=draws,
            **_SINGLE,
            **_cache(model),
        )
    ends = _end_ids(model)
    texts = []
    for prompt, row in zip(unit.prompts, out[:, width:].tolist(), strict=True):
        end = next((place for place, token in enumerate(row, start=1) if token in ends), len(row))
        texts.append(Text(tuple(prompt), tuple(row[:end]), unit.temperature))
    return texts


def _cache(model: PreTrainedModel) -> dict[str, Any]:
    """A cache that is not copied whole for each token, where the model can use one and asks for no other kind."""
    asked = getattr(model.generation_config, "cache_implementation", None)
    if asked not in (None, "dynamic") or kv_cache_fault(model, "dense") is not None:
        return {}
    return {_compat.cache_kwarg(model): TreeCache(model.config)}


class _Draw(LogitsProcessor):
    """Leaves one token a row, drawn at a temperature: behind it the arg-max is the draw.

    By one number a row and the sum of the law. `torch.multinomial` makes a number for each id, which on a CPU takes as
    long as the model does.
    """

    def __init__(self, temperature: float, seed: int) -> None:
        self._temperature = temperature
        self._dice = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        law_BV = (scores.float() / self._temperature).softmax(-1)
        sums_BV = law_BV.cumsum(-1)
        marks_B1 = torch.rand((len(scores), 1), generator=self._dice).to(scores.device)
        # The first sum above the mark belongs to a token that is not impossible.
        drawn_B1 = torch.searchsorted(sums_BV, marks_B1 * sums_BV[:, -1:], right=True)
        return torch.full_like(scores, -math.inf).scatter_(-1, drawn_B1.clamp(max=scores.shape[-1] - 1), 0.0)


def _end_ids(model: PreTrainedModel) -> set[int]:
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
