"""Known bugs in turn: how many tokens it takes until the eval tells each from the target's law.

A bug runs with more and more prompts until it is caught or the prompts of the config are used up. To look several
times makes a chance catch likelier than one look does, by their number at most; what a bug that is missed at the end
says is that of the last look alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import expected
from mutants import MUTANTS
from settings import Settings
from verdict import CAUGHT, MISSED, Verdict

__all__ = ["as_table", "bugs_named", "inject_each", "looks"]


def looks(limit: int) -> list[int]:
    """Numbers of prompts, each about twice the one before; 0, all prompts, is looked at once."""
    found = [limit]
    while found[0] > 1:
        found.insert(0, found[0] // 2)
    return found


def bugs_named(told: str) -> list[str]:
    """The bugs of "all" or of names with commas between.

    Raises:
        SettingsError: for an unknown name.
    """
    names = list(MUTANTS) if told == "all" else [name.strip() for name in told.split(",")]
    for name in names:
        expected.text("inject", name, among=MUTANTS)
    return list(dict.fromkeys(names))


def inject_each(
    settings: Settings, bugs: Sequence[str], run: Callable[[Settings], Verdict]
) -> Iterator[dict[str, Any]]:
    """A row for each bug and arm, as soon as it is known.

    Args:
        settings: of a run; which bug it has is filled in.
        bugs: by name.
        run: goes on with a run as far as its settings say, and judges it.
    """
    for name in bugs:
        bug = MUTANTS[name]
        for limit in looks(int(settings.prompts.get("limit", 0))):
            prompts = {**settings.prompts, "limit": limit}
            verdict = run(replace(settings, inject=name, prompts=prompts))
            if verdict.code == CAUGHT:
                break
        for arm in verdict.arms:
            if arm["lossless"] or arm["least_p"] is None:
                continue
            best = min((row for row in verdict.rows if row["arm"] == arm["arm"]), key=lambda row: float(row["p"]))
            yield {
                "bug": name,
                "wrong": bug.wrong,
                "arm": arm["arm"].removeprefix(f"{name} "),
                "prompts": limit or "all",
                "tokens": arm["tokens"],
                "test": best["test"],
                "p": best["p"],
                "caught": not arm["passes"],
                "seconds": arm["seconds"],
            }


def as_table(rows: Sequence[dict[str, Any]], bugs: Sequence[str]) -> tuple[str, int]:
    """For people, in Markdown, and the exit code.

    Args:
        rows: of `inject_each`.
        bugs: all that were asked for; one that no row tells of was not caught.
    """
    lines = ["| bug | arm | tokens | least p | of | caught |", "|---|---|---|---|---|---|"]
    for row in rows:
        said = "yes" if row["caught"] else "no"
        lines.append(
            f"| {row['bug']} | {row['arm']} | {row['tokens']} | {row['p']:.1e} | {row['test']} | {said} |"
        )  # fmt: skip
    told = {row["bug"] for row in rows if row["caught"]} - {row["bug"] for row in rows if not row["caught"]}
    missed = [bug for bug in bugs if bug not in told]
    line = f"{len(bugs) - len(missed)} of {len(bugs)} injected bugs caught"
    return "\n".join([*lines, line + (f"; not caught: {', '.join(missed)}" if missed else "")]), (
        MISSED if missed or not bugs else CAUGHT
    )
