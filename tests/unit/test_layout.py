"""Packed ancestor words against walks to the root, beyond one word and through the sign bit."""

from __future__ import annotations

import random

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_treespec.tree import TokenTree, layout_trees, pack_bits, unpack_words


def random_tree(seed: int, nodes: int) -> TokenTree:
    rng = random.Random(seed)
    # Short reach grows deep trees, long reach bushy ones.
    reach = rng.choice((1, 2, 8, 200))
    parents = (-1, *(rng.randrange(max(0, node - reach), node) for node in range(1, nodes)))
    return TokenTree(tuple(range(500, 500 + nodes)), parents)


def sees(tree: TokenTree, node: int) -> set[int]:
    """The node and its ancestors, one parent at a time."""
    found = {node}
    while tree.parents[node] >= 0:
        node = tree.parents[node]
        found.add(node)
    return found


SIZES = st.lists(st.integers(1, 150), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), SIZES)
@example(0, [64])
@example(0, [65, 1])
@example(0, [128, 127])
@example(0, [129])
def test_layout_is_what_walking_the_parents_finds(seed: int, sizes: list[int]) -> None:
    trees = [random_tree(seed + row, size) for row, size in enumerate(sizes)]
    layout = layout_trees(trees)
    nodes = max(sizes)
    assert layout.nodes == nodes
    assert layout.words_BNW.shape == (len(trees), nodes, -(-nodes // 64))
    for tensor in (layout.tokens_BN, layout.depths_BN, layout.words_BNW):
        assert tensor.dtype == torch.int64
    visible = layout.ancestors_BNN()
    for row, tree in enumerate(trees):
        for node in range(nodes):
            padding = node >= len(tree)
            # A padding node sees itself, so that no attention row is empty, and is seen by none.
            wanted = {node} if padding else sees(tree, node)
            assert set(visible[row, node].nonzero().flatten().tolist()) == wanted
            assert layout.tokens_BN[row, node] == tree.tokens[0 if padding else node]
            assert layout.depths_BN[row, node] == (0 if padding else len(wanted) - 1)


def test_words_are_signed_and_begin_with_the_lowest_node() -> None:
    words = layout_trees([TokenTree.chain(range(66))]).words_BNW[0].tolist()
    assert words[0] == [1, 0]
    assert words[62] == [2**63 - 1, 0]
    assert words[63] == [-1, 0]
    assert words[65] == [-1, 3]
    assert pack_bits(1 << 63, 1) == [-(2**63)]
    assert pack_bits(1 << 64 | 1 << 3, 3) == [8, 1, 0]


@given(st.integers(0, 2**192 - 1), st.integers(1, 192))
@example(1 << 63 | 1 << 127, 192)
def test_unpacking_gives_the_bits_that_were_packed(bits: int, count: int) -> None:
    words = torch.tensor([pack_bits(bits, 3), pack_bits(0, 3)])
    unpacked = unpack_words(words, count)
    assert unpacked.dtype == torch.bool
    assert unpacked.tolist() == [[bool(bits >> bit & 1) for bit in range(count)], [False] * count]
