"""From rows to the figures that people quote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_treespec.cli import plot
from hf_treespec.cli.bootstrap import Interval
from hf_treespec.cli.faults import UsageFault
from hf_treespec.cli.plot import plot_from_csv
from hf_treespec.cli.rows import Row, RowWriter
from hf_treespec.cli.summary import Summary, summarise, table

MakeRow = Callable[..., Row]


@pytest.fixture
def rows(make_row: MakeRow) -> list[Row]:
    """Two prompts, three repeats; the tree takes half the seconds on one prompt and all of them on the other."""

    def pair(prompt: int, repeat: int, seconds: float, tree_seconds: float, equal: bool) -> list[Row]:
        place = {"prompt": prompt, "repeat": repeat}
        plain = make_row(**place, seconds=seconds, new_tokens=11, target_forwards=11)
        tree = make_row(
            **place,
            method="treespec",
            seconds=tree_seconds,
            new_tokens=11,
            target_forwards=6,
            draft_seconds=0.25,
            text_equal=equal,
            first_difference=None if equal else 3,
        )
        return [plain, tree]

    return [
        *pair(0, 0, 2.0, 1.0, True),
        *pair(1, 0, 4.0, 4.0, True),
        *pair(0, 1, 2.0, 1.0, False),
        *pair(1, 1, 4.0, 4.0, True),
        *pair(0, 2, 2.0, 1.0, True),
        *pair(1, 2, 4.0, 4.0, True),
    ]


def test_totals(rows: list[Row]) -> None:
    plain, tree = summarise(rows)
    assert (plain.set, plain.method, tree.method) == ("code", "plain", "treespec")
    assert (tree.prompts, tree.calls, tree.seconds, tree.new_tokens, tree.target_forwards) == (2, 6, 15.0, 66, 36)
    # (66 tokens - 6 of the first forwards) over (36 - 6) forwards.
    assert (plain.tokens_per_round, tree.tokens_per_round) == (1.0, 2.0)
    assert tree.tokens_per_second == 4.4
    assert (plain.draft_seconds, tree.draft_seconds) == (None, 1.5)
    assert (plain.equal, plain.compared, tree.equal, tree.compared) == (0, 0, 5, 6)


def test_ratio_resamples_prompts_not_calls(rows: list[Row]) -> None:
    plain, tree = summarise(rows)
    assert plain.ratio is None and plain.ratio_per_token is None
    # One prompt alone has 2 or 1, and both come up in a quarter of the draws; six calls agree in 3 % of theirs, half
    # of that at each end.
    assert tree.ratio == Interval(1.2, 1.0, 2.0)
    assert tree.ratio_per_token == Interval(1.2, 1.0, 2.0)


def test_unequal_lengths_count_per_token(rows: list[Row], make_row: MakeRow) -> None:
    plain = make_row(seconds=2.0, new_tokens=10, target_forwards=10, temperature=1.0)
    short = make_row(method="treespec", seconds=1.0, new_tokens=5, target_forwards=5, temperature=1.0)
    summary = summarise([plain, short])[1]
    assert summary.ratio is not None and summary.ratio.value == 2.0
    assert summary.ratio_per_token is not None and summary.ratio_per_token.value == 1.0


def test_calls_without_their_counterpart_are_left_out_of_ratios(rows: list[Row]) -> None:
    cut = [row for row in rows if not (row.method == "plain" and row.prompt == 1)]
    (tree,) = (summary for summary in summarise(cut) if summary.method == "treespec")
    assert tree.ratio == Interval(2.0, None, None)
    assert tree.calls == 6


def test_sets_are_apart(rows: list[Row], make_row: MakeRow) -> None:
    summaries = summarise([*rows, make_row(set="chat", seconds=1.0)])
    assert [(s.set, s.method) for s in summaries] == [("code", "plain"), ("code", "treespec"), ("chat", "plain")]


def test_table(rows: list[Row]) -> None:
    lines = table(summarise(rows), sampled=False).splitlines()
    assert " ".join(lines[0].split()) == "set method prompts tokens tokens/round tokens/s speed-up [95 %] text equal"
    assert lines[1].split() == ["code", "plain", "2", "66", "1.00", "3.7", "-", "-"]
    assert lines[2].split() == ["code", "treespec", "2", "66", "2.00", "4.4", "1.20", "[1.00,", "2.00]", "5/6"]
    assert "speed-up a token" in table(summarise(rows), sampled=True)


def write(path: Path, rows: list[Row]) -> Path:
    with path.open("w", newline="") as file:
        RowWriter(file).write(rows)
    return path


def test_plot_draws_what_the_csv_says(tmp_path: Path, rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    bars = plot._bars

    def spy(axes: Any, *figures: Any) -> None:
        bars(axes, *figures)
        drawn.append([round(patch.get_height(), 6) for patch in axes.patches])

    monkeypatch.setattr(plot, "_bars", spy)
    picture = tmp_path / "bench.png"
    plot_from_csv(write(tmp_path / "bench.csv", rows), picture)
    assert drawn == [[1.0, 1.2], [1.0, 2.0]]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plot_of_another_csv_is_another_picture(tmp_path: Path, rows: list[Row]) -> None:
    pictures = []
    for number, content in enumerate((rows, rows, rows[:2])):
        picture = tmp_path / f"{number}.png"
        plot_from_csv(write(tmp_path / f"{number}.csv", content), picture)
        pictures.append(picture.read_bytes())
    assert pictures[0] == pictures[1] != pictures[2]


def test_plot_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match="holds no measurements"):
        plot_from_csv(write(tmp_path / "bench.csv", []), tmp_path / "bench.png")


def test_summary_of_a_method_with_one_forward_has_no_rounds(make_row: MakeRow) -> None:
    summary: Summary = summarise([make_row(new_tokens=1, target_forwards=1, tokens_per_round=None)])[0]
    assert summary.tokens_per_round is None
    assert table([summary], sampled=False).splitlines()[1].split()[4] == "-"
