"""Trees of a batch in slots of common depths, against the definition."""

from __future__ import annotations

import random

import torch

from hf_treespec.tree import TokenTree, align_trees, layout_trees


def random_tree(rng: random.Random, most: int) -> TokenTree:
    parents, taken = [-1], {}
    for node in range(1, rng.randint(1, most)):
        parents.append(rng.randrange(node))
    tokens = [7]
    for parent in parents[1:]:
        taken[parent] = taken.get(parent, 20) + 1
        tokens.append(taken[parent])
    return TokenTree(tuple(tokens), tuple(parents))


def test_by_hand() -> None:
    #  7 -> 1 -> 2        5 -> 6
    #    -> 3
    layout, slots = align_trees([TokenTree((7, 1, 3, 2), (-1, 0, 0, 1)), TokenTree.chain([5, 6])])
    assert layout.depths_BN.tolist() == [[0, 1, 1, 2]] * 2
    assert slots == [[0, 1, 2, 3], [0, 1]]
    assert layout.tokens_BN.tolist() == [[7, 1, 3, 2], [5, 6, 5, 5]]
    assert layout.ancestors_BNN()[1].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_random_trees_keep_their_nodes_depths_and_ancestors() -> None:
    rng = random.Random(0)
    for _ in range(60):
        trees = [random_tree(rng, rng.choice([2, 9, 90])) for _ in range(rng.randint(1, 4))]
        layout, slots = align_trees(trees)
        plain = layout_trees(trees)
        depths = layout.depths_BN[0].tolist()
        assert (layout.depths_BN == layout.depths_BN[0]).all() and depths == sorted(depths)
        deepest = max(tree.max_depth for tree in trees)
        assert depths == [d for d in range(deepest + 1) for _ in range(max(t.depths.count(d) for t in trees))]
        ancestors, wanted = layout.ancestors_BNN(), plain.ancestors_BNN()
        for row, (tree, place) in enumerate(zip(trees, slots, strict=True)):
            assert len(set(place)) == len(tree)
            index, nodes = torch.tensor(place), len(tree)
            assert layout.tokens_BN[row, index].tolist() == list(tree.tokens)
            assert layout.depths_BN[row, index].tolist() == list(tree.depths)
            assert torch.equal(ancestors[row][index][:, index], wanted[row, :nodes, :nodes])
            assert all(place[parent] < place[node] for node, parent in enumerate(tree.parents) if parent >= 0)
            # A slot without a node sees itself and is seen by none.
            rest = torch.tensor([slot for slot in range(len(depths)) if slot not in place], dtype=torch.long)
            assert torch.equal(ancestors[row][rest], torch.eye(len(depths), dtype=torch.bool)[rest])
            assert not ancestors[row][index][:, rest].any()


def test_equal_chains_take_no_more_than_they_have() -> None:
    layout, slots = align_trees([TokenTree.chain([1, 2, 3]), TokenTree.chain([4, 5, 6])])
    assert layout.nodes == 3 and slots == [[0, 1, 2]] * 2
