"""Trees of a batch as rectangular tensors: tokens, depths, packed ancestor words.

Shapes: B batch rows, N nodes of the largest tree (root included), W = ceil(N / 64) words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_treespec.tree.topology import TokenTree

__all__ = ["TreeLayout", "layout_trees", "pack_bits", "unpack_words"]

_WORD = 64


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """Tensor form of one tree per row.

    Args:
        tokens_BN: int64, token ids; padding nodes repeat the root's token.
        depths_BN: int64, edges from the root; padding nodes have depth 0.
        words_BNW: int64, bit j of word w of row i is set if node 64 w + j is i or an ancestor of i.
    """

    tokens_BN: Tensor
    depths_BN: Tensor
    words_BNW: Tensor

    @property
    def nodes(self) -> int:
        """N, the root included."""
        return int(self.tokens_BN.shape[1])

    def ancestors_BNN(self) -> Tensor:
        """Bool, `[b, i, j]`: node j is i itself or an ancestor of i."""
        return unpack_words(self.words_BNW, self.nodes)


def _signed(word: int) -> int:
    """Two's complement of a 64-bit pattern: torch has no usable uint64."""
    return word - (1 << _WORD) if word >= 1 << (_WORD - 1) else word


def pack_bits(bits: int, words: int) -> list[int]:
    """Split a Python integer used as a bit set into signed 64-bit words, lowest bits first."""
    return [_signed((bits >> (_WORD * w)) & ((1 << _WORD) - 1)) for w in range(words)]


def unpack_words(words: Tensor, count: int) -> Tensor:
    """Bits of packed words.

    Args:
        words: int64 `[..., W]`.
        count: how many of the 64 W bits to return.

    Returns:
        Bool `[..., count]`; bit j of word w is at index 64 w + j.
    """
    lanes = torch.arange(_WORD, device=words.device)
    return ((words.unsqueeze(-1) >> lanes) & 1).flatten(-2)[..., :count].bool()


def layout_trees(trees: Sequence[TokenTree], device: torch.device | str = "cpu") -> TreeLayout:
    """Rectangular tensors for one tree per row.

    A padding node sees only itself, so that its attention row is never empty (an all-masked row is NaN); nothing sees
    a padding node, and the walk never visits one.

    Args:
        trees: one tree per batch row.
        device: where the tensors go; everything is built on the host and copied once.

    Returns:
        The layout.
    """
    nodes = max(len(tree) for tree in trees)
    words = -(-nodes // _WORD)
    tokens, depths, packed = [], [], []
    for tree in trees:
        pad = nodes - len(tree)
        seen: list[int] = []
        for node, parent in enumerate(tree.parents):
            seen.append((1 << node) | (seen[parent] if parent >= 0 else 0))
        seen.extend(1 << node for node in range(len(tree), nodes))
        tokens.append([*tree.tokens, *[tree.tokens[0]] * pad])
        depths.append([*tree.depths, *[0] * pad])
        packed.append([pack_bits(bits, words) for bits in seen])
    return TreeLayout(
        torch.tensor(tokens, device=device),
        torch.tensor(depths, device=device),
        torch.tensor(packed, dtype=torch.int64, device=device),
    )
