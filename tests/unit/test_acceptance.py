"""evals/acceptance.py: what whole rounds accept, and its picture."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean, stdev

import pytest

from acceptance import RULES, TEMPERATURES, plot_trees, tree_row


def test_a_row_adds_up_its_texts() -> None:
    each = [(10, 20, 22.0), (10, 30, 27.0), (10, 25, 26.0)]
    row = tree_row(0.7, "rrsw", each)
    assert (row["temperature"], row["rule"], row["rounds"]) == (0.7, "rrsw", 30)
    assert row["accepted_a_round"] == 2.5 and row["expected_a_round"] == 2.5
    # Texts of equally many rounds: that of a mean.
    assert row["standard_error"] == pytest.approx(stdev([2.0, 3.0, 2.5]) / math.sqrt(3), abs=5e-4)
    assert row["expected_error"] == pytest.approx(stdev([2.2, 2.7, 2.6]) / math.sqrt(3), abs=5e-4)
    assert mean([2.0, 3.0, 2.5]) == row["accepted_a_round"]


def test_coupled_rounds_throw_no_coins() -> None:
    row = tree_row(0.0, "coupled", [(4, 9, 0.0)])
    assert row["accepted_a_round"] == 2.25 and row["expected_a_round"] == row["expected_error"] == ""


def test_the_picture_has_a_line_for_each_rule(tmp_path: Path) -> None:
    rows = [
        tree_row(temperature, rule, [(10, 20 + place, 21.0 + place)])
        for temperature in TEMPERATURES
        for place, rule in enumerate(RULES if temperature else ("coupled",))
    ]
    plot_trees(rows, tmp_path / "trees.png")
    assert (tmp_path / "trees.png").stat().st_size > 10_000
