"""Token trees: an immutable tree, and the builder that grows one.

Node 0 is the root: the last token that the target has emitted but not yet read. A parent always has a smaller index
than its children, so one pass over the nodes in order sees every ancestor first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from hf_treespec.errors import TreeConfigError, TreeSpecError

__all__ = ["TokenTree", "TreeBuilder", "TreeLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLimits:
    """How large a tree may become.

    Args:
        max_nodes: drafted nodes, the root not counted; 0 means no draft.
        max_depth: edges from the root to the deepest leaf.
        max_children: children of one node.
        goes_on: asked before every level but the first, with the trees of all rows and the nodes that would be
            expanded, whether to draft it; the same in all rows. None: always. Trees whose nodes are drawn at random
            do not ask: their size is settled beforehand.
        ranks: P(accepted | parent accepted) by depth and rank, for fixed shapes; None for a prior.
    """

    max_nodes: int
    max_depth: int
    max_children: int
    goes_on: Callable[[Sequence[TreeBuilder], Sequence[Sequence[int]]], bool] | None = field(
        default=None, repr=False, compare=False
    )
    ranks: tuple[tuple[float, ...], ...] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, low in (("max_nodes", 0), ("max_depth", 0), ("max_children", 1)):
            if getattr(self, name) < low:
                raise TreeConfigError(f"{name}={getattr(self, name)} must be at least {low}")

    def capped(self, *, max_nodes: int | None = None, max_depth: int | None = None) -> TreeLimits:
        """The same limits, lowered to what a row has room for."""
        depth = self.max_depth if max_depth is None else max(0, min(self.max_depth, max_depth))
        nodes = self.max_nodes if max_nodes is None else max(0, min(self.max_nodes, max_nodes))
        return replace(self, max_nodes=nodes if depth else 0, max_depth=depth)


@dataclass(frozen=True, slots=True)
class TokenTree:
    """An immutable tree of tokens.

    Args:
        tokens: token id per node; `tokens[0]` is the root.
        parents: parent index per node; -1 for the root, and `parents[i] < i`.
        scores: natural log of the estimated probability that the target accepts the node, never larger than that of
            its parent; None if the draft has no idea. Not part of what makes two trees equal.
        sampled: nodes whose tokens were drawn at random, as verification by independent draws may ask for. Siblings
            come in the order of the draws, and draws may repeat a token.

    Raises:
        TreeConfigError: if the arrays do not form such a tree, or two siblings carry the same token.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...] | None = field(default=None, repr=False, compare=False)
    sampled: frozenset[int] = frozenset()
    depths: tuple[int, ...] = field(init=False, repr=False)
    _children: tuple[dict[int, int], ...] = field(init=False, repr=False, compare=False)
    _siblings: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.parents) or self.parents[0] != -1:
            raise TreeConfigError(
                f"tokens={self.tokens}, parents={self.parents}: expected two arrays of one length >= 1 "
                "with parents[0] == -1"
            )
        depths = [0]
        children: list[dict[int, int]] = [{}]
        siblings: list[list[int]] = [[]]
        for node in range(1, len(self.tokens)):
            parent, token = self.parents[node], self.tokens[node]
            if not 0 <= parent < node:
                raise TreeConfigError(f"parents[{node}]={parent} must lie in [0, {node}): parents come first")
            if token in children[parent] and not {node, children[parent][token]} <= self.sampled:
                raise TreeConfigError(f"node {node}: token {token} is already a child of node {parent}")
            children[parent].setdefault(token, node)
            children.append({})
            siblings[parent].append(node)
            siblings.append([])
            depths.append(depths[parent] + 1)
        object.__setattr__(self, "depths", tuple(depths))
        object.__setattr__(self, "_children", tuple(children))
        object.__setattr__(self, "_siblings", tuple(map(tuple, siblings)))

    @classmethod
    def root_only(cls, token: int) -> TokenTree:
        """The tree without a draft: one forward of it is a plain decoding step."""
        return cls((token,), (-1,))

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> TokenTree:
        """A single path; `tokens[0]` is the root."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def drafted(self) -> int:
        """Nodes without the root."""
        return len(self.tokens) - 1

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node."""
        return max(self.depths)

    def child(self, node: int, token: int) -> int | None:
        """Index of the first child of `node` that carries `token`, or None."""
        return self._children[node].get(token)

    def children(self, node: int) -> tuple[int, ...]:
        """Children of `node` in the order in which they were added."""
        return self._siblings[node]

    def by_rank(self) -> list[int]:
        """Drafted nodes, the most promising first; any number of them from the front forms a tree with the root.

        Without scores the order is that of the indices.
        """
        if self.scores is None:
            return list(range(1, len(self)))
        return _by_score(self.scores, self.depths)

    def best(self, count: int) -> TokenTree:
        """The tree of the `count` most promising drafted nodes; see `part`."""
        return self.part(self.by_rank()[:count])

    def part(self, nodes: Sequence[int]) -> TokenTree:
        """The tree of the root and some drafted nodes, each with all of its ancestors.

        Raises:
            TreeSpecError: if that would drop one of several draws by its outcome, which biases the text.
        """
        if len(nodes) == self.drafted:
            return self
        if self.sampled:
            raise TreeSpecError(f"a tree with {len(self.sampled)} sampled nodes cannot be cut to {len(nodes)}")
        kept = [0, *sorted(nodes)]
        place = {node: i for i, node in enumerate(kept)}
        return TokenTree(
            tuple(self.tokens[node] for node in kept),
            tuple(-1 if node == 0 else place[self.parents[node]] for node in kept),
            None if self.scores is None else tuple(self.scores[node] for node in kept),
        )

    def with_scores(self, scores: Sequence[float]) -> TokenTree:
        """The same tree with other scores.

        Args:
            scores: see the class.
        """
        # Tokens and parents were checked when this tree was made.
        out = object.__new__(TokenTree)
        for name in ("tokens", "parents", "sampled", "depths", "_children", "_siblings"):
            object.__setattr__(out, name, getattr(self, name))
        object.__setattr__(out, "scores", tuple(scores))
        return out

    def path_tokens(self, node: int) -> list[int]:
        """Tokens from the root to `node`, both included."""
        out = []
        while node >= 0:
            out.append(self.tokens[node])
            node = self.parents[node]
        return out[::-1]


