"""From the records of all units to p-values, one verdict, and how much it could have overlooked.

Tests of an arm, all against the target's exact law:

| test | of |
|---|---|
| ks_p, bins_p | places of the tokens in their law, ordered by p: uniform? (Kolmogorov-Smirnov; 20 bins) |
| ks_ratio, bins_ratio | the same, ordered by q / p |
| score_p, score_ratio | sum of log p, of log q / p within bounds, less what the law expects (a martingale) |
| score_recent | tokens that repeat one of the three before them, less what the law expects |
| joint | first tokens of many texts of one prompt, against their exact law |
| stock | the same tokens, against as many texts of plain `generate` |
| possible | no token that the target never says |

Arms that claim to be lossless are one family (Holm); those that do not are another, which is expected to fall.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from measures import (
    both_tails,
    both_tails_of_two,
    chi_square,
    holm,
    kolmogorov_smirnov,
    martingale_tail,
    pearson,
    smallest_variation,
    two_samples,
    uniform_bins,
    variation_bound,
)
from mutants import COUPLED, MUTANTS, RULES
from settings import Arm, Settings
from textlaws import STEPS, VARIANCES

__all__ = ["BINS", "CAUGHT", "FAILED", "MISSED", "Verdict", "judge"]

BINS = 20
# A run that would overlook such a total variation has tested nothing.
POWERLESS = 0.5
# That one of the bounds on a total variation, of all arms together, is wrong.
DOUBT = 1e-3
# An arm whose rounds had fewer trees has not tested its rule.
_LEAST_TREES = 0.01
CAUGHT, FAILED, MISSED = 0, 1, 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run came to.

    Args:
        rows: one for each arm and test.
        arms: one for each arm.
        line: for people.
        code: exit code: 0 as it should be, 1 an arm that claims to be lossless fails, 3 one that does not passes,
            or too little was tested.
    """

    rows: list[dict[str, Any]]
    arms: list[dict[str, Any]]
    line: str
    code: int


