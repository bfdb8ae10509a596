"""From records to a verdict, on records that are made up."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from injection import as_table
from measures import martingale_tail, variation_bound
from settings import Settings
from textlaws import VARIANCES
from verdict import judge

RULES = ("traversal", "typical-lossy")
CHOSEN = "; ngram draws no child at random: tests of random children were not tried by traversal ngram"


def records(bent: dict[str, float] | None = None, n: int = 3000, **changes: Any) -> list[dict[str, Any]]:
    """Texts of two arms; `bent` moves the places of an arm towards 0."""
    dice = torch.Generator().manual_seed(7)
    out = []
    for rule in RULES:
        power = (bent or {}).get(rule, 1.0)
        for prompt in range(3):
            places = (torch.rand(n // 3, generator=dice, dtype=torch.float64) ** power).tolist()
            out.append({
                "key": f"{prompt} text {rule}", "kind": "text", "arm": f"{rule} ngram", "prompt": prompt, "n": n // 3,
                "used": n // 3, "edge": 0, "impossible": 0, "place_p": places, "score_p": [3.0, 100.0], "seconds": 1.0,
                "stats": {"row_rounds": 10, "accepted": 5, "expected": 5.5, "drafted": 40, "trees": 9}, **changes,
            })  # fmt: skip
    return out


def settings(**changes: Any) -> Settings:
    return Settings(**{"rules": RULES, **changes})


def test_right_rules_pass_and_wrong_ones_are_caught() -> None:
    found = judge(settings(), records({"typical-lossy": 1.4}))
    assert found.code == 0 and found.line.startswith("PASS (family 0.001): caught: typical-lossy ngram (p=")
    assert "1 lossless arms of at least 3000 tokens follow it" in found.line
    good, bad = found.arms
    assert good["passes"] and not bad["passes"] and bad["failed_tests"] == ["ks_p", "bins_p"]
    assert (good["tokens"], good["accepted_a_round"], good["expected_a_round"], good["seconds"]) == (
        3000,
        0.5,
        0.55,
        3.0,
    )
    assert 0.02 < good["finds"] < 0.1 and good["bound"] > 0.03
    scores = [row for row in found.rows if row["test"] == "score_p"]
    assert [row["p"] for row in scores] == [martingale_tail(9.0, 300.0, 16.0, VARIANCES["p"] * 3 * 64)] * 2
    assert {row["test"] for row in found.rows if row["finds"] is not None} == {"bins_p"}
    assert all("freedom" not in row for row in found.rows)


def test_a_claim_that_fails_outweighs_all_else() -> None:
    found = judge(settings(), records({"traversal": 1.4}))
    assert found.code == 1 and found.line.startswith("FAIL (family 0.001): not the target's law: traversal ngram (p=")
    assert "not told from the target's law: typical-lossy" in found.line


def test_what_is_wrong_and_not_caught_is_said() -> None:
    found = judge(settings(), records())
    assert found.code == 3 and found.line.startswith("MISSED (family 0.001): not told from")


@pytest.mark.parametrize(
    ("power", "samplings", "code", "said"),
    [(1.4, 1, 0, "CAUGHT (family 0.001): injected bug M03, top-k children tested as if drawn; told from the target's "
      "law: M03 rrsw ngram (p="),
     (1.0, 1, 3, "NOT CAUGHT (family 0.001): injected bug M03, top-k children tested as if drawn; not told from it: "
      "M03 rrsw ngram (p="),
     (1.4, 2, 3, "NOT CAUGHT (family 0.001): injected bug M03, top-k children tested as if drawn; told from the "
      "target's law: M03 rrsw ngram (p=")],
)  # fmt: skip
def test_a_bug_is_said_to_be_caught_or_not(power: float, samplings: int, code: int, said: str) -> None:
    told = settings(inject="M03", rules=("all",), sampling=({}, {"top_k": 5})[:samplings])
    found = judge(told, [
        {**one, "key": f"{one['key']} {arm.name}", "arm": arm.name}
        for arm, bent in zip(told.arms(), (power, 1.0), strict=False)
        for one in records({"traversal": bent})[:3]
    ])  # fmt: skip
    assert found.code == code and found.line.startswith(said) and ", 3000 tokens)" in found.line
    assert found.line.count("not told from it: M03 rrsw ngram top_k=5 (p=") == samplings - 1


def test_plain_decoding_that_fails_outweighs_a_bug() -> None:
    told = settings(inject="M03")
    found = judge(told, [{**joint("stock", {"1": 800, "2": 100, "*": 100}), "key": "0"}])
    assert found.code == 1 and found.line.startswith("FAIL (family 0.001): not the target's law: stock none (p=")


def test_an_impossible_token_fails_by_itself() -> None:
    found = judge(settings(rules=("traversal",)), records(impossible=1)[:3])
    assert found.code == 1 and found.arms[0]["failed_tests"] == ["possible"]
    assert judge(settings(rules=("traversal",)), records(edge=1)[:3]).code == 0


def test_nothing_measured_is_no_pass() -> None:
    found = judge(settings(), [])
    assert found.code == 1 and found.line == "FAIL: nothing was measured"


def joint(rule: str, counts: dict[str, int], prompt: int = 0) -> dict[str, Any]:
    arm = "stock none" if rule == "stock" else f"{rule} ngram"
    law = {"1": 0.5, "2": 0.3, "*": 0.2}
    return {
        "key": f"{prompt} joint {arm}",
        "kind": "joint",
        "arm": arm,
        "prompt": prompt,
        "counts": counts,
        "law": law,
    }


def test_order_does_not_matter() -> None:
    """Not even to the last bit: sums of many prompts are made in one order."""
    dice = random.Random(1)
    told = records({"typical-lossy": 1.4})
    for prompt in range(40):
        first = dice.randrange(465, 536)
        told.append(joint("traversal", {"1": first, "2": 800 - first, "*": 200}, prompt))
    found = judge(settings(), told)
    for _ in range(6):
        dice.shuffle(told)
        assert judge(settings(), told) == found


def test_first_tokens_are_judged_by_their_law_and_by_plain_decoding() -> None:
    right = {"1": 500, "2": 300, "*": 200}
    tilted = {"1": 590, "2": 250, "*": 160}
    told = settings(rules=("traversal",))
    found = judge(told, [joint("traversal", right), joint("stock", right)])
    assert found.code == 0 and [row["test"] for row in found.rows] == ["joint", "stock", "joint"]
    assert all(row["p"] > 0.9 and row["bound"] != 0 for row in found.rows)
    wrong = judge(told, [joint("traversal", tilted), joint("stock", right)])
    assert wrong.code == 1 and wrong.arms[0]["failed_tests"] == ["joint", "stock"]
    # Plain decoding is judged too.
    assert judge(told, [joint("traversal", right), joint("stock", tilted)]).arms[1]["failed_tests"] == ["joint"]
    # Prompts add up: neither alone would be enough.
    slight = {"1": 556, "2": 272, "*": 172}
    assert judge(told, [joint("traversal", slight)]).code == 0
    assert judge(told, [joint("traversal", slight, prompt) for prompt in range(4)]).code == 1


CERTAIN = {"1": 1.0}
NEARLY = {"1": 1 - 1e-9, "*": 1e-9}
OFTEN = {"1": 0.9975, "*": 0.0025}


@pytest.mark.parametrize("law", [CERTAIN, NEARLY, OFTEN])
@pytest.mark.parametrize("others", [1, 3])
def test_a_prompt_that_can_tell_nothing_hides_nothing(law: dict[str, float], others: int) -> None:
    """However many first tokens are certain, 260 of 400 where the law says a half are too many."""
    half = {"1": 0.5, "2": 0.5}
    told = [
        {**joint(rule, counts), "law": half, "prompt": 0, "key": f"0 {rule}"}
        for rule, counts in (("traversal", {"1": 260, "2": 140}), ("stock", {"1": 200, "2": 200}))
    ]
    alone = judge(settings(rules=("traversal",)), told)
    assert alone.arms[0]["failed_tests"] == ["joint", "stock"]
    for prompt in range(1, others + 1):
        for rule in ("traversal", "stock"):
            told.append({**joint(rule, {"1": 400}, prompt), "law": law})
    found = judge(settings(rules=("traversal",)), told)
    assert found.code == 1 and found.arms[0]["failed_tests"] == ["joint", "stock"]
    tests = {row["test"]: row["p"] for row in found.rows if row["arm"] == "traversal ngram"}
    assert tests["joint"] < 1e-7 and tests["stock"] < 1e-3 / 3


def test_what_is_rare_counts_together_and_not_by_a_statistic() -> None:
    """Five where 0.4 are expected have a chance of 6e-5, not the 3e-13 of Pearson's statistic."""
    told = settings(rules=("traversal",))
    few = [{**joint("traversal", {"1": 398, "*": 2}, prompt), "law": {"1": 0.999, "*": 0.001}} for prompt in range(3)]
    (row,) = judge(told, few[:1]).rows
    assert 0.05 < row["p"] < 0.2
    (row,) = judge(told, few).rows
    assert row["p"] == pytest.approx(2 * 1.5e-3, rel=0.1)
    (row,) = judge(told, [{**few[0], "counts": {"1": 100, "*": 300}}]).rows
    assert row["p"] < 1e-100


