"""Children drawn by a rule follow the laws that verification takes them to have, in the order of their draws."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from exact.worlds import families
from hf_treespec.draft import ChildSampler
from hf_treespec.rules import RULES
from hf_treespec.verify import GumbelNoise, RoundNoise

LAW = torch.tensor([0.4, 0.05, 0.0, 0.3, 0.25])
ROUNDS = 5_000


def sampler(rule: str, randoms: int = 1, seed: int = 3) -> ChildSampler:
    return ChildSampler(RULES[rule], randoms, RoundNoise(GumbelNoise(seed, len(LAW))))


@pytest.mark.parametrize(
    ("rule", "count", "randoms"),
    [("naive", 3, 1), ("rrs", 2, 1), ("rrsw", 3, 1), ("hybrid", 3, 1), ("hybrid", 3, 2), ("hybrid", 2, 2),
     ("hybrid", 2, 0), ("hybrid", 1, 2), ("rrsw", 5, 1), ("hybrid", 5, 2)],
)  # fmt: skip
def test_draws_follow_their_law(rule: str, count: int, randoms: int) -> None:
    drawing = sampler(rule, randoms)
    seen: Counter[tuple[tuple[int, bool], ...]] = Counter()
    for position in range(ROUNDS):
        drawing.begin()
        children = drawing.draw(0, position, [4], [count], LAW[None])[0]
        seen[tuple((child.token, child.sampled) for child in children)] += 1
        laws = drawing.laws(1)
        assert (laws is not None) == any(child.sampled for child in children)
        if laws is not None:
            assert torch.equal(laws.laws_RV[laws.rows[0][4]], LAW)
    expected = {
        tuple(family): chance for family, chance in families(RULES[rule].draws, tuple(LAW.tolist()), count, randoms)
    }
    assert set(seen) <= set(expected)
    statistic = sum((seen[key] - ROUNDS * p) ** 2 / (ROUNDS * p) for key, p in expected.items())
    if len(expected) > 1:
        freedom = torch.tensor((len(expected) - 1) / 2)
        assert float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2))) > 1e-5


def test_a_law_with_one_token_has_one_child_at_most() -> None:
    sure = torch.tensor([[0.0, 1.0, 0.0]])
    for rule in ("naive", "rrsw", "traversal"):
        drawing = ChildSampler(RULES[rule], 1, RoundNoise(GumbelNoise(3, 3)))
        assert [child.token for child in drawing.draw(0, 5, [0], [3], sure)[0]] == [1]
    drawing = ChildSampler(RULES["hybrid"], 1, RoundNoise(GumbelNoise(3, 3)))
    # The top ones take all the mass, so that there is none to draw from.
    assert [(child.token, child.sampled) for child in drawing.draw(0, 5, [0], [3], sure)[0]] == [(1, False)]
    assert drawing.laws(1) is None


def gumbel(uniform: Tensor) -> Tensor:
    return -(-uniform.log()).log()


def test_numbers_of_rows_rounds_nodes_and_purposes_are_independent() -> None:
    """Also of those that the coupled rule uses: no correlation among streams that differ in one part of their key."""
    base = GumbelNoise(9, 50_000, streams=[77, 78])
    noise = RoundNoise(base)
    streams: list[Tensor] = [
        base.at(0, 5), base.at(1, 5), noise.of_last(0, 5), noise.of_last(0, 6), noise.of_last(1, 5),
        noise.of_child(0, 5, 0, 0), noise.of_child(0, 5, 0, 1), noise.of_child(0, 5, 1, 0), noise.of_child(0, 6, 0, 0),
        noise.of_child(1, 5, 0, 0), gumbel(noise.coins(0, 5, 50_000)), gumbel(noise.coins(0, 6, 50_000)),
    ]  # fmt: skip
    correlations = torch.corrcoef(torch.stack(streams)) - torch.eye(len(streams))
    assert correlations.abs().max() < 5 / math.sqrt(50_000)


def test_coins_do_not_depend_on_how_many_are_asked_for() -> None:
    noise = RoundNoise(GumbelNoise(9, 4))
    few = noise.coins(0, 3, 5)
    many = noise.coins(0, 3, 400)
    assert len(few) == 5 and len(many) == 400
    assert torch.equal(few, many[:5])
    assert 0.4 < float(many.mean()) < 0.6
