"""Losslessness by enumeration: the law of at least three tokens under every rule is the target's, to 1e-12."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from exact.laws import all_coins, law_of_target, law_of_text, planned, total_variation, worst
from exact.reference import reference, winner_chances
from exact.worlds import World, adapted, all_trees, bush
from hf_treespec.errors import TreeSpecError
from hf_treespec.rules import RULES
from hf_treespec.tree import TokenTree
from hf_treespec.verify import DraftLaws, Plan, draw, expected_accepted, plan, post_order, winners

LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]
WORLDS = {
    "apart": World(seed=1, apart=1.2),
    "close": World(seed=2, apart=0.3),
    "same": World(seed=3, apart=0.0),
    "four": World(seed=4, vocab=4, apart=1.0),
    "sharp": World(seed=5, spread=3.0, apart=2.0),
    "target_zeros": World(seed=6, vocab=4, target_zeros=2),
    "draft_zeros": World(seed=7, vocab=4, draft_zeros=2),
    "both_zeros": World(seed=8, vocab=4, target_zeros=1, draft_zeros=1),
    "disjoint": World(seed=9, vocab=4, disjoint=True),
    # With repeated draws too siblings and their children are tried in these: four tokens have too many outcomes.
    "three_zeros": World(seed=12, target_zeros=1, draft_zeros=1),
    "three_draft_zeros": World(seed=13, draft_zeros=1),
    "penalty": World(seed=10, penalty=0.2),
    "eos": World(seed=11, eos=1),
}
# For a chain rule a bush is a chain.
BUSHES = {"2-1": (2, 1), "1-2": (1, 2), "3": (3,), "1-1-1": (1, 1, 1), "more_than_there_are": (5,)}


def growth_of(name: str, counts: tuple[int, ...]):
    return bush(*(min(count, 1) if RULES[name].chain else count for count in counts))


@pytest.mark.parametrize("world", list(WORLDS))
@pytest.mark.parametrize("name", LOSSLESS)
def test_the_text_follows_the_target(name: str, world: str) -> None:
    rule, where = RULES[name], WORLDS[world]
    for label, counts in BUSHES.items():
        if label == "more_than_there_are" and rule.draws == "iid":
            # Draws with repetition have V ** k outcomes.
            counts = (where.vocab + 1,)
        if where.vocab == 4 and label in ("2-1", "1-2") and rule.draws == "iid":
            counts = (1, 1)
        joint = law_of_text(rule, where, growth_of(name, counts), 3)
        assert abs(math.fsum(joint.values()) - 1) < 1e-12, label
        assert worst(joint, law_of_target(where, 3)) < 1e-12, label


@pytest.mark.parametrize("randoms", [0, 1, 2])
@pytest.mark.parametrize("name", ["hybrid", "hybrid-joint"])
def test_hybrids_with_any_number_of_random_children(name: str, randoms: int) -> None:
    for world in (World(seed=21, vocab=4, apart=1.0), World(seed=22, vocab=4, draft_zeros=2)):
        for counts in ((3, 1), (2, 2), (1, 1)):
            joint = law_of_text(RULES[name], world, bush(*counts), 3, randoms=randoms)
            assert worst(joint, law_of_target(world, 3)) < 1e-12


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", LOSSLESS)
def test_growth_may_depend_on_all_that_was_drawn(name: str, seed: int) -> None:
    """Where to grow next and how many children to draw there goes by a hash of the whole tree."""
    rule, world = RULES[name], World(seed=30 + seed, apart=1.0, penalty=0.5)
    growth = adapted(seed, 1 if rule.chain else 2, 3 if rule.chain else 2, 4)
    joint = law_of_text(rule, world, growth, 4)
    assert worst(joint, law_of_target(world, 4)) < 1e-12


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if not rule.lossless])
def test_a_rule_that_says_it_is_lossy_is(name: str) -> None:
    found = [
        total_variation(law_of_text(RULES[name], world, bush(2, 1), 3), law_of_target(world, 3))
        for world in WORLDS.values()
    ]
    assert max(found) > 0.05


def test_typical_acceptance_goes_by_the_smaller_of_two_thresholds() -> None:
    """0.09, or 0.3 exp(-H) where the target is less sure."""
    # 0.3 exp(-H) is 0.15 for the first and 0.015 for the second.
    sure, unsure = [0.08, 0.1, 0.8, 0.02], [1 / 20] * 20
    for law, token, accepted in ((sure, 0, 0.0), (sure, 1, 1.0), (sure, 2, 1.0), (unsure, 0, 1.0)):
        target = torch.tensor([[law, law]], dtype=torch.float64)
        found = plan(RULES["typical-lossy"], [TokenTree.chain((0, token))], target)
        assert found.accept_BN[0, 1] == accepted, (law, token)


@pytest.mark.parametrize("world", ["apart", "sharp", "both_zeros", "same"])
@pytest.mark.parametrize("name", LOSSLESS)
def test_the_plan_is_that_of_the_reference(name: str, world: str) -> None:
    """Tensor by tensor, in batches of trees of unequal size."""
    rule, where = RULES[name], WORLDS[world]
    growths = [adapted(seed, 1 if rule.chain else 2, 3, 3) for seed in range(4)]
    trees = [tree for growth in growths for tree, _ in itertools.islice(all_trees(where, rule, growth, (0,)), 100)]
    assert len({len(tree) for tree in trees}) > 1
    found = planned(rule, trees, where, (0,))
    for row, tree in enumerate(trees):
        expected = reference(rule, tree, where, (0,))
        assert found.accept_BN[row, : len(tree)].tolist() == pytest.approx(expected.accept, abs=1e-8), tree
        for node, law in enumerate(expected.residual):
            # A residual of no mass is never drawn from.
            if winner_chances(rule, tree, expected.accept)[node] > 1e-9:
                assert found.residual_BNV[row, node].tolist() == pytest.approx(law, abs=1e-8), (tree, node)


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_law_counts_by_its_shares(name: str) -> None:
    """Twice the draft's weights are the same law, and the same plan."""
    tree = TokenTree((0, 1, 2), (-1, 0, 0), sampled=frozenset({1, 2}))
    target = torch.tensor([[[0.2, 0.5, 0.3]] * 3], dtype=torch.float64)
    law = torch.tensor([[0.3, 0.3, 0.4]], dtype=torch.float64)
    one, twice = (plan(RULES[name], [tree], target, DraftLaws(law * times, [{0: 0}])) for times in (1, 2))
    assert torch.allclose(one.accept_BN, twice.accept_BN) and torch.allclose(one.residual_BNV, twice.residual_BNV)