def test_certain_first_tokens_alone_are_no_pass() -> None:
    told = [{**joint(rule, {"1": 400}), "law": CERTAIN} for rule in ("traversal", "stock")]
    found = judge(settings(rules=("traversal",)), told)
    assert found.code == 1 and found.line == "FAIL: nothing was measured"
    right = judge(settings(rules=("traversal",)), [joint("traversal", {"1": 500, "2": 300, "*": 200})])
    assert right.code == 0 and "1 lossless arms follow it in first tokens; a total variation of 0.0" in right.line


def test_too_few_tokens_and_trees_without_nodes_are_no_pass() -> None:
    told = settings(rules=("traversal",))
    few = judge(told, records(n=48)[:3])
    assert few.code == 3 and few.line == (
        "NOT TESTED (family 0.001): too few tokens to find a total variation of 0.5 at 99 %: "
        "traversal ngram (48 tokens)" + CHOSEN
    )
    said = (
        "NOT TESTED (family 0.001): fewer than 1% of the rounds had a tree, so that no rule was tested: "
        "traversal ngram ({share})" + CHOSEN
    )
    for rounds, nodes, trees, code, share in ((10, 0, 0, 3, "0.00%"), (300, 10, 2, 3, "0.67%"), (300, 10, 3, 0, "")):
        bare = {"row_rounds": rounds, "accepted": 0, "expected": 0.0, "drafted": nodes, "trees": trees}
        idle = judge(told, records(stats=bare)[:3])
        assert idle.code == code and (not code or idle.line == said.format(share=share))


