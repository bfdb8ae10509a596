"""Controllers of the depth: what their forms say, on made-up drafts, and that the policy heeds them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import exp, log, sqrt
from typing import Any

import pytest

from hf_treespec import TreeConfig, TreeConfigError
from hf_treespec.control import SizePolicy
from hf_treespec.control.confidence import ConfidenceMap, PathChances
from hf_treespec.control.depth import ConfidenceStop, KLStop, PIDControl, Reached, divergence, make_depth_control
from hf_treespec.tree import Candidate, TokenTree, TreeBuilder, TreeLimits, grow

DEEPEST = 8
PID: dict[str, Any] = {"setpoint": 0.6, "kp": 4.0, "ki": 0.5, "kd": 0.0, "window": 8}


def run_pid(control: PIDControl, alpha: float, rounds: int, seed: int = 0) -> list[int]:
    """Chains whose every level is accepted with probability alpha where the one before was."""
    rng, depths = random.Random(seed), []
    for _ in range(rounds):
        depth = control.depth
        accepted = next((level for level in range(depth) if rng.random() > alpha), depth)
        control.observe([Reached(depth, accepted)])
        depths.append(depth)
    return depths


def share(alpha: float, depth: int) -> float:
    """Mean share of the levels of a chain that are accepted."""
    return sum(alpha**level for level in range(1, depth + 1)) / depth


@pytest.mark.parametrize("alpha", [0.75, 0.85])
def test_pid_holds_the_share_of_accepted_levels(alpha: float) -> None:
    depths = run_pid(PIDControl(DEEPEST, **PID), alpha, 600)
    mean = sum(depths[100:]) / 500
    # The depth at which the share is the set point, in the mean.
    wanted = min(range(1, DEEPEST + 1), key=lambda depth: abs(share(alpha, depth) - 0.6))
    assert abs(mean - wanted) < 1.2


def test_pid_ends_of_the_range_and_no_windup() -> None:
    control = PIDControl(DEEPEST, **PID)
    assert run_pid(control, 1.0, 50)[-1] == DEEPEST
    # After long at the upper end it comes down within the window and a few rounds.
    assert run_pid(control, 0.0, 20)[-1] == 1
    assert run_pid(control, 1.0, 30)[-1] == DEEPEST


def test_pid_is_the_textbook_form_within_the_range() -> None:
    control = PIDControl(15, setpoint=0.5, kp=2.0, ki=0.25, kd=1.0, window=2)
    shares, total, last = [0.7, 0.9, 0.4, 0.5], 0.0, None
    for place, one in enumerate(shares):
        mean = sum(shares[max(0, place - 1) : place + 1]) / min(place + 1, 2)
        error = mean - 0.5
        total += error
        wanted = 8.0 + 2.0 * error + 0.25 * total + 1.0 * (0.0 if last is None else error - last)
        before, last = control.depth, error
        control.observe([Reached(10, round(10 * one))])
        # Less than a level of change is none.
        assert control.depth == (round(wanted) if abs(wanted - before) >= 1.0 else before)


def levels(goes_on: Any, confidence: float) -> int:
    """Levels of a chain of equal confidence."""

    def expand(builders: Any, frontier: Sequence[Sequence[int]]) -> list[list[list[Candidate]]]:
        return [[[Candidate(1, log(confidence))] for _ in nodes] for nodes in frontier]

    limits = TreeLimits(max_nodes=DEEPEST, max_depth=DEEPEST, max_children=1, goes_on=goes_on)
    return grow([0], expand, [limits], "best_first")[0][0].max_depth


@pytest.mark.parametrize("confidence", [0.2, 0.5, 0.7, 0.9])
def test_confidence_stops_once_the_path_falls_below_the_threshold(confidence: float) -> None:
    chances = PathChances(ConfidenceMap())
    control = ConfidenceStop(DEEPEST, threshold=0.3, chances=chances)
    own = ConfidenceMap()(log(confidence), 0)
    expected = next((depth for depth in range(1, DEEPEST) if own**depth < 0.3), DEEPEST)
    assert levels(control.goes_on, confidence) == expected and control.depth == DEEPEST


def test_of_a_tree_the_best_path_counts() -> None:
    builder, poor = TreeBuilder(0), TreeBuilder(0)
    good, bad = builder.add(0, 1, log(0.8)), builder.add(0, 2, log(0.1))
    worse = poor.add(0, 1, log(0.05))
    control = ConfidenceStop(DEEPEST, threshold=0.3, chances=PathChances(ConfidenceMap()))
    assert control.goes_on([builder, poor], [[bad, good], [worse]])
    assert not control.goes_on([builder, poor], [[bad], [worse]]) and not control.goes_on([builder, poor], [[], []])


def test_kl_bounds_the_depth_by_what_was_seen_at_each() -> None:
    control = KLStop(DEEPEST, threshold=0.1, decay=0.5)
    assert control.depth == DEEPEST
    kl = 0.2
    for _ in range(10):
        control.observe([Reached(8, 8, [kl] * 8)])
    bound = 1.0 - sqrt(1.0 - exp(-kl))
    assert control.depth == next(depth for depth in range(1, DEEPEST) if bound ** (depth + 1) < 0.1)
    # Deep levels diverge: the first ones stay. Depths that are not reached count as the deepest that is.
    for _ in range(20):
        control.observe([Reached(4, 1, [0.0, 9.0])])
    assert control.depth == 1
    for _ in range(20):
        control.observe([Reached(4, 2, [0.0, 0.0])])
    # The deeper ones are still thought to be as they were.
    assert 2 <= control.depth < DEEPEST


def test_divergence_is_at_most_that_of_the_laws() -> None:
    rng = random.Random(0)
    for _ in range(50):
        p, q = ([rng.random() for _ in range(6)] for _ in range(2))
        p, q = ([one / sum(law) for one in law] for law in (p, q))
        full = sum(one * log(one / other) for one, other in zip(p, q, strict=True))
        assert 0.0 <= divergence(p[:2], q[:2]) <= full + 1e-9
        assert divergence(p, q) == pytest.approx(full)
    assert divergence([0.5], [0.5]) == 0.0 and divergence([1.0], [1e-9]) > 10 and divergence([], []) == 0.0


def test_names_and_options_are_in_one_place() -> None:
    chances = PathChances(ConfidenceMap())
    kinds = {"cost": None, "pid": PIDControl, "confidence": ConfidenceStop, "kl": KLStop}
    for name, kind in kinds.items():
        config = TreeConfig(depth_control=name)
        made = make_depth_control(name, DEEPEST, config.depth_settings, chances)
        assert made is None if kind is None else isinstance(made, kind)
    config = TreeConfig(depth_control="pid", depth_options={"pid": {"setpoint": 1, "window": 3}})
    assert config.depth_settings == {"setpoint": 1, "kp": 4.0, "ki": 0.5, "kd": 0.0, "window": 3}
    assert TreeConfig.from_dict(config.to_dict()) == config and hash(config) != hash(TreeConfig())
    assert "window: 3" in config.to_yaml_string()
    for fields, text in (
        ({"depth_control": "often"}, r"depth_control='often'\): expected one of 'cost', 'pid', 'confidence', 'kl'"),
        ({"depth_options": {"pdi": {}}}, r"controller 'pdi': expected one of .*; did you mean 'pid'\?"),
        ({"depth_options": {"pid": {"kp": "4"}}}, r"pid\['kp'\]='4': expected a number in \[0\.0, 1000\.0\]"),
        ({"depth_options": {"pid": {"window": 0.5}}}, r"pid\['window'\]=0\.5: expected an integer in"),
        ({"depth_options": {"kl": {"threshold": 2}}}, r"kl\['threshold'\]=2: expected a number in \[0\.0, 1\.0\]"),
        ({"depth_options": 3}, r"depth_options=3\): expected a mapping of controller to options, such as {'pid'"),
    ):
        with pytest.raises(TreeConfigError, match=text):
            TreeConfig(**fields)


@pytest.mark.parametrize("cheap", [True, False])
@pytest.mark.parametrize("fallback", ["auto", "off"])
def test_the_policy_heeds_the_controller(cheap: bool, fallback: str) -> None:
    """Chains of which the first level alone is right: each controller comes to draft few levels."""
    for name in ("pid", "confidence", "kl"):
        settings = TreeConfig(depth_control=name).depth_settings
        policy = SizePolicy(
            TreeLimits(max_nodes=8, max_depth=8, max_children=2), fallback=fallback, cheap=cheap, in_step=True,
            batch=1, depth_control=name, depth_options=settings, learns=True,
        )  # fmt: skip
        assert policy.wants_shares == (name == "kl")
        position, drafted = 0, []
        for _ in range(60):
            limits = policy.limits()
            builders = [TreeBuilder(position)]
            for depth in range(min(limits.max_nodes, limits.max_depth)):
                if depth and limits.goes_on is not None and not limits.goes_on(builders, [[depth]]):
                    break
                builders[0].add(
                    depth, position + 1 if depth == 0 else -1, log(0.9 if depth == 0 or name == "kl" else 0.2)
                )
            tree = builders[0].freeze()[0]
            drafted.append(tree.drafted)
            (scored,) = policy.cut([tree], {0: position + 1}, [position], drafting=0.1 * tree.drafted)
            gained = 1 + min(1, scored.drafted)
            position += gained
            shares = {1: 1.0, 2: 0.001} if scored.drafted > 1 else {1: 1.0} if scored.drafted else {}
            policy.observe(
                trees={0: scored}, seconds=1.0 + 0.01 * scored.drafted, texts={0: range(position + 1)},
                shares={0: shares} if policy.wants_shares else None,
            )  # fmt: skip
        late = [count for count in drafted[-20:] if count]
        assert late and sum(late) / len(late) <= 3.0, (name, drafted)
    assert isinstance(tree, TokenTree)
