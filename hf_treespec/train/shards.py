"""Results as lines: a file per process, appended unit by unit, so that a killed run goes on where it was.

A unit is written as one line when it is done. A line that a kill has cut has no newline; it is dropped, and its unit
done again. Who reads takes each unit once, whatever the number of processes was when it was written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hf_treespec.errors import TrainError

__all__ = ["BrokenRunError", "OtherRunError", "ShardWriter", "claim", "read_shards"]

_RUN = "run.json"


class OtherRunError(TrainError):
    """The folder holds results of a run with other settings."""


class BrokenRunError(TrainError):
    """The folder holds what no run has written, or the disk has changed."""


def claim(
    folder: Path, fingerprint: str, settings: Mapping[str, Any], *, fresh: bool, free: Collection[str] = ()
) -> None:
    """Make the folder this run's, or see that it already is. For one process only.

    Args:
        folder: of the results.
        fingerprint: of the settings.
        settings: written beside it for people, and to say which of them differs.
        fresh: drop what is there.
        free: settings that the fingerprint leaves out; "prompts.limit" is `limit` inside of `prompts`.

    Raises:
        OtherRunError: if it holds another run, or is to be emptied while one writes to it.
        BrokenRunError: if it is no folder, or what it says of its run cannot be read.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BrokenRunError(f"{folder}: no folder for results: {error}") from error
    if fresh:
        try:
            for old in folder.glob("shard-*.jsonl"):
                lock = _locked(old)
                old.unlink()
                lock.release()
            (folder / _RUN).unlink(missing_ok=True)
        except OSError as error:
            raise BrokenRunError(f"{folder} cannot be emptied: {error}; pass another --out") from error
    run = folder / _RUN
    if run.exists():
        try:
            told = json.loads(run.read_text())
            found, before = told["fingerprint"], told.get("settings")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise BrokenRunError(
                f"{run} cannot be read ({type(error).__name__}: {error}); pass --fresh or another --out"
            ) from error
        if found != fingerprint:
            now = json.loads(json.dumps(settings, default=list))
            raise OtherRunError(f"{folder} holds {_other(before, now, free)}; pass --fresh or another --out")
    elif next(folder.glob("shard-*.jsonl"), None) is not None:
        raise OtherRunError(f"{folder} holds results of an unknown run; pass --fresh or another --out")
    else:
        part = run.with_suffix(".part")
        part.write_text(json.dumps({"fingerprint": fingerprint, "settings": settings}, indent=2, default=list) + "\n")
        part.rename(run)


def _other(before: Any, now: Mapping[str, Any], free: Collection[str]) -> str:
    """What tells a folder's run from this one, in words."""
    if not isinstance(before, Mapping):
        return "a run with other settings or prompts"
    there, here = dict(_flat(before)), dict(_flat(now))
    said = [
        f"{name} was {there.get(name, 'not set')} there and is {here.get(name, 'not set')} now"
        for name in {**here, **there}
        if name not in free and there.get(name) != here.get(name)
    ]
    if not said:
        return "a run with other prompts: what their file holds has changed"
    return f"a run with other settings: {'; '.join(said)}"


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", json.dumps(value)


def read_shards(
    folder: Path, flaw: Callable[[Mapping[str, Any]], str] = lambda record: ""
) -> dict[str, dict[str, Any]]:
    """All finished units by their key, in the order of the keys.

    Args:
        folder: of the results.
        flaw: says what a record lacks, "" if nothing.

    Raises:
        BrokenRunError: if a line inside a file is broken, or two lines of one unit differ.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("shard-*.jsonl")):
        whole, newline, _ = path.read_bytes().rpartition(b"\n")
        for number, line in enumerate(whole.split(b"\n") if newline else [], start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise BrokenRunError(f"{path}: line {number} is broken: {error}") from error
            if not isinstance(record, dict) or not isinstance(record.get("key"), str):
                raise BrokenRunError(f"{path}: line {number} is broken: it is no unit of a run")
            if said := flaw(record):
                raise BrokenRunError(f"{path}: line {number} is broken: {said}; pass --fresh or another --out")
            if _told(found.setdefault(record["key"], record)) != _told(record):
                raise BrokenRunError(f"{path}: line {number}: unit {record['key']!r} has been done twice, differently")
    return dict(sorted(found.items()))


def _told(record: Mapping[str, Any]) -> dict[str, Any]:
    # How long it took is no part of what a unit comes to.
    return {key: value for key, value in record.items() if key != "seconds"}


def _locked(shard: Path) -> FileLock:
    # The system gives the lock back when a process ends, however it ends; the empty file that stays locks nothing.
    lock = FileLock(f"{shard}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise OtherRunError(f"{shard} is being written by another run; wait for it, or pass another --out") from error
    return lock


class ShardWriter:
    """Appends units to the file of one process, which is locked as long as it is open.

    Args:
        folder: of the results.
        rank: of the process.

    Raises:
        OtherRunError: if another process has it open.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        path = folder / f"shard-{rank:04d}.jsonl"
        self._lock = _locked(path)
        try:
            if path.exists():
                whole, newline, _ = path.read_bytes().rpartition(b"\n")
                os.truncate(path, len(whole + newline))
            self._file = open(path, "ab")  # noqa: SIM115
        except OSError:
            self._lock.release()
            raise

    def write(self, record: Mapping[str, Any]) -> None:
        """One finished unit, on the disk when this returns."""
        self._file.write(json.dumps(record, sort_keys=True).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._lock.release()
