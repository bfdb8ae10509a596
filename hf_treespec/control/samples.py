"""What a judged tree tells: of each child of a node that was reached, how likely it was right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hf_treespec.tree import TokenTree

__all__ = ["Sample", "by_chance", "by_text"]


class Sample(NamedTuple):
    """One child of a node that was reached, or might have been.

    Attributes:
        node: the child.
        depth: of its parent.
        rank: among its siblings, from 0 on.
        weight: probability that its parent is accepted.
        hit: probability that it is accepted where its parent is.
    """

    node: int
    depth: int
    rank: int
    weight: float
    hit: float


def by_text(tree: TokenTree, ahead: Sequence[int]) -> Iterator[Sample]:
    """Samples of the nodes that the text went through: each child of them was right, or was not.

    So it is under the noise that target and draft share and under greedy decoding: given the noise nothing is left to
    chance. It holds for children that were proposed and not scored, too.

    Args:
        tree: with children in the order of their ranks.
        ahead: tokens behind the root, as many as are known.
    """
    node: int | None = 0
    for depth, token in enumerate(ahead):
        assert node is not None
        for rank, child in enumerate(tree.children(node)):
            yield Sample(child, depth, rank, 1.0, float(tree.tokens[child] == token))
        node = tree.child(node, token)
        if node is None:
            return


def by_chance(tree: TokenTree, taken: Sequence[float]) -> Iterator[Sample]:
    """Samples of all nodes, visited or not, where coins decide (soft labels): by what the coins made likely.

    Args:
        tree: as it was scored, with children in the order of their ranks.
        taken: per node the probability that it is accepted where its parent is; see `hf_treespec.verify.taken`.
    """
    reach = [1.0] * len(tree)
    for node in range(len(tree)):
        for rank, child in enumerate(tree.children(node)):
            reach[child] = reach[node] * taken[child]
            yield Sample(child, tree.depths[node], rank, reach[node], taken[child])
