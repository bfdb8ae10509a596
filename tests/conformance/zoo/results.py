"""What came of every model type, a file a release of transformers: written by `make conformance`, read by the page."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

import transformers

from conformance.zoo.checks import Finding

HERE = Path(__file__).parent
RELEASES = ("5.24", "5.17")
FIELDS = (
    "name",
    "route",
    "verdict",
    "calls",
    "drafted",
    "accepted",
    "excused",
    "attentions",
    "plain",
    "refused_calls",
    "reason",
)
Record = dict[str, str]


def release() -> str:
    """That of the installed transformers: "5.24"."""
    return ".".join(transformers.__version__.split(".")[:2])


def path(of: str) -> Path:
    return HERE / f"results-{of}.csv"


def record(found: Finding) -> Record:
    """A finding as a line of the file."""
    values = {
        **vars(found),
        "attentions": ", ".join(f"{name} in {dtype}" for name, dtype in found.attentions.items()),
        **{name: "; ".join(getattr(found, name)) for name in ("plain", "refused_calls")},
        "excused": len(found.excused),
    }
    return {name: str(values[name]) for name in FIELDS}


def read(of: str) -> dict[str, Record]:
    """The lines of a release by name; none if it was never run."""
    if not path(of).exists():
        return {}
    with path(of).open(newline="") as file:
        return {line["name"]: line for line in csv.DictReader(file)}


def update(of: str, records: Iterable[Record], *, names: Iterable[str]) -> None:
    """Put new lines in the place of old ones, and drop those of types that are gone.

    Args:
        of: release.
        records: new lines.
        names: all types of the release.
    """
    lines = {**read(of), **{new["name"]: new for new in records}}
    with path(of).open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines[name] for name in sorted(names) if name in lines)