def test_a_draft_that_draws_nothing_is_said_to_leave_the_random_children_untested() -> None:
    found = judge(settings(rules=("coupled", "traversal")), [
        {**one, "arm": f"{rule} ngram", "key": f"{rule} {one['key']}"}
        for rule in ("coupled", "traversal") for one in records()[:3]
    ])  # fmt: skip
    assert found.code == 0 and found.line.endswith(CHOSEN)
    # What the coupled rule accepts has no chances to sum.
    assert [arm["expected_a_round"] for arm in found.arms] == [None, 0.55]
    other = judge(settings(rules=("traversal",), drafts=("drop:1-2",)), [
        {**one, "arm": "traversal drop:1-2"} for one in records()[:3]
    ])  # fmt: skip
    assert other.code == 0 and "random" not in other.line


def test_a_bug_that_never_ran_is_not_caught() -> None:
    told = settings(inject="M03")
    found = judge(told, [{**joint("stock", {"1": 500, "2": 300, "*": 200}), "key": "0"}])
    assert found.code == 3 and found.line.startswith("NOT CAUGHT (family 0.001): injected bug M03")
    assert found.line.endswith("; not told from it: M03 rrsw ngram (never run)")
    row = {"bug": "M03", "arm": "rrsw ngram", "tokens": 10, "p": 1e-9, "test": "ks_p", "caught": True}
    assert as_table([row], ["M03"])[0].endswith("\n1 of 1 injected bugs caught") and as_table([row], ["M03"])[1] == 0
    line, code = as_table([row], ["M03", "M04"])
    assert code == 3 and line.endswith("\n1 of 2 injected bugs caught; not caught: M04")
    assert as_table([row, {**row, "caught": False}], ["M03"])[1] == 3 and as_table([], [])[1] == 3


def test_doubt_is_shared_among_all_bounds() -> None:
    """Of two arms, the places of each, and first tokens of three prompts of one of them."""
    told = [joint("traversal", {"1": 500, "2": 300, "*": 200}, prompt) for prompt in range(3)]
    found = judge(settings(), [*records(), *told])
    bounds = {(row["rule"], row["test"]): row["bound"] for row in found.rows if row["bound"] is not None}
    assert len(bounds) == 3
    assert bounds["traversal", "joint"] == round(variation_bound([500, 300, 200], [0.5, 0.3, 0.2], 1e-3 / 5), 5)
    assert bounds["traversal", "bins_p"] > math.sqrt(math.log(5e3) / 6000)


def test_rare_tokens_of_many_prompts_are_compared_with_plain_decoding_at_once() -> None:
    """One of ten thousand in a text and none in the other says nothing; in each of twelve prompts it does."""
    told = settings(rules=("traversal",))

    def compared(prompts: int, rare: int) -> list[float]:
        found = judge(told, [
            {**joint(rule, {"1": 400 - times, "2": times}, prompt), "law": {"1": 0.99, "2": 0.01}}
            for prompt in range(prompts) for rule, times in (("traversal", rare), ("stock", 0))
        ])  # fmt: skip
        return [row["p"] for row in found.rows if row["test"] == "stock"]

    assert compared(1, 1) == [1.0] and compared(12, 1) == [pytest.approx(2 / 2**12)]
