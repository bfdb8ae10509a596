"""Tables of the evals: every row has its own fields and what all rows share."""

from __future__ import annotations

import csv
from pathlib import Path

import torch

from tables import machine_facts, write_table


def test_rows_of_other_fields_come_into_one_table(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.csv"
    facts = machine_facts(model="tiny", seed=3)
    write_table(path, [{"a": 1}, {"b": 2.5, "seed": 4}], facts)
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        first, second = reader
    assert list(reader.fieldnames or ())[:4] == ["a", "b", "seed", "model"]
    assert (first["a"], first["b"], first["seed"]) == ("1", "", "3")
    assert (second["a"], second["b"], second["seed"]) == ("", "2.5", "4")
    assert {row["threads"] for row in (first, second)} == {str(torch.get_num_threads())}
    assert {row["torch"] for row in (first, second)} == {torch.__version__}
