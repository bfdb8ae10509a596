"""Gumbel noise: the generator against plain integers, the law against statistics with fixed seeds.

Bounds are such that a right generator fails less than once in 10^4 seeds; the seeds are fixed.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_treespec.verify import GumbelNoise, text_streams
from measures import chi_square

WORD = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


class SplitMix64:
    """The published generator (Steele, Lea and Flood 2014) on Python integers."""

    def __init__(self, state: int) -> None:
        self.state = state

    def next(self) -> int:
        self.state = (self.state + GAMMA) & WORD
        z = self.state
        for shift, factor in MIX:
            z = (z ^ z >> shift) * factor & WORD
        return z


def state_whose_first_output_is(output: int) -> int:
    """Every step of the mix has an inverse."""
    z = output
    for shift, factor in reversed(MIX):
        z = z * pow(factor, -1, 1 << 64) & WORD
        z = z ^ z >> shift ^ z >> 2 * shift
    return z - GAMMA & WORD


def stream_key(*parts: int) -> int:
    key = 0
    for part in parts:
        key = SplitMix64(key + part & WORD).next()
    return key


def gumbel(bits: int) -> float:
    return -math.log(-math.log(((bits >> 12) + 0.5) / 2**52))


def test_the_reference_here_is_the_published_stream() -> None:
    stream = SplitMix64(1234567)
    assert [stream.next() for _ in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert SplitMix64(state_whose_first_output_is(98765)).next() == 98765


@pytest.mark.parametrize(
    ("seed", "row", "position"), [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**63 - 1, 31, 1_000_000), (42, 7, 513)]
)
def test_the_noise_is_a_splitmix_stream_of_its_place(seed: int, row: int, position: int) -> None:
    stream = SplitMix64(stream_key(seed, row, position))
    wanted = [gumbel(stream.next()) for _ in range(300)]
    found = GumbelNoise(seed, 300).at(row, position)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bits", [0, WORD])
def test_the_outermost_bits_give_the_outermost_finite_values(bits: int, dtype: torch.dtype) -> None:
    # A position whose first lane has just these bits.
    position = state_whose_first_output_is(state_whose_first_output_is(bits)) - stream_key(5, 0) & WORD
    noise = GumbelNoise(5, 3)
    noise._lanes.dtype = dtype  # float32 is what devices without float64 get
    value = float(noise.at(0, position)[0])
    digits = 53 if dtype == torch.float64 else 24
    rarest = -math.log(-math.log1p(-(2.0**-digits))) if bits else -math.log(digits * math.log(2))
    assert value == pytest.approx(rarest, rel=1e-6)


def test_float32_noise_is_the_same_noise_on_a_coarser_grid() -> None:
    coarse = GumbelNoise(3, 10_000)
    coarse._lanes.dtype = torch.float32
    fine = GumbelNoise(3, 10_000).at(2, 9)
    # In the probability domain the two differ by at most half a step of each grid, plus float32 rounding.
    off = (torch.exp(-torch.exp(-coarse.at(2, 9).double())) - torch.exp(-torch.exp(-fine))).abs().max()
    assert coarse.at(2, 9).dtype == torch.float32 and off < 2**-22


def test_neither_order_nor_company_nor_vocabulary_changes_the_noise() -> None:
    places = [(row, position) for row in range(3) for position in (0, 5, 6, 40)]
    alone = {place: GumbelNoise(11, 50).at(*place).clone() for place in places}
    together = GumbelNoise(11, 80)
    for place in reversed(places):
        assert torch.equal(together.at(*place)[:50], alone[place])
    for place in places:
        assert torch.equal(together.at(*place)[:50], alone[place])


def test_noise_is_kept_until_it_is_forgotten_and_comes_back_equal() -> None:
    noise = GumbelNoise(1, 20)
    places = [(row, position) for row in (0, 1) for position in (3, 4, 5)]
    first = {place: noise.at(*place) for place in places}
    assert all(noise.at(*place) is first[place] for place in places)
    noise.forget(0, 5)
    for place in places:
        again = noise.at(*place)
        assert torch.equal(again, first[place])
        assert (again is first[place]) == (place not in {(0, 3), (0, 4)})


def test_no_two_places_and_no_two_lanes_share_a_value() -> None:
    # 52-bit values: a collision among these 2^18 has probability 10^-5; a coarser grid or a shared stream has many.
    values = torch.cat(
        [
            GumbelNoise(seed, 64).at(row, position)
            for seed in range(8)
            for row in range(8)
            for position in (*range(48), *range(2**31, 2**31 + 16))
        ]
    )
    assert values.unique().numel() == values.numel() == 2**18


MILLION = 1_000_000


def over_lanes() -> Tensor:
    return GumbelNoise(2024, MILLION).at(0, 0)


def over_places() -> Tensor:
    return torch.cat([GumbelNoise(2025, 500).at(row, position) for row in range(20) for position in range(100)])


@pytest.mark.parametrize("draw", [over_lanes, over_places])
def test_values_follow_the_standard_gumbel_law(draw: object) -> None:
    values = draw()  # type: ignore[operator]
    n = values.numel()
    assert n == MILLION
    uniform = torch.exp(-torch.exp(-values.sort().values))
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = max(float((steps[1:] - uniform).max()), float((uniform - steps[:-1]).max()))
    assert distance * math.sqrt(n) < 2.23  # Kolmogorov's law: p = 10^-4
    assert abs(float(values.mean()) - 0.5772156649) < 4 * (math.pi / math.sqrt(6)) / math.sqrt(n)
    assert abs(float(values.var()) - math.pi**2 / 6) < 4 * math.sqrt(4.4 * (math.pi**2 / 6) ** 2 / n)
    # The largest of n lies around log n; above 17.3 a 24-bit grid has nothing.
    assert math.log(n) - 2.5 < float(values.max()) < math.log(n) + 10
    assert values.unique().numel() == n


def test_the_far_tail_is_filled() -> None:
    # P(G > 12) = 6.1e-6 per lane, so among 4 million lanes there are 24.6 on average.
    far = sum(int((GumbelNoise(seed, MILLION).at(0, 0) > 12).sum()) for seed in range(4))
    assert 24.6 - 4 * math.sqrt(24.6) < far < 24.6 + 4 * math.sqrt(24.6)


def test_choosing_with_the_noise_follows_a_skewed_law() -> None:
    law = torch.tensor([0.55, 0.25, 0.12, 0.05, 0.02, 0.0089, 0.001, 0.0001], dtype=torch.float64)
    blocks, positions = 10, 5000  # a position serves as ten draws, from ten blocks of lanes
    n = 4 * positions * blocks
    counts = torch.zeros(len(law), dtype=torch.float64)
    for row in range(4):
        noise = GumbelNoise(77, blocks * len(law))
        draws = torch.stack([noise.at(row, position) for position in range(positions)]).view(-1, len(law))
        counts += torch.bincount((law.log() + draws).argmax(-1), minlength=len(law))
    expected = law * n
    assert counts.sum() == n == 200_000
    assert float(((counts - expected) ** 2 / expected).sum()) < 29.9  # chi-square, 7 degrees of freedom: p = 10^-4
    assert 4 <= counts[-1] <= 40  # 20 expected


def test_neighbours_are_not_correlated() -> None:
    n = 200_000
    here = GumbelNoise(9, n).at(4, 100)
    others = {
        "position": GumbelNoise(9, n).at(4, 101),
        "row": GumbelNoise(9, n).at(5, 100),
        "seed": GumbelNoise(10, n).at(4, 100),
        "swapped": GumbelNoise(9, n).at(100, 4),
        "lane": here.roll(1),
        "two lanes": here.roll(2),
    }
    for name, other in others.items():
        pair = torch.stack([torch.exp(-torch.exp(-here)), torch.exp(-torch.exp(-other))])
        # Of the values, and of their distance from the middle, which shows common size without common sign.
        for what in (pair, (pair - 0.5).abs()):
            assert abs(float(torch.corrcoef(what)[0, 1])) < 4 / math.sqrt(n), name


def uniform(noise: Tensor) -> Tensor:
    return torch.exp(-torch.exp(-noise))


@pytest.mark.parametrize("differ", ["position", "row", "seed", "far position", "neighbouring lane"])
def test_pairs_of_values_fill_the_square_evenly(differ: str) -> None:
    """Independence beyond correlation: 16 x 16 cells of two values whose places differ in one thing."""
    lanes, cells = 4_000, 16
    counts = torch.zeros(cells * cells)
    for place in range(60):
        here = GumbelNoise(5, lanes).at(3, place)
        there = {
            "position": lambda: GumbelNoise(5, lanes).at(3, place + 1),  # noqa: B023
            "row": lambda: GumbelNoise(5, lanes).at(4, place),  # noqa: B023
            "seed": lambda: GumbelNoise(6, lanes).at(3, place),  # noqa: B023
            "far position": lambda: GumbelNoise(5, lanes).at(3, place + 2**32),  # noqa: B023
            "neighbouring lane": lambda: here.roll(1),  # noqa: B023
        }[differ]()
        pair = [(uniform(noise) * cells).long().clamp(max=cells - 1) for noise in (here, there)]
        counts += torch.bincount(pair[0] * cells + pair[1], minlength=cells * cells)
    p, freedom = chi_square(counts.tolist(), [1 / cells**2] * cells**2)
    assert freedom == 255 and p > 1e-4


def test_one_lane_over_positions_is_as_random_as_one_position_over_lanes() -> None:
    noise = GumbelNoise(31, 3)
    values = uniform(torch.stack([noise.at(0, position)[1] for position in range(20_000)]))
    counts = torch.bincount((values * 50).long(), minlength=50)
    assert chi_square(counts.tolist(), [1 / 50] * 50)[0] > 1e-4
    runs = (values[1:] > values[:-1]).long()
    # Of three values in a row, each of the six orders is as likely.
    triples = values[: len(values) // 3 * 3].view(-1, 3)
    orders = (triples.argsort(-1) * torch.tensor([9, 3, 1])).sum(-1)
    kinds = orders.unique(return_counts=True)[1].tolist()
    assert len(kinds) == 6 and chi_square(kinds, [1 / 6] * 6)[0] > 1e-4
    assert abs(float(runs.float().mean()) - 0.5) < 4 * math.sqrt(1 / 12 / len(runs))


def test_resolution_is_finer_than_32_bits() -> None:
    """What lies below the 32nd bit of the uniform numbers is random too: no cell of it is preferred."""
    values = uniform(torch.cat([GumbelNoise(8, 100_000).at(row, 0) for row in range(2)]))
    # Where the double logarithm of float64 keeps these bits.
    values = values[(values > 0.2) & (values < 0.5)]
    below = values * 2.0**32 % 1.0
    counts = torch.bincount((below * 32).long(), minlength=32)
    assert chi_square(counts.tolist(), [1 / 32] * 32)[0] > 1e-4
    # A grid of 24 bits has 2^24 values: a million draws would repeat tens of thousands of them.
    million = GumbelNoise(2, MILLION).at(0, 0)
    assert million.unique().numel() == MILLION


def test_both_tails_are_as_heavy_as_they_should_be() -> None:
    values = torch.cat([GumbelNoise(seed, MILLION).at(0, 0) for seed in (11, 12)])
    n = values.numel()
    for level in (1e-2, 1e-3, 1e-4, 1e-5):
        upper = -math.log(-math.log1p(-level))
        lower = -math.log(-math.log(level))
        for count in (int((values > upper).sum()), int((values < lower).sum())):
            assert abs(count - n * level) < 4 * math.sqrt(n * level) + 1, level


def test_rare_tokens_win_as_often_as_they_should() -> None:
    """A token of probability 2^-20 among others; on a coarse grid it would win too seldom or too often."""
    rare, wanted = 2.0**-12, 2.0**-20
    lanes = int(rare / wanted)
    # Each of 256 rare tokens has 2^-20; together 2^-12.
    law = torch.full((lanes + 1,), wanted, dtype=torch.float64)
    law[0] = 1 - rare
    draws, wins = 60_000, 0
    block = 20
    noise = GumbelNoise(55, block * len(law))
    for position in range(draws // block):
        tokens = (law.log() + noise.at(0, position).view(block, -1)).argmax(-1)
        wins += int((tokens > 0).sum())
    assert abs(wins - draws * rare) < 4 * math.sqrt(draws * rare)


def test_streams_follow_the_prompt_and_tell_copies_apart() -> None:
    one, other = [5, 6, 7], [5, 7, 6]
    streams = text_streams([one, other, one, one, []])
    assert len(set(streams)) == 5
    # Neither the place nor the neighbours matter.
    assert text_streams([other, one]) == [streams[1], streams[0]]
    assert text_streams([[], one, one])[1:] == [streams[0], streams[2]]
    noise = GumbelNoise(3, 40, streams=streams)
    assert torch.equal(noise.at(1, 9), GumbelNoise(3, 40, streams=[streams[1]]).at(0, 9))
    assert not torch.equal(noise.at(0, 9), noise.at(2, 9))