@pytest.mark.parametrize("name", LOSSLESS)
def test_random_children_without_their_law_are_refused(name: str) -> None:
    tree = TokenTree((0, 1, 2, 1), (-1, 0, 1, 2), sampled=frozenset({1, 2}))
    target = torch.full((1, 4, 3), 1 / 3, dtype=torch.float64)
    law = torch.full((1, 3), 1 / 3, dtype=torch.float64)
    for laws, node in ((None, 0), (DraftLaws(law, [{}]), 0), (DraftLaws(law, [{0: 0}]), 1)):
        with pytest.raises(TreeSpecError, match=f"sampled children of node {node} of row 0 and left out the law"):
            plan(RULES[name], [tree], target, laws)
    # A child that was chosen needs none.
    whole = plan(RULES[name], [tree], target, DraftLaws(law, [{0: 0, 1: 0}]))
    assert torch.isfinite(whole.accept_BN).all()


TREE = TokenTree((9, 1, 2, 3, 4, 5, 6), (-1, 0, 0, 1, 1, 2, 5))


def down(passed: tuple[bool, ...], node: int = 0) -> int:
    for child in TREE.children(node):
        if passed[child]:
            return down(passed, child)
    return node


@pytest.mark.parametrize("joint", [False, True])
def test_winners_under_every_outcome_of_the_coins(joint: bool) -> None:
    outcomes = all_coins(len(TREE) - 1)
    coins = torch.tensor([[0.0, *(0.25 if won else 0.75 for won in outcome)] for outcome in outcomes])
    accept = torch.full((len(outcomes), len(TREE)), 0.5)
    accept[:, 0] = 1.0
    law = torch.full((len(outcomes), len(TREE), 2), 0.5)
    found = winners(Plan(accept, law, joint), [TREE] * len(outcomes), coins).tolist()
    order = [3, 4, 1, 6, 5, 2, 0]
    assert post_order(TREE) == order
    for outcome, node in zip(outcomes, found, strict=True):
        passed = (True, *outcome)
        assert node == (next(n for n in order if passed[n]) if joint else down(passed))


@pytest.mark.parametrize("joint", [False, True])
def test_draw_and_the_expected_length(joint: bool) -> None:
    """Rows of unequal size in one batch; token and node come from the same row, and no token without mass."""
    trees = [TREE, TokenTree.chain((9, 1, 2)), TokenTree.root_only(9)]
    generator = torch.Generator().manual_seed(5)
    accept = torch.rand(3, len(TREE), generator=generator, dtype=torch.float64)
    accept[:, 0] = 1.0
    law = torch.zeros(3, len(TREE), 50, dtype=torch.float64)
    for row in range(3):
        for node in range(len(TREE)):
            law[row, node, 7 * row + node] = 1.0
    total = torch.zeros(3)
    rounds, copies = 40, 100
    whole = Plan(accept.repeat(copies, 1), law.repeat(copies, 1, 1), joint)
    for _ in range(rounds):
        coins = torch.rand(3 * copies, len(TREE), generator=generator, dtype=torch.float64)
        noise = -(-torch.rand(3 * copies, 50, generator=generator, dtype=torch.float64).log()).log()
        for place, (node, token, chances) in enumerate(draw(whole, trees * copies, coins, noise)):
            row = place % 3
            assert token == 7 * row + node
            assert chances == accept[row].tolist()
            total[row] += trees[row].depths[node]
    expected = [
        expected_accepted([row], [tree], joint=joint) for row, tree in zip(accept.tolist(), trees, strict=True)
    ]
    assert (total / (rounds * copies)).tolist() == pytest.approx(expected, abs=0.06)
    assert expected[2] == 0 and expected[0] > 0.3
