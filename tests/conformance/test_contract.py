"""Every row of the contract of generate(), run three ways; docs/contract.md says what came of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest

from conformance.contract import core, table
from conformance.contract.core import OURS, PLAIN, STOCK, Row, Verdict
from conformance.contract.expected import OUT_OF_SCOPE
from conformance.contract.rows import BY_NAME, ROWS

# The contract's own list of what assisted decoding gets wrong or refuses, as rows of ours.
SILENTLY_WRONG = {"0.3a", "0.3b", "0.3c", "0.3d", "0.3e"}
NAMES = [row.name for row in ROWS]


@functools.cache
def verdicts(name: str) -> Mapping[str, Verdict]:
    return core.run(BY_NAME[name])


@pytest.mark.parametrize("name", NAMES)
def test_row(name: str) -> None:
    row, found = BY_NAME[name], verdicts(name)
    assert found[OURS].word in table.wanted(row, found[PLAIN]), found
    assert row.truth is not None or found[PLAIN].word in ("equal", "refused", "error"), found
    if table.on_release():
        assert table.line(row, found) in recorded(), "run `make contract-table`"


@functools.cache
def recorded() -> list[str]:
    return table.PAGE.read_text().splitlines()


def test_page_has_the_rows_and_nothing_else() -> None:
    lines = [line for line in recorded() if line.startswith("| ") and not line.startswith("| call |")]
    # A name may hold a bar, which the page escapes.
    names = [line.replace("\\|", "\0")[2:].split(" | ")[0].replace("\0", "|") for line in lines]
    assert names == [row.name for number in table._TITLES for row in ROWS if row.section == number]
    assert len(set(NAMES)) == len(NAMES)
    assert {row.section for row in ROWS} == set(table._TITLES)


def test_exceptions_name_rows() -> None:
    assert set(OUT_OF_SCOPE) <= set(NAMES)
    assert {row.also for row in ROWS} >= {"0.1", "0.2", "0.5", "0.3 loud", "0.3 plain", *SILENTLY_WRONG}


def words(line: str) -> list[str]:
    """Verdicts of a line of the page: plain, assisted, ours."""
    return [cell.split(":")[0] for cell in line.replace("\\|", "\0")[2:].split(" | ")[1:4]]


def test_what_assisted_decoding_gets_wrong_or_refuses_is_right() -> None:
    # By the page, which the rows above hold to what runs.
    lines = [words(line) for line in recorded() if line.startswith("| ") and not line.startswith("| call |")]
    right = [line for line in lines if line[2] == "equal" and line[1] not in ("equal", "other draws")]
    assert len(right) >= 12
    summary = next(line for line in recorded() if line.startswith("Of the "))
    equal = sum(line[2] == "equal" for line in lines)
    assert summary.startswith(f"Of the {len(ROWS)} rows hf_treespec is equal in {equal}. In {len(right)} of them")
    # No row of ours is worse than plain decoding without being announced.
    for row, line in zip([r for n in table._TITLES for r in ROWS if r.section == n], lines, strict=True):
        assert line[2] == "equal" or line[0] != "equal" or row.name in OUT_OF_SCOPE


# Rows can fail: each of these outcomes is told from "equal".


def outcome(call: object, *, plain: object = 1) -> Verdict:
    def observe(side: core.Side) -> object:
        if side.name != OURS:
            return plain
        return call(side) if callable(call) else call

    return core.run(Row("1.1", "a row", observe))[OURS]


def raising(error: Exception, forwards: int = 0) -> object:
    def call(side: core.Side) -> object:
        side.forwards = forwards
        raise error

    return call


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (1, "equal"),
        (2, "wrong"),
        (True, "wrong"),
        (raising(ValueError("no")), "refused"),
        (raising(NotImplementedError("no")), "refused"),
        (raising(ValueError("midway"), forwards=1), "error"),
        (raising(RuntimeError("no")), "error"),
        (raising(TypeError("f() got an unexpected keyword argument 'x'")), "refused"),
        (raising(core.Ignored("nothing happened")), "ignored"),
    ],
)
def test_verdicts(call: object, word: str) -> None:
    assert outcome(call).word == word


def test_counting_of_forwards_is_of_the_target() -> None:
    side = core.Side(STOCK)
    side.generate(max_new_tokens=3)
    assert 0 < side.forwards <= 3
