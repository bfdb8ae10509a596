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
def _shape(table: tuple[tuple[float, ...], ...], max_nodes: int, max_depth: int) -> TokenTree:
    ranks, parents = [0], [-1]
    # An entry is (-value, node, rank): "the child of that rank below that node would be accepted with `value`".
    # Pushing a rank only after its predecessor keeps siblings prefix-closed.
    heap = [(-table[0][0], 0, 0)] if max_depth else []
    depths, values = [0], [1.0]
    while heap and len(ranks) - 1 < max_nodes:
        value, parent, rank = heapq.heappop(heap)
        node = len(ranks)
        ranks.append(rank)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        values.append(-value)
        if depths[node] < max_depth:
            below = table[min(depths[node], len(table) - 1)]
            heapq.heappush(heap, (value * below[0], node, 0))
        row = table[min(depths[parent], len(table) - 1)]
        if rank + 1 < len(row):
            heapq.heappush(heap, (-values[parent] * row[rank + 1], parent, rank + 1))
    return TokenTree(tuple(ranks), tuple(parents))


def best_first_shape(limits: TreeLimits, acceptance: Sequence[float] | None = None) -> TokenTree:
    """The shape of at most `limits.max_nodes` nodes with the largest expected accepted length.

    For acceptance that does not rise with the rank, taking nodes off a heap by the product of the acceptances on
    their path gives the optimum of Sequoia's dynamic programme (Chen et al. 2024) in O(N log N): no child is worth
    more than its parent, nor than an earlier sibling, so that the N nodes of the most worth are a tree. So it is too
    where acceptance is measured depth by depth (`limits.ranks`), whether it falls with the depth or not.

    Args:
        limits: the budget.
        acceptance: P(accepted | parent accepted) per rank at all depths, non-increasing; default `limits.ranks`, and
            without them `rank_acceptance`.

    Returns:
        A tree whose tokens are ranks.
    """
    if acceptance is not None:
        table: tuple[tuple[float, ...], ...] = (tuple(acceptance),)
    else:
        table = limits.ranks or (rank_acceptance(limits.max_children),)
    return _shape(tuple(row[: limits.max_children] for row in table), limits.max_nodes, limits.max_depth)
