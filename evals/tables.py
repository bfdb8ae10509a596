"""Tables of the evals: rows as CSV, each with what it was measured on."""

from __future__ import annotations

import csv
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_treespec

__all__ = ["machine_facts", "write_table"]


def machine_facts(**first: Any) -> dict[str, Any]:
    """What every figure of a run shares: the given facts, then processor, threads and versions."""
    return {
        **first,
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_treespec": hf_treespec.__version__,
    }


def write_table(path: Path, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Write rows with the facts beside each.

    Args:
        path: of the CSV; its folder is made if needed.
        rows: of any fields, which come in the order in which they first appear; one that a row lacks is left empty.
        facts: of all rows; a row's own field of the same name stands.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = dict.fromkeys(key for row in rows for key in row) | dict.fromkeys(facts)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(fields))
        writer.writeheader()
        writer.writerows({**facts, **row} for row in rows)
