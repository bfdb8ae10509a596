"""What a tree costs to read, in tokens beside the root, and the part of a tree that is best at a given cost.

Under a mask a tree costs its nodes. Read path by path it costs each node as often as paths run through it, and padding
up to the longest path: there a few long paths are worth more than many short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import Protocol

from hf_treespec.tree.topology import TokenTree

__all__ = ["NODES", "PATHS", "Measure"]


class Measure(Protocol):
    """A way to count."""

    def units(self, tree: TokenTree) -> int:
        """Tokens that a forward reads for the tree beside the one of its root; 0 for a root alone."""

    def kept(self, tree: TokenTree, budgets: Sequence[int]) -> list[list[int]]:
        """Per budget the drafted nodes of the best part of the tree that costs no more; with the root it is a tree.

        Args:
            tree: any tree; scores say what is best, and without them the order of the nodes, or length.
            budgets: ascending units.
        """


class _Nodes:
    """All nodes in one row."""

    def units(self, tree: TokenTree) -> int:
        return tree.drafted

    def kept(self, tree: TokenTree, budgets: Sequence[int]) -> list[list[int]]:
        ranked = tree.by_rank()
        return [ranked[:budget] for budget in budgets]


class _Paths:
    """Each path from the root to a leaf as a row, all rows as long as the longest."""

    def units(self, tree: TokenTree) -> int:
        leaves = sum(not tree.children(node) for node in range(len(tree)))
        return leaves * (tree.max_depth + 1) - 1

    def kept(self, tree: TokenTree, budgets: Sequence[int]) -> list[list[int]]:
        best: list[tuple[float, list[int]]] = [(0.0, []) for _ in budgets]
        for depth in range(1, tree.max_depth + 1):
            chains = _chains(tree, depth)
            for place, budget in enumerate(budgets):
                taken = chains[: (budget + 1) // (depth + 1)]
                gain = sum(value for value, _ in taken)
                if gain > best[place][0]:
                    best[place] = gain, [node for _, chain in taken for node in chain]
        return [nodes for _, nodes in best]


def _chains(tree: TokenTree, depth: int) -> list[tuple[float, list[int]]]:
    """The tree down to a depth, taken apart into chains: the first n hold the most that n paths can, for every n.

    Returns:
        Per chain the expected accepted nodes, falling, and its nodes from the top.
    """
    worth = [1.0 if tree.scores is None else exp(score) for score in (tree.scores or [0.0] * len(tree))]
    below = [0.0] * len(tree)
    heavy = [-1] * len(tree)
    for node in range(len(tree) - 1, 0, -1):
        if tree.depths[node] > depth:
            continue
        below[node] += worth[node]
        parent = tree.parents[node]
        # `below` of a parent holds its best child's until the parent's own turn; of equals the earlier.
        if heavy[parent] < 0 or below[node] >= below[heavy[parent]]:
            heavy[parent], below[parent] = node, below[node]
    heads = [
        node
        for node in range(1, len(tree))
        if tree.depths[node] <= depth and (tree.parents[node] == 0 or heavy[tree.parents[node]] != node)
    ]
    out = []
    for head in sorted(heads, key=lambda node: -below[node]):
        chain, node = [], head
        while node >= 0:
            chain.append(node)
            node = heavy[node]
        out.append((below[head], chain))
    return out


NODES: Measure = _Nodes()
PATHS: Measure = _Paths()
