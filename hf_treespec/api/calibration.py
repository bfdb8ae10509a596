"""What a calibration found: curves, acceptance, the config that follows from them, and their files."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import hf_treespec
from hf_treespec.config import TreeConfig
from hf_treespec.control import Measured, Setting, gains_by_depth, interpolated

__all__ = ["Calibration", "Timing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Rounds of one size.

    Args:
        batch: rows.
        context: tokens of each row when the rounds began.
        nodes: that the target read beside the roots.
        seconds: of each round, without drafting.
    """

    batch: int
    context: int
    nodes: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of the seconds."""
        return median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Costs and acceptance of a model on this machine.

    Attributes:
        setting: what the costs hold for.
        draft: what drafted; "" where nothing did.
        timings: of the target.
        levels: seconds of a draft by its levels; empty for a draft that takes no forwards.
        samples: `[D][J]`, how often a child of each depth and rank was judged.
        hits: how often it was right.
        context: tokens of the texts on which the draft was judged, on average.
        config: the config with the sizes that bring the most tokens a second; None without prompts.
        gain: tokens a second with it over those of plain decoding, by the estimates.
        measured: when, as ISO 8601 in UTC.
    """

    setting: Setting
    draft: str
    timings: tuple[Timing, ...]
    levels: Mapping[int, float] = field(default_factory=dict)
    samples: Sequence[Sequence[float]] = ()
    hits: Sequence[Sequence[float]] = ()
    context: int = 0
    config: TreeConfig | None = None
    gain: float | None = None
    measured: str = ""

    def curves(self) -> list[Measured]:
        """Cost curves as the file of costs keeps them."""
        places = dict.fromkeys((one.batch, one.context) for one in self.timings)
        out = [
            Measured(setting=self.setting, batch=batch, context=context, target=self.target(batch, context))
            for batch, context in places
        ]
        if self.levels:
            context = self.context or self.timings[0].context
            drafting = dict(self.levels)
            out.append(
                Measured(
                    setting=self.setting, batch=1, context=context, target={}, draft=self.draft, drafting=drafting
                )
            )
        return out

    def target(self, batch: int, context: int) -> dict[int, float]:
        """Median seconds of a round by what the target reads beside the roots."""
        found = [one for one in self.timings if (one.batch, one.context) == (batch, context)]
        return {one.nodes: one.median for one in sorted(found, key=lambda one: one.nodes)}

    def acceptance(self) -> list[list[float]]:
        """P(right | parent right) by depth and rank; 0 where nothing was judged."""
        return [
            [right / seen if seen else 0.0 for right, seen in zip(*rows, strict=True)]
            for rows in zip(self.hits, self.samples, strict=True)
        ]

    def save(self, folder: str | Path) -> list[Path]:
        """Write everything but the plot into a folder, which is made if needed.

        Returns:
            The files: `calibration.json` (what was measured, on what), `costs.csv`, and, with a draft and prompts,
            `levels.csv`, `acceptance.csv` and `tree_config.json`.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        facts = {
            "hf_treespec": hf_treespec.__version__,
            "measured": self.measured,
            "setting": asdict(self.setting),
            "draft": self.draft or None,
            "context": self.context or None,
            "gain": self.gain,
        }
        (folder / "calibration.json").write_text(json.dumps(facts, indent=2) + "\n")
        files = [folder / "calibration.json"]
        costs = [(t.batch, t.context, t.nodes, t.median, min(t.seconds), len(t.seconds)) for t in self.timings]
        names = ("batch", "context", "nodes", "median_seconds", "min_seconds", "rounds")
        files.append(_write(folder / "costs.csv", names, costs))
        if self.levels:
            files.append(_write(folder / "levels.csv", ("levels", "seconds"), sorted(self.levels.items())))
        if self.config is not None:
            rows = [
                (depth + 1, rank + 1, self.samples[depth][rank], value)
                for depth, ranks in enumerate(self.acceptance())
                for rank, value in enumerate(ranks)
            ]
            files.append(_write(folder / "acceptance.csv", ("depth", "rank", "samples", "acceptance"), rows))
            files.append(self.config.save_pretrained(folder))
        return files


def _write(path: Path, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(rows)
    return path


def best_size(
    acceptance_DJ: Sequence[Sequence[float]], target: Mapping[int, float], levels: Mapping[int, float]
) -> tuple[int, int, float]:
    """The size that brings the most tokens a second; all of them are tried, as costs may be staircases.

    Args:
        acceptance_DJ: P(right | parent right), made non-increasing in the rank.
        target: seconds of a round by nodes, 0 among them.
        levels: seconds of a draft by its levels; empty for one that costs nothing.

    Returns:
        Nodes, depth, and tokens a second over those of plain decoding; nodes 0 where no tree pays.
    """
    sizes = list(range(max(target) + 1))
    target_S = np.array([interpolated(target, size) for size in sizes])
    gains_DS = gains_by_depth(np.array(acceptance_DJ), sizes)
    depths = range(len(gains_DS))
    drafting_D = np.array([interpolated({0: 0.0, **levels}, depth) if levels else 0.0 for depth in depths])
    rates_DS = (1.0 + gains_DS) / (target_S + drafting_D[:, None])
    depth, place = np.unravel_index(int(rates_DS[1:, 1:].argmax()), rates_DS[1:, 1:].shape)
    gain = float(rates_DS[1:, 1:].max()) * target[0]
    return (int(place) + 1, int(depth) + 1, gain) if gain > 1.0 else (0, 1, 1.0)
