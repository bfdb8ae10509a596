"""Growing one tree per row, level by level, from any source of candidates.

The source is an `Expander`: it is asked once per level for the candidates below the frontier of every row, so a draft
model spends one batched forward per level. All decisions here are deterministic given the candidates; under coupled
verification any pruning and any order is lossless (the verifier never looks at how the tree came about).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hf_treespec.errors import TreeConfigError
from hf_treespec.tree.shapes import best_first_shape
from hf_treespec.tree.topology import TokenTree, TreeBuilder, TreeLimits

__all__ = ["GROWTH_POLICIES", "Candidate", "CountedLevels", "Expander", "grow", "grow_adapted"]

GROWTH_POLICIES = ("static", "best_first", "dynamic")


class Candidate(NamedTuple):
    """One proposed child.

    Attributes:
        token: its id.
        log_confidence: natural log of the confidence that the target agrees (<= 0).
        sampled: whether it was drawn at random.
    """

    token: int
    log_confidence: float
    sampled: bool = False


class Expander(Protocol):
    """Source of candidates."""

    def __call__(
        self, builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[Sequence[Candidate]]]:
        """Candidates for `frontier[row][i]`, best first, distinct tokens; an empty list ends that node.

        Args:
            builders: the trees so far, one per row.
            frontier: node indices to expand, per row; all of one depth. Rows may be empty.

        Returns:
            `result[row][i]`: candidates below node `frontier[row][i]`.
        """
        ...


class CountedLevels:
    """An expander that knows how deep the trees have grown, whatever is kept of them in the end.

    Args:
        expand: the source of candidates.
    """

    def __init__(self, expand: Expander) -> None:
        self._expand = expand
        self._builders: Sequence[TreeBuilder] = ()

    def __call__(
        self, builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[Sequence[Candidate]]]:
        """See `Expander`."""
        self._builders = builders
        return self._expand(builders, frontier)

    @property
    def levels(self) -> int:
        """Depth of the deepest tree so far, nodes that were left out at last included."""
        return max((max(builder.depths) for builder in self._builders), default=0)


def grow(
    roots: Sequence[int], expand: Expander, limits: Sequence[TreeLimits], policy: str
) -> list[tuple[TokenTree, list[int]]]:
    """Grow one tree per row.

    Policies: ``static`` fills the best shape by rank (Medusa, Sequoia), see `best_first_shape`; ``best_first`` expands
    every node that is still among the `max_nodes` best by path confidence and keeps those; ``dynamic`` expands only
    the `max_children` best nodes of a level and re-ranks all at the end (EAGLE-2, Li et al. 2024).

    OPT-Tree (Wang et al. 2024) is no policy of its own: it keeps the nodes with the largest sum of path confidences,
    which is what ``best_first`` keeps, and stops where another level adds less than a threshold to that sum, which is
    `TreeLimits.goes_on` with a constant for what a level costs.

    Args:
        roots: root token per row.
        expand: source of candidates, called once per level.
        limits: budget per row.
        policy: one of `GROWTH_POLICIES`.

    Returns:
        Per row the tree and, for each of its nodes, the index it had in the builder given to `expand`.

    Raises:
        TreeConfigError: for an unknown policy.
    """
    if policy not in GROWTH_POLICIES:
        raise TreeConfigError(f"growth={policy!r} must be one of {GROWTH_POLICIES}")
    builders = [TreeBuilder(token) for token in roots]
    if policy == "static":
        _grow_static(builders, expand, limits)
        return [builder.freeze() for builder in builders]
    frontier = [[0] if limit.max_nodes and limit.max_depth else [] for limit in limits]
    while any(frontier) and _goes_on(builders, frontier, limits):
        candidates = expand(builders, frontier)
        nxt: list[list[int]] = []
        for builder, nodes, found, limit in zip(builders, frontier, candidates, limits, strict=True):
            added = [
                builder.add(node, cand.token, cand.log_confidence)
                for node, cands in zip(nodes, found, strict=True)
                for cand in cands[: limit.max_children]
            ]
            nxt.append(_next_frontier(builder, added, limit, policy))
        frontier = nxt
    return [b.freeze(b.best(limit.max_nodes)) for b, limit in zip(builders, limits, strict=True)]


def _goes_on(builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]], limits: Sequence[TreeLimits]) -> bool:
    """Whether the next level is drafted; the first always is."""
    asked = next((limit.goes_on for limit in limits if limit.goes_on is not None), None)
    return asked is None or any(0 in nodes for nodes in frontier) or asked(builders, frontier)


def _next_frontier(builder: TreeBuilder, added: list[int], limit: TreeLimits, policy: str) -> list[int]:
    """Which of the nodes just added are expanded at the next level."""
    if not added or builder.depths[added[0]] >= limit.max_depth:
        return []
    # A node outside the best `max_nodes` can never come back: later nodes only make the set more crowded.
    alive = set(builder.best(limit.max_nodes))
    nodes = [node for node in added if node in alive]
    if policy == "dynamic":
        nodes = sorted(sorted(nodes, key=lambda n: -builder.scores[n])[: limit.max_children])
    return nodes


def _grow_static(builders: Sequence[TreeBuilder], expand: Expander, limits: Sequence[TreeLimits]) -> None:
    shapes = [best_first_shape(limit) for limit in limits]
    # builder index of each shape node that could be filled
    placed: list[dict[int, int]] = [{0: 0} for _ in builders]
    for depth in range(max(shape.max_depth for shape in shapes) if shapes else 0):
        inner = [
            [n for n in range(len(shape)) if shape.depths[n] == depth and shape.children(n) and n in done]
            for shape, done in zip(shapes, placed, strict=True)
        ]
        frontier = [[done[n] for n in nodes] for nodes, done in zip(inner, placed, strict=True)]
        if not any(frontier) or not _goes_on(builders, frontier, limits):
            return
        candidates = expand(builders, frontier)
        for builder, shape, done, nodes, found in zip(builders, shapes, placed, inner, candidates, strict=True):
            for node, cands in zip(nodes, found, strict=True):
                for child in shape.children(node):
                    rank = shape.tokens[child]
                    if rank < len(cands):
                        done[child] = builder.add(done[node], cands[rank].token, cands[rank].log_confidence)


def grow_adapted(
    roots: Sequence[int], expand: Expander, limits: Sequence[TreeLimits]
) -> list[tuple[TokenTree, list[int]]]:
    """Grow trees whose children may be drawn at random: what has been drawn is never dropped or reordered.

    Each level of the fixed best-first shape is dealt out to the nodes that were drawn so far, its largest subtrees to
    the most promising ones. So every decision comes before the draws that it is about, as lossless verification by
    independent draws requires.

    Args:
        roots: root token per row.
        expand: source of candidates; it finds how many children are wanted in `TreeBuilder.wanted`.
        limits: budget per row.

    Returns:
        As `grow`.
    """
    builders = [TreeBuilder(token) for token in roots]
    shapes = [best_first_shape(limit) for limit in limits]
    sizes = [_subtree_sizes(shape) for shape in shapes]
    levels = [[0] for _ in builders]
    for depth in range(max(shape.max_depth for shape in shapes)):
        frontier = []
        for builder, shape, size, nodes in zip(builders, shapes, sizes, levels, strict=True):
            places = sorted((n for n in range(len(shape)) if shape.depths[n] == depth), key=lambda n: -size[n])
            best = sorted(nodes, key=lambda n: (-builder.scores[n], n))
            # At most as many nodes were drawn as the shape has.
            builder.wanted = {node: len(shape.children(place)) for node, place in zip(best, places, strict=False)}
            frontier.append(sorted(node for node, count in builder.wanted.items() if count))
        if not any(frontier):
            break
        found = expand(builders, frontier)
        levels = [
            [
                builder.add(node, cand.token, cand.log_confidence, sampled=cand.sampled)
                for node, cands in zip(nodes, children, strict=True)
                for cand in cands[: builder.wanted[node]]
            ]
            for builder, nodes, children in zip(builders, frontier, found, strict=True)
        ]
    return [builder.freeze() for builder in builders]


def _subtree_sizes(tree: TokenTree) -> list[int]:
    sizes = [1] * len(tree)
    for node in range(len(tree) - 1, 0, -1):
        sizes[tree.parents[node]] += sizes[node]
    return sizes
