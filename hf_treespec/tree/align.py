"""Trees of a batch in slots whose depths are the same in all rows.

A model that counts positions by its cache makes them once for all rows, so that nothing can tell it of a depth per
row. Here the slots are sorted by depth, and every depth gets as many as the row with the most nodes there needs;
chains of one length, the commonest case, need no more than they have.

Shapes: B batch rows, N slots, root included; W = ceil(N / 64) words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from hf_treespec.tree.layout import TreeLayout, pack_bits
from hf_treespec.tree.topology import TokenTree

__all__ = ["align_trees"]


def align_trees(trees: Sequence[TokenTree], device: torch.device | str = "cpu") -> tuple[TreeLayout, list[list[int]]]:
    """Lay out one tree per row in slots of common depths.

    Args:
        trees: one tree per batch row.
        device: where the tensors go.

    Returns:
        The layout, in which a slot without a node repeats the root's token and sees only itself, but has the depth of
        its column; and per row the slot of each node. Slots rise along every path.
    """
    counts = [Counter(tree.depths) for tree in trees]
    deepest = max(max(count) for count in counts)
    widths = [max(count[depth] for count in counts) for depth in range(deepest + 1)]
    first = [sum(widths[:depth]) for depth in range(deepest + 1)]
    depths = [depth for depth, width in enumerate(widths) for _ in range(width)]
    nodes = len(depths)
    words = -(-nodes // 64)
    tokens, packed, slots = [], [], []
    for tree in trees:
        free = list(first)
        row: list[int] = []
        for depth in tree.depths:
            row.append(free[depth])
            free[depth] += 1
        seen = [1 << slot for slot in range(nodes)]
        text = [tree.tokens[0]] * nodes
        for node, parent in enumerate(tree.parents):
            text[row[node]] = tree.tokens[node]
            if parent >= 0:
                seen[row[node]] |= seen[row[parent]]
        slots.append(row)
        tokens.append(text)
        packed.append([pack_bits(bits, words) for bits in seen])
    layout = TreeLayout(
        torch.tensor(tokens, device=device),
        torch.tensor([depths] * len(trees), device=device),
        torch.tensor(packed, dtype=torch.int64, device=device),
    )
    return layout, slots
