"""Static tree shapes: which ranks of which nodes are worth a node of the budget.

A shape is a `TokenTree` whose "tokens" are ranks: child of rank 0 is the draft's first choice, and so on.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

from hf_treespec.tree.topology import TokenTree, TreeLimits

__all__ = ["best_first_shape", "rank_acceptance"]


def rank_acceptance(max_children: int, *, first: float = 0.6, ratio: float = 0.35) -> tuple[float, ...]:
    """A prior for P(the target's token is the draft's choice of rank j), geometric in j.

    Args:
        max_children: number of ranks.
        first: probability of rank 0.
        ratio: probability of rank j + 1 over that of rank j, below 1.

    Returns:
        One probability per rank; their sum stays below 1 for the defaults.
    """
    return tuple(first * ratio**rank for rank in range(max_children))


@lru_cache(maxsize=256)
def _shape(acceptance: tuple[float, ...], max_nodes: int, max_depth: int) -> TokenTree:
    ranks, parents = [0], [-1]
    # An entry is (-value, node, rank): "the child of that rank below that node would be accepted with `value`".
    # Pushing a rank only after its predecessor keeps siblings prefix-closed.
    heap = [(-acceptance[0], 0, 0)] if max_depth else []
    depths, values = [0], [1.0]
    while heap and len(ranks) - 1 < max_nodes:
        value, parent, rank = heapq.heappop(heap)
        node = len(ranks)
        ranks.append(rank)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        values.append(-value)
        if depths[node] < max_depth:
            heapq.heappush(heap, (value * acceptance[0], node, 0))
        if rank + 1 < len(acceptance):
            heapq.heappush(heap, (-values[parent] * acceptance[rank + 1], parent, rank + 1))
    return TokenTree(tuple(ranks), tuple(parents))


def best_first_shape(limits: TreeLimits, acceptance: Sequence[float] | None = None) -> TokenTree:
    """The shape of at most `limits.max_nodes` nodes with the largest expected accepted length.

    For acceptance that does not rise with the rank, taking nodes off a heap by the product of the acceptances on
    their path gives the optimum of Sequoia's dynamic programme (Chen et al. 2024) in O(N log N).

    Args:
        limits: the budget.
        acceptance: P(accepted | parent accepted) per rank, non-increasing; default `rank_acceptance`.

    Returns:
        A tree whose tokens are ranks.
    """
    values = tuple(acceptance) if acceptance is not None else rank_acceptance(limits.max_children)
    return _shape(values[: limits.max_children], limits.max_nodes, limits.max_depth)
