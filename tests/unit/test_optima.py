"""The bounds of evals/optima.py against every set of tokens, and the rules against enumeration; laws small enough."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import optima
from exact.laws import planned
from exact.reference import winner_chances
from exact.worlds import World, all_trees, bush, families
from hf_treespec.rules import RULES, Draws

LAWS = {
    "apart": World(seed=41, vocab=5, apart=1.5),
    "close": World(seed=42, vocab=5, apart=0.4),
    "draft_zeros": World(seed=43, vocab=5, draft_zeros=2),
    "target_zeros": World(seed=44, vocab=5, target_zeros=2),
    "disjoint": World(seed=45, vocab=5, disjoint=True),
    "same": World(seed=46, vocab=5, apart=0.0),
}
every_law = pytest.mark.parametrize("name", list(LAWS))
counts = pytest.mark.parametrize("k", [1, 2, 3])


def laws(name: str) -> tuple[Tensor, Tensor]:
    world = LAWS[name]
    return torch.tensor(world.p((0,)), dtype=torch.float64), torch.tensor(world.q((0,)), dtype=torch.float64)


def bound(p: Tensor, q: Tensor, draws: Draws, k: int, randoms: int) -> float:
    """1 + min over every set, by enumeration of the draws."""
    drawn = [
        ({token for token, _ in family}, chance) for family, chance in families(draws, tuple(q.tolist()), k, randoms)
    ]
    sets = itertools.chain.from_iterable(itertools.combinations(range(len(p)), size) for size in range(len(p) + 1))
    return 1 + min(
        sum(float(p[t]) for t in chosen) - math.fsum(chance for tokens, chance in drawn if tokens <= set(chosen))
        for chosen in sets
    )


def accepted(rule: str, name: str, k: int, randoms: int = 1) -> float:
    """Probability that a child of the root is accepted, through the library's own plan."""
    trees, weights = zip(*all_trees(LAWS[name], RULES[rule], bush(k), (0,), randoms=randoms), strict=True)
    plan = planned(RULES[rule], list(trees), LAWS[name], (0,))
    stays = [
        winner_chances(RULES[rule], tree, accept)[0]
        for tree, accept in zip(trees, plan.accept_BN.tolist(), strict=True)
    ]
    return 1 - math.fsum(weight * stay for weight, stay in zip(weights, stays, strict=True))


@counts
@every_law
def test_bounds_are_those_over_all_sets(name: str, k: int) -> None:
    p, q = laws(name)
    assert optima.optimum_iid(p, q, k) == pytest.approx(bound(p, q, Draws.IID, k, 1), abs=1e-9)
    assert optima.optimum_distinct(p, q, [k])[0] == pytest.approx(bound(p, q, Draws.DISTINCT, k, 1), abs=1e-6)
    for randoms in (0, 1, 2):
        expected = bound(p, q, Draws.HYBRID, k, randoms)
        assert optima.optimum_hybrid(p, q, k, randoms) == pytest.approx(expected, abs=1e-6), randoms


@pytest.mark.parametrize("rest", [1e-2, 1e-5, 1e-9])
def test_bounds_of_a_draft_that_is_nearly_certain(rest: float) -> None:
    """As at low temperatures: the clocks of the other children ring late."""
    p = torch.tensor([0.4, 0.2, 0.2, 0.15, 0.05], dtype=torch.float64)
    q = torch.tensor([1 - 1.16 * rest, rest, rest / 10, rest / 20, rest / 100], dtype=torch.float64)
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 1, 3]):
        expected = [bound(p[order], q, Draws.DISTINCT, k, 1) for k in (1, 2, 3, 4)]
        assert optima.optimum_distinct(p[order], q, [1, 2, 3, 4]) == pytest.approx(expected, abs=1e-6)


@counts
@every_law
def test_rules_accept_what_their_plans_do(name: str, k: int) -> None:
    p, q = laws(name)
    dice = torch.Generator().manual_seed(1)
    assert optima.accepted_top(p, q, k) == pytest.approx(accepted("naive", name, k), abs=1e-12)
    assert optima.accepted_rrs(p, q, k) == pytest.approx(accepted("rrs", name, k), abs=1e-9)
    assert optima.accepted_kseq(p, q, k) == pytest.approx(accepted("kseq", name, k), abs=1e-7)
    for randoms in (0, 1, 2):
        found = optima.accepted_in_turn(p, q, k, randoms, 800, dice)
        assert found == pytest.approx(accepted("hybrid", name, k, randoms), abs=1e-9 if randoms < 2 else 0.03)
    assert optima.accepted_in_turn(p, q, k, k, 800, dice) == pytest.approx(accepted("rrsw", name, k), abs=0.03)


@counts
@every_law
def test_no_rule_beats_its_bound(name: str, k: int) -> None:
    p, q = laws(name)
    dice = torch.Generator().manual_seed(2)
    slack = 1e-6
    assert optima.accepted_rrs(p, q, k) <= optima.optimum_iid(p, q, k) + slack
    assert optima.accepted_kseq(p, q, k) <= optima.optimum_iid(p, q, k) + slack
    assert optima.accepted_in_turn(p, q, k, 1, 1, dice) <= optima.optimum_hybrid(p, q, k, 1) + slack
    assert optima.accepted_coupled(p, q, [k], 20_000, dice)[0] <= optima.optimum_distinct(p, q, [k])[0] + 0.02


@every_law
def test_the_coupled_rule_by_integration(name: str) -> None:
    """One child: target and draft choose the same token with probability sum 1 / sum max(p_y / p_x, q_y / q_x)."""
    p, q = laws(name)
    both = [x for x in range(len(p)) if p[x] > 0 and q[x] > 0]
    expected = math.fsum(float(1 / torch.maximum(p / p[x], q / q[x]).sum()) for x in both)
    found = optima.accepted_coupled(p, q, [1], 40_000, torch.Generator().manual_seed(3))[0]
    assert found == pytest.approx(expected, abs=0.012)
