"""Prompt sets: JSON lines in the shapes that the usual evaluation sets have, or a set of the `datasets` package.

| first row has | such as | prompt | goes |
|---|---|---|---|
| `prompt` | HumanEval | the text | as it is |
| `question` | GSM8K | the text | through the chat template |
| `turns` | MT-bench | the first turn | through the chat template |

A set of `datasets` names its field, and the same rule applies: `prompt` as it is, anything else as chat.
"""

from __future__ import annotations

import gzip
import importlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hf_treespec.cli.faults import UsageFault, one_line

__all__ = ["PromptSet", "load_set"]

_FIELDS = ("prompt", "question", "turns")
_EXPECTED = "expected NAME=FILE (.jsonl or .jsonl.gz) or NAME=hf:DATASET:CONFIG:SPLIT:FIELD"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts under one name.

    Args:
        name: what tables and plots call it.
        prompts: the texts, in the order of the source.
        chat: whether they are a user's messages rather than texts to continue.
    """

    name: str
    prompts: tuple[str, ...]
    chat: bool


def load_set(spec: str, limit: int | None = None) -> PromptSet:
    """Read the set of one `--set` option.

    Args:
        spec: the option as typed.
        limit: only the first so many prompts; None for all.

    Raises:
        UsageFault: naming the option, for anything that cannot be read.
    """
    argument = f"--set {spec}"
    name, equals, source = spec.partition("=")
    if not (name and equals and source):
        raise UsageFault(argument, _EXPECTED)
    if source.startswith("hf:"):
        field, rows = _rows_of_dataset(argument, source)
    else:
        field, rows = _rows_of_file(argument, Path(source).expanduser())
    prompts = tuple(_prompt(argument, number, row, field) for number, row in islice(rows, limit))
    if not prompts:
        raise UsageFault(argument, "no prompts in it")
    return PromptSet(name=name, prompts=prompts, chat=field != "prompt")


NumberedRows = Iterator[tuple[int, Mapping[str, Any]]]


def _rows_of_file(argument: str, path: Path) -> tuple[str, NumberedRows]:
    if not path.is_file():
        raise UsageFault(argument, f"{path}: no such file")
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise UsageFault(argument, f"{path.name}: unknown format; {_EXPECTED}")
    rows = _json_lines(argument, path)
    first = next(rows, None)
    if first is None:
        raise UsageFault(argument, "no prompts in it")
    field = next((name for name in _FIELDS if name in first[1]), None)
    if field is None:
        raise UsageFault(
            argument, f"its rows have {', '.join(sorted(first[1])) or 'nothing'}; expected one of {', '.join(_FIELDS)}"
        )
    return field, _chain(first, rows)


def _chain(first: tuple[int, Mapping[str, Any]], rest: NumberedRows) -> NumberedRows:
    yield first
    yield from rest


def _json_lines(argument: str, path: Path) -> NumberedRows:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise UsageFault(argument, f"line {number} holds no JSON object")
                yield number, row
    except json.JSONDecodeError as error:
        raise UsageFault(argument, f"line {number} is no JSON: {error}") from error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UsageFault(argument, f"cannot be read: {one_line(error)}") from error


def _rows_of_dataset(argument: str, source: str) -> tuple[str, NumberedRows]:
    parts = source.split(":")
    if len(parts) != 5 or not all(parts[i] for i in (1, 3, 4)):
        raise UsageFault(argument, f"{_EXPECTED}; CONFIG may be empty")
    _, dataset, config, split, field = parts
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise UsageFault(argument, "needs the datasets package: pip install -e '.[evals]' in the checkout") from error
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(dataset, config or None, split=split)
    except Exception as error:
        # The package has an error tree of its own and passes on those of its loaders and of the network.
        raise UsageFault(argument, f"datasets cannot load it: {error}") from error
    return field, enumerate(rows, start=1)


def _prompt(argument: str, number: int, row: Mapping[str, Any], field: str) -> str:
    value = row.get(field)
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, str) or not value.strip():
        raise UsageFault(argument, f"row {number}: field {field!r} holds {value!r}, expected text")
    return value
