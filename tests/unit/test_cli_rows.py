"""The CSV of a benchmark: what is written is what is read; cut or foreign files are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_treespec.cli.faults import UsageFault
from hf_treespec.cli.rows import COLUMNS, Row, RowWriter, first_difference, read_rows, tokens_per_round

MakeRow = Callable[..., Row]


def write(path: Path, rows: list[Row]) -> Path:
    with path.open("w", newline="") as file:
        RowWriter(file).write(rows)
    return path


def test_round_trip(tmp_path: Path, make_row: MakeRow) -> None:
    rows = [
        make_row(),
        make_row(method="treespec", text_equal=True, draft_seconds=1e-7, config='{\n  "max_nodes": 16\n}\n'),
        make_row(method="treespec", text_equal=False, first_difference=0, reference="plain", tokens_per_round=None),
    ]
    assert read_rows(write(tmp_path / "rows.csv", rows)) == rows


def test_header_is_the_schema(tmp_path: Path, make_row: MakeRow) -> None:
    lines = write(tmp_path / "rows.csv", [make_row()]).read_text().splitlines()
    assert lines[0] == ",".join(COLUMNS)
    wanted = {"set", "prompt", "repeat", "method", "seconds", "new_tokens", "target_forwards", "tokens_per_round"}
    wanted |= {"draft_seconds", "text_equal", "first_difference", "model", "dtype", "device", "threads"}
    wanted |= {"torch", "transformers", "hf_treespec"}
    assert wanted <= set(COLUMNS)


def test_rows_are_on_disk_at_once(tmp_path: Path, make_row: MakeRow) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        RowWriter(file).write([make_row()])
        # Not closed yet: this is what is left of a run that is killed now.
        assert read_rows(path) == [make_row()]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "a,b\n1,2\n",
        lambda text: text.replace("seconds", "minutes", 1),
        lambda text: text[: text.rindex(",")] + "\n",
        lambda text: text.replace(",0.30000000000000004,", ",soon,"),
        lambda text: text.replace(",code,", ",,").replace(",7,5,5,", ",7,,5,"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, make_row: MakeRow, damage: Any) -> None:
    path = write(tmp_path / "rows.csv", [make_row()])
    path.write_text(damage(path.read_text()))
    with pytest.raises(UsageFault, match=r"rows\.csv: no CSV of treespec bench"):
        read_rows(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match="FileNotFoundError"):
        read_rows(tmp_path / "rows.csv")


def test_a_truth_value_is_true_or_false(tmp_path: Path, make_row: MakeRow) -> None:
    path = write(tmp_path / "rows.csv", [make_row(text_equal=True)])
    path.write_text(path.read_text().replace(",true,", ",yes,"))
    with pytest.raises(UsageFault, match="text_equal holds 'yes'"):
        read_rows(path)


@pytest.mark.parametrize(
    ("tokens", "reference", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([9, 2, 3], [1, 2, 3], 0),
        ([1, 2, 9], [1, 2, 3], 2),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3, 4], [1, 2, 3], 3),
    ],
)
def test_first_difference(tokens: list[int], reference: list[int], expected: int | None) -> None:
    assert first_difference(tokens, reference) == expected


@pytest.mark.parametrize(
    ("new_tokens", "forwards", "expected"), [(10, 10, 1.0), (10, 4, 3.0), (1, 1, None), (5, 1, None)]
)
def test_tokens_per_round(new_tokens: int, forwards: int, expected: float | None) -> None:
    assert tokens_per_round(new_tokens, forwards) == expected
