"""The measurements as a tidy CSV: one row per method, prompt and repeat. Plots and summaries are made from these."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TextIO, get_type_hints

from hf_treespec.cli.faults import UsageFault, one_line

__all__ = ["COLUMNS", "Row", "RowWriter", "first_difference", "read_rows", "tokens_per_round"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One timed call of `generate`. An empty cell, None here, is something that does not apply or was not measured.

    Args:
        set: prompt set.
        prompt: index in the set.
        repeat: index of the repetition.
        method: name of the method.
        order: place of the method among those of its round, which rotates.
        seconds: host wall clock of the call, the device synchronised before and after.
        prompt_tokens: tokens of the prompt.
        new_tokens: tokens of the output behind the prompt.
        target_forwards: forwards of the target model, the first one included.
        tokens_per_round: see `tokens_per_round`.
        draft_seconds: proposing, as the method itself measured it.
        text_equal: whether the new tokens are those of the reference method.
        first_difference: index of the first new token that differs.
        reference: method whose text this one must equal.
        config: the TreeConfig as JSON.
        temperature: 0 is greedy.
        max_new_tokens: length limit of the call.
        seed: of this call.
        model: target, as typed.
        draft_model: draft, as typed.
        dtype: of the target.
        device: of the target.
        hardware: name of the chip.
        threads: of torch on the CPU.
        torch: version.
        transformers: version.
        hf_treespec: version.
    """

    set: str
    prompt: int
    repeat: int
    method: str
    order: int
    seconds: float
    prompt_tokens: int
    new_tokens: int
    target_forwards: int
    tokens_per_round: float | None
    draft_seconds: float | None
    text_equal: bool | None
    first_difference: int | None
    reference: str | None
    config: str | None
    temperature: float
    max_new_tokens: int
    seed: int
    model: str
    draft_model: str | None
    dtype: str
    device: str
    hardware: str
    threads: int
    torch: str
    transformers: str
    hf_treespec: str


COLUMNS = tuple(field.name for field in fields(Row))
_TYPES = get_type_hints(Row)


def tokens_per_round(new_tokens: int, target_forwards: int) -> float | None:
    """Tokens per target forward after the first: (new_tokens - 1) / (target_forwards - 1).

    The first forward reads the prompt and yields one token in plain decoding and with trees, so plain decoding gives
    exactly 1. Prompt lookup and assisted generation of transformers verify a first draft in that forward too; what it
    accepts counts for them, since only its one token is taken off. None if there was no second forward.
    """
    rounds = target_forwards - 1
    return (new_tokens - 1) / rounds if rounds > 0 else None


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs; the length of the shorter one if it is a prefix; None if equal."""
    for index, (ours, theirs) in enumerate(zip(tokens, reference, strict=False)):
        if ours != theirs:
            return index
    return None if len(tokens) == len(reference) else min(len(tokens), len(reference))


class RowWriter:
    """Writes rows as they come, so that an interrupted run keeps what it measured.

    Args:
        file: an open text file, written from its start.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._writer = csv.writer(file, lineterminator="\n")
        self._writer.writerow(COLUMNS)

    def write(self, rows: Iterable[Row]) -> None:
        """Append rows and flush."""
        for row in rows:
            self._writer.writerow([_cell(getattr(row, name)) for name in COLUMNS])
        self._file.flush()


def read_rows(path: Path) -> list[Row]:
    """The rows of a file that `RowWriter` wrote.

    Raises:
        UsageFault: if it is no such file.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(_parse(csv.DictReader(file)))
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise UsageFault(str(path), f"no CSV of treespec bench: {type(error).__name__}: {one_line(error)}") from error


def _parse(reader: csv.DictReader[str]) -> Iterator[Row]:
    for cells in reader:
        yield Row(**{name: _value(name, cells[name]) for name in COLUMNS})


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    # repr of a float is the shortest text that reads back as the same float.
    return repr(value) if isinstance(value, float) else str(value)


def _value(name: str, cell: str | None) -> Any:
    kind = _TYPES[name]
    if cell is None:
        raise ValueError(f"column {name} is cut off")
    options = getattr(kind, "__args__", (kind,))
    if cell == "" and type(None) in options:
        return None
    base = options[0]
    if base is bool:
        if cell not in ("true", "false"):
            raise ValueError(f"column {name} holds {cell!r}, expected true or false")
        return cell == "true"
    return base(cell)
