"""The picture of a benchmark, from its CSV and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hf_treespec.cli.rows import read_rows
from hf_treespec.cli.summary import BASELINE, Summary, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_from_csv"]


def plot_from_csv(csv_path: Path, png_path: Path) -> None:
    """Draw speed-up and tokens a round per set and method.

    Args:
        csv_path: written by `treespec bench --csv`.
        png_path: where the picture goes.

    Raises:
        UsageFault: if the CSV is none of ours or holds no rows.
    """
    # A figure of its own: pyplot would choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from hf_treespec.cli.faults import UsageFault

    rows = read_rows(csv_path)
    if not rows:
        raise UsageFault(str(csv_path), "holds no measurements")
    summaries = summarise(rows)
    sampled = any(row.temperature > 0 for row in rows)
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _speed(left, summaries, sampled)
    _bars(right, {(s.set, s.method): s.tokens_per_round or 0.0 for s in summaries})
    right.set_title("tokens a round")
    right.axhline(1.0, color="black", linewidth=0.8)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), fontsize="small")
    first = rows[0]
    figure.suptitle(
        f"{first.model}, {first.dtype}, {first.hardware}, {first.threads} threads, temperature {first.temperature:g}, "
        f"transformers {first.transformers}, torch {first.torch}, hf_treespec {first.hf_treespec}",
        fontsize="x-small",
    )
    figure.savefig(png_path, format="png", dpi=150)


def _speed(axes: Axes, summaries: list[Summary], sampled: bool) -> None:
    values: dict[tuple[str, str], float] = {}
    errors: dict[tuple[str, str], tuple[float, float]] = {}
    for summary in summaries:
        ratio = summary.ratio_per_token if sampled else summary.ratio
        key = summary.set, summary.method
        if ratio is not None:
            values[key] = ratio.value
        elif summary.method == BASELINE:
            values[key] = 1.0
        # A single prompt has no interval.
        if ratio is not None and ratio.low is not None and ratio.high is not None:
            errors[key] = max(ratio.value - ratio.low, 0.0), max(ratio.high - ratio.value, 0.0)
    _bars(axes, values, errors)
    axes.set_title(f"speed-up over plain{' per token' if sampled else ''} (95 % interval)")
    axes.axhline(1.0, color="black", linewidth=0.8)


def _bars(
    axes: Axes,
    values: dict[tuple[str, str], float],
    errors: dict[tuple[str, str], tuple[float, float]] | None = None,
) -> None:
    """Groups of bars: a group per set, a colour per method."""
    sets = list(dict.fromkeys(name for name, _ in values))
    methods = list(dict.fromkeys(method for _, method in values))
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        places = [place + (number - (len(methods) - 1) / 2) * width for place in range(len(sets))]
        heights = [values.get((name, method), 0.0) for name in sets]
        axes.bar(places, heights, width, label=method)
        for place, height, name in zip(places, heights, sets, strict=True):
            if errors and (name, method) in errors:
                below, above = errors[name, method]
                axes.errorbar(place, height, [[below], [above]], color="black", capsize=2, linewidth=0.8)
    axes.set_xticks(range(len(sets)), sets)
