"""Gumbel noise: the generator against plain integers, the law against statistics with fixed seeds.

Bounds are such that a right generator fails less than once in 10^4 seeds; the seeds are fixed.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_treespec.verify import GumbelNoise, text_streams

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
