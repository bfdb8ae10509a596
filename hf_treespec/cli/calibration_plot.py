"""The picture of a calibration, from its CSV files and nothing else."""

from __future__ import annotations

import csv
from pathlib import Path

__all__ = ["plot_calibration"]


def plot_calibration(folder: Path, title: str) -> Path:
    """Draw seconds by nodes, and acceptance by depth where there is any.

    Args:
        folder: where `Calibration.save` wrote.
        title: of the picture.

    Returns:
        The path of the PNG in the same folder.
    """
    # A figure of its own: pyplot would choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    costs, acceptance = _rows(folder / "costs.csv"), _rows(folder / "acceptance.csv")
    figure = Figure(figsize=(10 if acceptance else 5, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if acceptance else 1, squeeze=False)[0]
    for batch, context in dict.fromkeys((row["batch"], row["context"]) for row in costs):
        mine = [row for row in costs if (row["batch"], row["context"]) == (batch, context)]
        nodes = [float(row["nodes"]) for row in mine]
        seconds = [1000 * float(row["median_seconds"]) for row in mine]
        axes[0].plot(nodes, seconds, marker="o", label=f"batch {batch}, context {context}")
    axes[0].set_xlabel("nodes beside the root")
    axes[0].set_ylabel("milliseconds a round, without drafting")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(fontsize="small")
    if acceptance:
        for rank in dict.fromkeys(row["rank"] for row in acceptance):
            mine = [row for row in acceptance if row["rank"] == rank and float(row["samples"])]
            axes[1].plot(
                [int(row["depth"]) for row in mine],
                [float(row["acceptance"]) for row in mine],
                marker="o",
                label=f"rank {rank}",
            )
        axes[1].set_xlabel("depth")
        axes[1].set_ylabel("acceptance where the parent was accepted")
        axes[1].set_ylim(0, 1)
        axes[1].legend(fontsize="small")
    figure.suptitle(title, fontsize="x-small")
    path = folder / "calibration.png"
    figure.savefig(path, format="png", dpi=150)
    return path


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
