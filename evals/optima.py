"""The most that any verification can accept at one node, given how its children are drawn, and what each rule accepts.

If all drafts lie in a set B, no token outside of it can be accepted. So by min-cut the optimum over all couplings of
the target's law p with the draft's children is 1 + min over B of p(B) - Pr(all children in B), and prefixes of the
tokens sorted by p / q suffice for draws from q (Hu et al. 2025, arXiv 2502.18779).

All laws are float64 `[V]`; k is the number of children. Functions named `accepted_` give what a rule accepts with that
law of children, `optimum_` the bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "accepted_coupled",
    "accepted_in_turn",
    "accepted_kseq",
    "accepted_rrs",
    "accepted_top",
    "optimum_distinct",
    "optimum_hybrid",
    "optimum_iid",
]

# Clocks ring between these times, in units of the mean of the whole law and of what is left for the last draw.
_FIRST, _LAST, _NODES = 1e-9, 60.0, 192
# A clock at so many times its mean has rung.
_CERTAIN = 35.0


def _by_ratio(p_V: Tensor, q_V: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.argsort(p_V / q_V.clamp(min=torch.finfo(q_V.dtype).tiny))
    return p_V[order], q_V[order]


def _bound(p_V: Tensor, all_in_V: Tensor, offset: float = 0.0) -> float:
    """1 + min over prefixes B, the empty one included, of p(B) - Pr(all children in B)."""
    return 1.0 + min(0.0, offset + float((p_V.cumsum(0) - all_in_V).min()))


def optimum_iid(p_V: Tensor, q_V: Tensor, k: int) -> float:
    """Bound for k draws from q with repetition."""
    p_V, q_V = _by_ratio(p_V, q_V)
    return _bound(p_V, q_V.cumsum(0).clamp(max=1.0) ** k)


def optimum_distinct(p_V: Tensor, q_V: Tensor, counts: Sequence[int]) -> list[float]:
    """Bounds for k draws from q without repetition, for each k; all tokens if there are no more."""
    p_sorted_V, q_sorted_V = _by_ratio(p_V, q_V)
    all_in = _all_distinct_in(q_sorted_V, counts)
    few = int((q_V > 0).sum())
    return [
        accepted_top(p_V, q_V, k) if few <= k else _bound(p_sorted_V, in_V)
        for k, in_V in zip(counts, all_in, strict=True)
    ]


def _all_distinct_in(q_V: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Pr(k draws without repetition lie in the prefix B that ends at each token), `[V]`, for each k.

    Give token x an Exp(q_x) clock: the draws are the first k to ring, and not all of them lie in B if the first clock
    outside rings while fewer than k of B have rung. With r = 1 - q(B) that is the integral over t of
    r e^(-r t) Pr(fewer than k of B have rung by t); with the elementary symmetric polynomials e_j of expm1(q_x t) over
    B, the probability is e^(-q(B) t) times the sum over j < k of e_j. Clocks that have rung for certain would overflow
    there and are counted instead. Gauss-Legendre in log t.
    """
    most = max(counts)
    outside_V = torch.cat([q_V[1:].flip(0).cumsum(0).flip(0), q_V.new_zeros(1)])
    # By then the last of the draws has rung: the clock of whatever lies behind the most likely tokens.
    last = _LAST * (1.0 + 1.0 / max(float(q_V.sort(descending=True).values[most - 1 :].sum()), 1e-12))
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    low, high = np.log(_FIRST), np.log(last)
    missed = [torch.zeros_like(q_V) for _ in counts]
    for node, weight in zip(nodes, weights, strict=True):
        t = float(np.exp((low + high) / 2 + (high - low) / 2 * node))
        certain_V = q_V * t > _CERTAIN
        open_V = q_V.masked_fill(certain_V, 0.0)
        rung_V = torch.expm1(open_V * t)
        ways_V, fewer = torch.ones_like(q_V), [torch.zeros_like(q_V), torch.ones_like(q_V)]
        for _ in range(1, most):
            before_V = torch.cat([ways_V.new_zeros(1), ways_V[:-1]]) if len(fewer) > 2 else ways_V
            ways_V = (rung_V * before_V).cumsum(0)
            fewer.append(fewer[-1] + ways_V)
        none_V = outside_V * torch.exp(-t * (outside_V + open_V.cumsum(0)))
        scale = float(weight * (high - low) / 2) * t
        spare_V = certain_V.cumsum(0)
        for place, k in enumerate(counts):
            ways = torch.stack(fewer[: k + 1]).gather(0, (k - spare_V).clamp(min=0)[None])[0]
            missed[place] += scale * none_V * ways
    return [(1.0 - missed_V).clamp(0.0, 1.0) for missed_V in missed]