def _by_score(scores: Sequence[float], depths: Sequence[int]) -> list[int]:
    """Nodes but the root by falling score; ties go to the shallower, then the earlier: ancestors always come first."""
    # Sorting keeps the order of equals, so that the index need not be part of the key.
    keys = [(-score, depth) for score, depth in zip(scores, depths, strict=True)]
    return sorted(range(1, len(keys)), key=keys.__getitem__)


class TreeBuilder:
    """A tree that still grows, with a score per node.

    The score of a node is the sum of the log confidences on its path: the estimated log probability that the target
    accepts the node. It never grows along a path, so the best nodes by score always form a tree.

    Args:
        root: token id of the root.
    """

    __slots__ = ("children", "depths", "parents", "sampled", "scores", "tokens", "wanted")

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.scores = [0.0]
        self.children: list[list[int]] = [[]]
        self.sampled: set[int] = set()
        # Children wanted of each node of the next level, where that is settled before they are drawn.
        self.wanted: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, log_confidence: float, *, sampled: bool = False) -> int:
        """Append a child and return its index."""
        node = len(self.tokens)
        if sampled:
            self.sampled.add(node)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.scores.append(self.scores[parent] + min(log_confidence, 0.0))
        self.children[parent].append(node)
        self.children.append([])
        return node

    def best(self, count: int) -> list[int]:
        """The `count` best drafted nodes by score, in index order; ties go to the shallower, then the earlier."""
        return sorted(_by_score(self.scores, self.depths)[:count])

    def freeze(self, nodes: Iterable[int] | None = None) -> tuple[TokenTree, list[int]]:
        """The tree of the root and `nodes` (default: all), and the builder index of each of its nodes.

        Raises:
            TreeSpecError: if that would drop one of several draws by its outcome, which biases the text.
        """
        if nodes is not None and self.sampled and len(set(nodes := list(nodes))) < len(self) - 1:
            raise TreeSpecError(f"a tree with {len(self.sampled)} sampled nodes cannot be pruned")
        kept = [0, *(range(1, len(self)) if nodes is None else sorted(nodes))]
        place = {node: i for i, node in enumerate(kept)}
        parents = tuple(-1 if node == 0 else place[self.parents[node]] for node in kept)
        scores = tuple(self.scores[node] for node in kept)
        tokens = tuple(self.tokens[node] for node in kept)
        return TokenTree(tokens, parents, scores, frozenset(place[node] for node in self.sampled)), kept