def judge(settings: Settings, records: Iterable[Mapping[str, Any]]) -> Verdict:
    """Judge all arms of a run by its merged records, whatever their order."""
    texts: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    joints: dict[str, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for record in sorted(records, key=lambda record: record["key"]):
        if record["kind"] == "joint":
            joints[record["arm"]][record["prompt"]] = record
        else:
            texts[record["arm"]].append(record)
    stock = {tuple(arm.sampling.items()): joints[arm.name] for arm in settings.stock_arms()}
    arms = [*settings.arms(), *(arm for arm in settings.stock_arms() if joints[arm.name])]
    rows: list[dict[str, Any]] = []
    doubt = DOUBT / max(1, sum(_bounds(texts[arm.name], joints[arm.name]) for arm in arms))
    for arm in arms:
        reference = None if arm.rule == "stock" else stock[tuple(arm.sampling.items())]
        awaited = len(texts[arm.name]) * settings.repeats * settings.new_tokens
        rows += _tests(arm, texts[arm.name], joints[arm.name], reference, awaited, doubt)
    for lossless in (True, False):
        family = [row for row in rows if row["lossless"] is lossless]
        for row, fallen in zip(family, holm([row["p"] for row in family], settings.family), strict=True):
            row["rejected"] = fallen
        for row in family:
            freedom, level = row.pop("freedom"), settings.family / len(family)
            known = freedom is not None and row["n"]
            row["finds"] = round(smallest_variation(row["n"], freedom, level), 5) if known else None
    summary = [_summary(arm, [row for row in rows if row["arm"] == arm.name], texts[arm.name]) for arm in arms]
    return Verdict(rows, summary, *_line(settings, summary))


def _tests(
    arm: Arm,
    texts: Sequence[Mapping[str, Any]],
    joint: Mapping[int, Mapping[str, Any]],
    stock: Any,
    awaited: int,
    doubt: float,
) -> list[dict[str, Any]]:
    """The tests of an arm.

    Args:
        arm: the arm.
        texts: its records of texts.
        joint: its records of first tokens, by their prompts.
        stock: those of plain decoding.
        awaited: tokens that its texts hold at most.
        doubt: that a bound is wrong.

    Returns:
        A row for each; `freedom` is that of a chi-square test, for which the power is known, or None.
    """
    rows: list[dict[str, Any]] = []

    def add(test: str, p: float, n: int, freedom: int | None, bound: float | None = None) -> None:
        rows.append({
            "arm": arm.name, "rule": arm.rule, "draft": arm.draft, "mutant": arm.mutant, **arm.sampling,
            "lossless": arm.lossless, "test": test, "n": n, "p": p, "freedom": freedom, "bound": bound,
        })  # fmt: skip

    if texts:
        impossible = sum(record["impossible"] for record in texts)
        add("possible", 0.0 if impossible else 1.0, 0, None)
    for order in ("p", "ratio"):
        mine = [record for record in texts if f"place_{order}" in record]
        if not mine:
            continue
        places = torch.tensor([u for record in mine for u in record[f"place_{order}"]], dtype=torch.float64)
        counts, even = uniform_bins(places, BINS), [1 / BINS] * BINS
        n = places.numel()
        add(f"ks_{order}", kolmogorov_smirnov(places), n, None)
        p, freedom = chi_square(counts, even, least=5.0)
        add(f"bins_{order}", p, n, freedom, round(variation_bound(counts, even, doubt), 5))
    for what, step in STEPS.items():
        scores = [(record[f"score_{what}"], record["used"]) for record in texts if f"score_{what}" in record]
        if scores:
            value = math.fsum(score[0] for score, _ in scores)
            spread = math.fsum(score[1] for score, _ in scores)
            # Tokens count as if no text had ended before its time: how many there are is no part of what is awaited.
            p = martingale_tail(value, spread, step, VARIANCES[what] * awaited)
            add(f"score_{what}", p, sum(used for _, used in scores), None)
    # One test of all prompts: statistics and their degrees of freedom add up, so that a prompt whose tokens are nearly
    # certain, which can tell nothing, hides nothing that others tell; what is rare in each is counted together.
    if joint:
        laws = [list(record["law"].values()) for record in joint.values()]
        tables = [[record["counts"].get(cell, 0) for cell in record["law"]] for record in joint.values()]
        found = [pearson(counts, law) for counts, law in zip(tables, laws, strict=True)]
        rare = math.fsum(one[2][0] for one in found), math.fsum(one[2][1] for one in found)
        p, freedom = both_tails(math.fsum(one[0] for one in found), sum(one[1] for one in found), rare)
        bounds = [variation_bound(counts, law, doubt) for counts, law in zip(tables, laws, strict=True)]
        if freedom:
            add("joint", p, sum(map(sum, tables)), freedom, round(sum(bounds) / len(bounds), 5))
    if joint and stock:
        pairs = [(record["counts"], stock[prompt]["counts"]) for prompt, record in joint.items() if prompt in stock]
        compared = [two_samples(one, other) for one, other in pairs]
        p, freedom = both_tails_of_two(
            math.fsum(one[0] for one in compared), sum(one[1] for one in compared), [one[2] for one in compared]
        )
        if freedom:
            add("stock", p, sum(sum(one.values()) for one, _ in pairs) // 2, freedom)
    return rows


def _bounds(texts: Sequence[Mapping[str, Any]], joint: Mapping[int, Mapping[str, Any]]) -> int:
    """How many bounds on a total variation are made of an arm's records."""
    return sum(any(f"place_{order}" in record for record in texts) for order in ("p", "ratio")) + len(joint)


def _summary(arm: Arm, rows: Sequence[Mapping[str, Any]], texts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    fallen = [row["test"] for row in rows if row["rejected"]]
    # The text's own tests: each token counts once in them.
    bins = [row for row in rows if row["test"].startswith("bins_")] or [row for row in rows if row["test"] == "joint"]
    stats = [record["stats"] for record in texts if "stats" in record]
    rounds = sum(one["row_rounds"] for one in stats)
    return {
        "arm": arm.name,
        "lossless": arm.lossless,
        "passes": not fallen,
        "failed_tests": fallen,
        "least_p": min((row["p"] for row in rows), default=None),
        "tokens": sum(record["n"] for record in texts),
        "drafted": sum(one["drafted"] for one in stats) if stats else None,
        "tree_share": round(sum(one["trees"] for one in stats) / rounds, 4) if rounds else None,
        "edge_tokens": sum(record["edge"] for record in texts),
        "finds": max((row["finds"] for row in bins), default=None),
        "bound": max((row["bound"] for row in bins), default=None),
        "accepted_a_round": round(sum(one["accepted"] for one in stats) / rounds, 4) if rounds else None,
        # Acceptance under the coupled rule has no chances that could be summed.
        "expected_a_round": (
            round(sum(one["expected"] for one in stats) / rounds, 4) if rounds and arm.rule != COUPLED else None
        ),
        "seconds": round(sum(record.get("seconds", 0.0) for record in texts), 1),
    }


def _line(settings: Settings, arms: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
    """The verdict in one line, and the exit code."""
    judged = [arm for arm in arms if arm["least_p"] is not None]
    wrong = [arm for arm in judged if arm["lossless"] and not arm["passes"]]
    missed = [arm for arm in judged if not arm["lossless"] and arm["passes"]]
    caught = [arm for arm in judged if not arm["lossless"] and not arm["passes"]]
    claims = [arm for arm in judged if arm["lossless"]]
    if not judged:
        return "FAIL: nothing was measured", FAILED
    if settings.inject and not wrong:
        return _line_of_bug(settings, caught, [arm for arm in arms if not arm["lossless"] and arm not in caught])
    # Plain decoding makes first tokens alone; where there are texts, it is the rules that count.
    told = [arm for arm in claims if arm["tokens"]]
    least = min((arm["tokens"] for arm in told), default=0)
    follow = f" of at least {least} tokens follow it" if told else " follow it in first tokens"
    told = told or claims
    weak = [arm for arm in told if arm["passes"] and (arm["finds"] is None or arm["finds"] >= POWERLESS)]
    idle = [
        arm
        for arm in claims
        if arm["passes"] and (arm["drafted"] == 0 or (arm["tree_share"] or _LEAST_TREES) < _LEAST_TREES)
    ]
    chosen = [arm.name for arm in settings.arms() if arm.lossless and arm.rule in RULES and arm.draft == "ngram"]
    parts = []
    if wrong:
        parts.append("not the target's law: " + "; ".join(f"{a['arm']} (p={a['least_p']:.1e})" for a in wrong))
    if missed:
        parts.append("not told from the target's law: " + "; ".join(a["arm"] for a in missed))
    if idle:
        parts.append(
            f"fewer than {_LEAST_TREES:.0%} of the rounds had a tree, so that no rule was tested: "
            + "; ".join(f"{a['arm']} ({a['tree_share'] or 0.0:.2%})" for a in idle)
        )
    if weak:
        parts.append(
            f"too few tokens to find a total variation of {POWERLESS:g} at 99 %: "
            + "; ".join(f"{a['arm']} ({a['tokens']} tokens)" for a in weak)
        )
    if caught:
        parts.append("caught: " + "; ".join(f"{a['arm']} (p={a['least_p']:.1e})" for a in caught))
    if claims and not (wrong or weak or idle):
        finds, bound = max(a["finds"] for a in told), max(a["bound"] for a in told)
        parts.append(f"{len(told)} lossless arms{follow}")
        parts.append(f"a total variation of {finds:.3f} would have been found at 99 %, and {bound:.3f} bounds it")
    if chosen:
        parts.append(f"ngram draws no child at random: tests of random children were not tried by {', '.join(chosen)}")
    code = FAILED if wrong else MISSED if missed or weak or idle else CAUGHT
    word = {FAILED: "FAIL", MISSED: "MISSED" if missed else "NOT TESTED", CAUGHT: "PASS"}[code]
    return f"{word} (family {settings.family:g}): " + "; ".join(parts), code


def _line_of_bug(
    settings: Settings, caught: Sequence[Mapping[str, Any]], missed: Sequence[Mapping[str, Any]]
) -> tuple[str, int]:
    """The verdict on a run with a bug put in."""
    whole = bool(caught) and not missed
    word = "CAUGHT" if whole else "NOT CAUGHT"
    told = f"{word} (family {settings.family:g}): injected bug {settings.inject}, {MUTANTS[settings.inject].wrong}"
    for said, arms in (("told from the target's law", caught), ("not told from it", missed)):
        if arms:
            told += f"; {said}: " + "; ".join(
                f"{a['arm']} (never run)"
                if a["least_p"] is None
                else f"{a['arm']} (p={a['least_p']:.1e}, {a['tokens']} tokens)"
                for a in arms
            )
    return told, CAUGHT if whole else MISSED
