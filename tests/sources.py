"""Draft sources for tests: trees that are random, half right or hostile, put in place of the library's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

import hf_treespec.engine.loop
from hf_treespec.draft import DraftRow
from hf_treespec.tree import TokenTree, TreeLimits


class Source:
    """A draft source that keeps what it proposed and what was accepted.

    Args:
        make: `make(source, row, limits)` is the tree of one row.
        seed: of `rng`.
        vocab: token ids are below it.
        truth: per row the whole text, if the source is to know it.
    """

    name = "test"
    cheap = False

    def __init__(
        self,
        make: Callable[[Source, DraftRow, TreeLimits], TokenTree],
        *,
        seed: int = 0,
        vocab: int,
        truth: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.vocab = vocab
        self.truth = truth
        self.rounds: list[list[TokenTree]] = []
        self.paths: list[list[list[int]]] = []
        self.texts: list[list[list[int]]] = []
        self._make = make

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[TokenTree]:
        trees = []
        for row, limit in zip(rows, limits, strict=True):
            tree = self._make(self, row, limit) if limit.max_nodes else TokenTree.root_only(row.tokens[-1])
            assert tree.drafted <= limit.max_nodes and tree.max_depth <= limit.max_depth
            trees.append(tree)
        self.texts.append([list(row.tokens) for row in rows])
        self.rounds.append(trees)
        return trees

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self.paths.append([list(path) for path in paths])

    def ahead(self, row: DraftRow, depth: int) -> list[int]:
        """The next tokens of the row by its known text, up to `depth` of them."""
        assert self.truth is not None
        start = row.offset + len(row.tokens)
        return list(self.truth[row.index][start : start + depth])

    def token(self, taken: Sequence[int] = ()) -> int | None:
        """A random token that is not taken, or None if all are."""
        free = [token for token in range(self.vocab) if token not in set(taken)]
        return self.rng.choice(free) if free else None


@contextmanager
def drafting(source: Any) -> Iterator[Any]:
    """Generate with trees from `source`, whatever the call says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_treespec.engine.loop, "make_draft", lambda request, vocab, sampler: source)
        yield source


class Bud:
    """A tree under construction within limits."""

    def __init__(self, source: Source, root: int, limits: TreeLimits) -> None:
        self.source, self.limits = source, limits
        self.tokens, self.parents, self.depths = [root], [-1], [0]
        self.below: list[list[int]] = [[]]

    @property
    def full(self) -> bool:
        return len(self.tokens) > self.limits.max_nodes

    def add(self, parent: int, token: int | None) -> int | None:
        """Append a child unless that would break a limit or repeat a sibling; None if nothing was added."""
        taken = [self.tokens[child] for child in self.below[parent]]
        if token is None or self.full or token in taken or self.depths[parent] >= self.limits.max_depth:
            return None
        if len(taken) >= self.limits.max_children:
            return None
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.below[parent].append(node)
        self.below.append([])
        return node

    def wrong(self, parent: int, right: int | None = None) -> int | None:
        """Append a random child that is not `right`."""
        taken = [self.tokens[child] for child in self.below[parent]]
        return self.add(parent, self.source.token(taken if right is None else [*taken, right]))

    def done(self) -> TokenTree:
        return TokenTree(tuple(self.tokens), tuple(self.parents))


def random_tree(source: Source, row: DraftRow, limits: TreeLimits) -> TokenTree:
    """Any shape, any tokens."""
    bud = Bud(source, row.tokens[-1], limits)
    for _ in range(source.rng.randint(1, limits.max_nodes)):
        bud.wrong(source.rng.randrange(len(bud.tokens)))
    return bud.done()


def half_right(source: Source, row: DraftRow, limits: TreeLimits) -> TokenTree:
    """The true continuation down to a random depth at random places among random siblings and subtrees."""
    bud = Bud(source, row.tokens[-1], limits)
    rng, node = source.rng, 0
    for token in source.ahead(row, rng.randint(0, limits.max_depth)):
        for _ in range(rng.randint(0, 2)):
            bud.wrong(node, token)
        child = bud.add(node, token)
        if child is None:
            break
        node = child
    for _ in range(rng.randint(0, limits.max_nodes)):
        bud.wrong(rng.randrange(len(bud.tokens)))
    return bud.done()


def deep(source: Source, row: DraftRow, limits: TreeLimits) -> TokenTree:
    """A comb: the true continuation as the last child everywhere, wrong chains of true tokens beside it."""
    bud = Bud(source, row.tokens[-1], limits)
    truth = source.ahead(row, limits.max_depth)
    node = 0
    for depth, token in enumerate(truth):
        # The right words below the wrong ancestor: only the mask can tell them from the right ones.
        stray = bud.wrong(node, token)
        for later in truth[depth + 1 : depth + 3]:
            stray = None if stray is None else bud.add(stray, later)
        child = bud.add(node, token)
        if child is None:
            break
        node = child
    return bud.done()


def wide(source: Source, row: DraftRow, limits: TreeLimits) -> TokenTree:
    """A star of as many children as allowed, the true one last, and each of them with the true grandchild."""
    bud = Bud(source, row.tokens[-1], limits)
    truth = source.ahead(row, 2)
    right = truth[0] if truth else None
    # Nodes are left for the grandchildren; the first two get one, the right child among them.
    for _ in range(min(limits.max_nodes - 2, limits.max_children) - 1):
        bud.wrong(0, right)
    bud.add(0, right)
    for child in list(bud.below[0])[::-1]:
        if len(truth) > 1:
            bud.add(child, truth[1])
    return bud.done()


def chain(source: Source, row: DraftRow, limits: TreeLimits) -> TokenTree:
    """The true continuation, as deep as allowed."""
    return TokenTree.chain([row.tokens[-1], *source.ahead(row, min(limits.max_depth, limits.max_nodes))])


def wrong_chain(source: Source, row: DraftRow, limits: TreeLimits) -> TokenTree:
    """A chain whose first token is wrong."""
    bud = Bud(source, row.tokens[-1], limits)
    node: int | None = bud.wrong(0, next(iter(source.ahead(row, 1)), None))
    while node is not None and not bud.full:
        node = bud.wrong(node)
    return bud.done()


MAKERS = {maker.__name__: maker for maker in (random_tree, half_right, deep, wide, chain, wrong_chain)}
