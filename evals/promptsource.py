"""Prompts of an eval: from a .jsonl file or a set of `datasets`, raw or through the chat template, one at a time.

    prompts: {path: evals/prompts.jsonl, field: prompt, limit: 100}
    prompts: {dataset: openai/gsm8k, name: main, split: test, field: question, chat: true, streaming: true}

A field that holds a list of ids is taken as it is and needs no tokenizer; one that holds a list of texts (the turns of
a dialogue) gives its first.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import expected
from expected import SettingsError

__all__ = ["Prompt", "PromptSource"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Args:
        index: place in the set.
        ids: token ids.
        copy: earlier prompts of the set with the same ids: texts of each are drawn anew.
    """

    index: int
    ids: tuple[int, ...]
    copy: int = 0

    @property
    def digest(self) -> str:
        """Tells prompts apart, and copies of one."""
        told = (self.ids, self.copy) if self.copy else self.ids
        return hashlib.sha256(repr(told).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """Where prompts come from.

    Args:
        path: a .jsonl or .jsonl.gz file; relative to the working directory.
        dataset: name or folder for `datasets.load_dataset`.
        name: of its configuration.
        split: of it.
        streaming: do not download the whole set first.
        field: of a row.
        chat: through the chat template, as a user's message.
        limit: the first so many; 0 for all.
        max_tokens: of a prompt; longer ones are cut at the end.
    """

    path: str = ""
    dataset: str = ""
    name: str = ""
    split: str = "test"
    streaming: bool = False
    field: str = "prompt"
    chat: bool = False
    limit: int = 0
    max_tokens: int = 256

    def __post_init__(self) -> None:
        for name in ("path", "dataset", "name", "split", "field"):
            expected.text(f"prompts: {name}", getattr(self, name))
        for name in ("streaming", "chat"):
            expected.flag(f"prompts: {name}", getattr(self, name))
        expected.whole("prompts: limit", self.limit, 0)
        expected.whole("prompts: max_tokens", self.max_tokens, 1)
        if bool(self.path) == bool(self.dataset):
            raise SettingsError("prompts: expected either path or dataset")

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> PromptSource:
        """From settings.

        Raises:
            SettingsError: for unknown or bad fields.
        """
        expected.mapping("prompts", told, [f.name for f in fields(cls)])
        return cls(**told)

    def digest(self) -> str:
        """Of the file, or of what names the set.

        Raises:
            SettingsError: for a file that cannot be read.
        """
        if self.path:
            try:
                return hashlib.sha256(Path(self.path).read_bytes()).hexdigest() if Path(self.path).is_file() else ""
            except OSError as error:
                raise SettingsError(f"prompts: path: {self.path}: {error.strerror or error}") from error
        return f"{self.dataset}/{self.name}/{self.split}"

    def prompts(self, tokenizer: Any) -> Iterator[Prompt]:
        """One by one, in the order of the set.

        Args:
            tokenizer: of the target; None will do for prompts of ids.

        Raises:
            SettingsError: for whatever cannot be read.
        """
        rows = self._file() if self.path else self._dataset()
        seen: Counter[tuple[int, ...]] = Counter()
        for index, row in enumerate(islice(rows, self.limit or None)):
            ids = self._encode(tokenizer, row, index)[: self.max_tokens]
            if not ids:
                raise SettingsError(f"prompts: row {index} has no tokens")
            yield Prompt(index, tuple(ids), seen[tuple(ids)])
            seen[tuple(ids)] += 1

    def _file(self) -> Iterator[Mapping[str, Any]]:
        path = Path(self.path)
        opener = gzip.open if path.suffix == ".gz" else open
        try:
            with opener(path, "rt", encoding="utf-8-sig") as lines:
                yield from (json.loads(line) for line in lines if line.strip())
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise SettingsError(f"prompts: {path}: {error}") from error

    def _dataset(self) -> Iterator[Mapping[str, Any]]:
        try:
            datasets = importlib.import_module("datasets")
        except ImportError as error:
            raise SettingsError(
                "prompts: dataset needs the datasets package: pip install hf-treespec[evals]"
            ) from error
        try:
            yield from datasets.load_dataset(
                self.dataset, self.name or None, split=self.split, streaming=self.streaming
            )  # fmt: skip
        except Exception as error:
            # Whatever builds or streams the set may raise errors of its own.
            raise SettingsError(
                f"prompts: dataset {self.dataset!r}, name {self.name!r}, split {self.split!r}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _encode(self, tokenizer: Any, row: Mapping[str, Any], index: int) -> list[int]:
        if not isinstance(row, Mapping):
            raise SettingsError(f"prompts: row {index} is {row!r}, expected a mapping with a field {self.field!r}")
        value = row.get(self.field)
        if isinstance(value, list) and value and all(type(one) is int for one in value):
            return list(value)
        if isinstance(value, list) and value:
            value = value[0]
        if not isinstance(value, str):
            raise SettingsError(f"prompts: row {index}: field {self.field!r} holds {value!r}, expected text or ids")
        if tokenizer is None:
            raise SettingsError("prompts: texts need a tokenizer, and the model has none")
        if not self.chat:
            return list(tokenizer(value)["input_ids"])
        message = [{"role": "user", "content": value}]
        try:
            found = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        except Exception as error:
            # No template, or one that does not take the text; which error it is depends on the template.
            raise SettingsError(f"prompts: chat: row {index}: {type(error).__name__}: {error}") from error
        return list(found["input_ids"])