def optimum_hybrid(p_V: Tensor, q_V: Tensor, k: int, randoms: int) -> float:
    """Bound for the k - `randoms` most likely tokens of q and `randoms` distinct draws from the rest of it."""
    randoms = min(randoms, k)
    top = q_V.topk(k - randoms).indices
    rest_V = q_V.index_fill(0, top, 0.0)
    mass = float(rest_V.sum())
    if not randoms or mass <= 0.0:
        return float(p_V[q_V.topk(min(k, int((q_V > 0).sum()))).indices].sum())
    # A set without all the top ones never holds all children: then the empty set is the least.
    rest_p = p_V.index_fill(0, top, 0.0)
    rest_p, rest_q = _by_ratio(rest_p, rest_V / mass)
    if int((rest_q > 0).sum()) <= randoms:
        return float(p_V[top].sum() + rest_p[rest_q > 0].sum())
    all_in = rest_q.cumsum(0) if randoms == 1 else _all_distinct_in(rest_q, [randoms])[0]
    return _bound(rest_p, all_in, offset=float(p_V[top].sum()))


def accepted_top(p_V: Tensor, q_V: Tensor, k: int) -> float:
    """Target sampling with the k most likely tokens of q, which is optimal for them."""
    return float(p_V[q_V.topk(min(k, int((q_V > 0).sum()))).indices].sum())


def accepted_rrs(p_V: Tensor, q_V: Tensor, k: int) -> float:
    """Recursive rejection sampling with k draws from q with repetition: the residuals do not depend on the draws."""
    missed, residual_V = 1.0, p_V
    for _ in range(k):
        passed = float(torch.minimum(residual_V, q_V).sum())
        missed *= 1.0 - passed
        left_V = (residual_V - q_V).clamp(min=0.0)
        mass = left_V.sum()
        if float(mass) <= 1e-12:
            return 1.0
        residual_V = left_V / mass
    return 1.0 - missed


def accepted_kseq(p_V: Tensor, q_V: Tensor, k: int) -> float:
    """K-SEQ with k draws from q with repetition: every draw passes alike, with probability b."""
    low, high = 1.0, float(k)
    for _ in range(60):
        rho = (low + high) / 2
        b = float(torch.minimum(p_V / rho, q_V).sum())
        low, high = (rho, high) if 1 - (1 - b) ** k > rho * b else (low, rho)
    return 1 - (1 - float(torch.minimum(p_V / high, q_V).sum())) ** k


def accepted_in_turn(p_V: Tensor, q_V: Tensor, k: int, randoms: int, draws: int, generator: torch.Generator) -> float:
    """Distinct random children first, one-hot tests of the most likely ones after them, each tested in turn.

    `randoms` = k is RRSw, 1 the hybrid of Hu et al., 0 target sampling. The mean over some draws of the children that
    were rejected; each last random child, and the top ones behind it, are integrated out.

    Args:
        p_V: the target's law.
        q_V: the draft's.
        k: children.
        randoms: random ones among them.
        draws: samples of the rejected ones; one suffices for `randoms` up to 1.
        generator: of the samples.
    """
    randoms = min(randoms, k)
    top = q_V.topk(min(k - randoms, int((q_V > 0).sum()))).indices
    total = 0.0
    rounds = draws if randoms > 1 else 1
    for _ in range(rounds):
        rest_V, residual_V, missed = q_V.index_fill(0, top, 0.0), p_V, 1.0
        for place in range(randoms):
            mass = float(rest_V.sum())
            if mass <= 0.0:
                break
            law_V = rest_V / mass
            passed_V = torch.minimum(residual_V, law_V)
            missed *= 1.0 - float(passed_V.sum())
            left_V = (residual_V - law_V).clamp(min=0.0)
            if missed <= 1e-12 or float(left_V.sum()) <= 1e-12:
                missed = 0.0
                break
            residual_V = left_V / left_V.sum()
            if place + 1 < randoms:
                # The law of a child, given that it was rejected.
                rejected = int(torch.multinomial((law_V - passed_V).clamp(min=0.0), 1, generator=generator))
                rest_V = rest_V.index_fill(0, torch.tensor([rejected]), 0.0)
        total += 1.0 - missed * (1.0 - float(residual_V[top].sum()))
    return total / rounds


def accepted_coupled(
    p_V: Tensor, q_V: Tensor, counts: Sequence[int], draws: int, generator: torch.Generator
) -> list[float]:
    """The share of draws of a shared Gumbel noise whose best token under p is among the k best under q, for each k.

    Args:
        p_V: the target's law.
        q_V: the draft's.
        counts: values of k.
        draws: of the noise.
        generator: of the noise.
    """
    noise_NV = -torch.empty(draws, len(p_V), dtype=p_V.dtype).exponential_(generator=generator).log()
    chosen_N1 = (p_V.log() + noise_NV).argmax(-1, keepdim=True)
    perturbed_NV = q_V.log() + noise_NV
    own_N1 = perturbed_NV.gather(1, chosen_N1)
    # The rank without a sort. A token of no mass is never proposed.
    rank_N = (perturbed_NV > own_N1).sum(-1)
    proposed_N = own_N1[:, 0].isfinite()
    return [float(((rank_N < k) & proposed_N).double().mean()) for k in counts]
