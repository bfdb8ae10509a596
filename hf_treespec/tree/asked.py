"""Paths that are to be read for their own sake, and the tree of candidates that takes the rest of the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

from hf_treespec.tree.topology import TokenTree, TreeLimits

__all__ = ["AskedTree", "with_asked"]

_LEAST = 1e-9


@dataclass(frozen=True, slots=True)
class AskedTree:
    """A tree and where its nodes come from.

    Args:
        tree: the whole.
        candidates: per node its index in the tree of candidates; None for one that was only asked for.
        asked: the nodes that were asked for.
    """

    tree: TokenTree
    candidates: tuple[int | None, ...]
    asked: frozenset[int]


def with_asked(tree: TokenTree, asked: Sequence[tuple[Sequence[int], float]], limits: TreeLimits) -> AskedTree:
    """One tree of asked paths and candidates; what both hold is one node.

    The asked paths come first, each whole or, if the limits leave no room for it, not at all. The candidates follow by
    rank as long as there is room. The score of a node is the log of what it is worth in accepted tokens: of its
    estimated acceptance as a candidate, plus what it was asked for.

    Args:
        tree: of candidates, with scores.
        asked: per path its tokens below the root, and the worth of reading one of its nodes in accepted tokens (of
            nodes on several paths the largest counts).
        limits: of the whole.

    Returns:
        A tree within the limits, whose scores never rise along a path.
    """
    tokens, parents, depths = [tree.tokens[0]], [-1], [0]
    below: list[dict[int, int]] = [{}]
    worth = [0.0]
    origin: list[int | None] = [0]

    def add(parent: int, token: int, candidate: int | None) -> int:
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        below[parent][token] = node
        below.append({})
        worth.append(0.0)
        origin.append(candidate)
        return node

    for path, value in asked:
        known, node = 0, 0
        while known < len(path) and path[known] in below[node]:
            node = below[node][path[known]]
            known += 1
        room = len(tokens) - 1 + len(path) - known <= limits.max_nodes and len(path) <= limits.max_depth
        if known < len(path) and not (room and len(below[node]) < limits.max_children):
            continue
        for token in path[known:]:
            node = add(node, token, None)
        while node:
            worth[node] = max(worth[node], value)
            node = parents[node]
    reading = len(tokens)
    place = {0: 0}
    for candidate in tree.by_rank():
        above = place.get(tree.parents[candidate])
        if above is None:
            continue
        same = below[above].get(tree.tokens[candidate])
        if same is not None:
            origin[same] = candidate
            place[candidate] = same
        elif (
            len(tokens) <= limits.max_nodes
            and depths[above] < limits.max_depth
            and len(below[above]) < limits.max_children
        ):
            place[candidate] = add(above, tree.tokens[candidate], candidate)
    scores = [0.0]
    for node in range(1, len(tokens)):
        was = origin[node]
        accepted = 0.0 if was is None or tree.scores is None else exp(tree.scores[was])
        scores.append(min(log(max(accepted + worth[node], _LEAST)), scores[parents[node]]))
    whole = TokenTree(tuple(tokens), tuple(parents), tuple(scores))
    return AskedTree(whole, tuple(origin), frozenset(range(1, reading)))
