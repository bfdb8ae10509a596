"""All rows, section by section."""

from __future__ import annotations

from conformance.contract import rows_caches, rows_effects, rows_inputs, rows_lengths, rows_modes, rows_scores
from conformance.contract.core import Row

ROWS: list[Row] = [
    row
    for part in (rows_modes, rows_lengths, rows_scores, rows_inputs, rows_caches, rows_effects)
    for row in part.ROWS
]
BY_NAME: dict[str, Row] = {row.name: row for row in ROWS}
