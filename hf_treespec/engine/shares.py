"""How probable the children of accepted nodes were to the target: for controllers that compare the two laws.

Shapes: N nodes of a tree, R of them accepted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.tree import TokenTree
from hf_treespec.verify import GumbelNoise

if TYPE_CHECKING:
    from transformers import LogitsProcessorList

__all__ = ["TargetShares"]


class TargetShares:
    """The target's law at the accepted nodes of a tree, shaped as the draft's is: by what needs no prefix.

    Args:
        processors: those that shape the draft's law too; None for none.
        noise: that target and draft share, so that their laws are compared given it; None without.
    """

    def __init__(self, processors: LogitsProcessorList | None, noise: GumbelNoise | None) -> None:
        self._processors = processors
        self._noise = noise

    def of(self, row: int, tree: TokenTree, path: Sequence[int], logits_NV: Tensor, position: int) -> dict[int, float]:
        """Probability of each child of a node on the path, given the node.

        Args:
            row: of the batch.
            tree: that was scored.
            path: accepted nodes, the root first.
            logits_NV: raw logits.
            position: of the token behind the root.
        """
        nodes = [node for node in path if tree.children(node)]
        if not nodes:
            return {}
        scores_RV = logits_NV[nodes].to(torch.float32)
        if self._processors:
            ids = torch.zeros((len(nodes), 1), dtype=torch.long, device=scores_RV.device)
            scores_RV = _compat.process_logits(self._processors, ids, scores_RV)
        if self._noise is not None:
            noise = [self._noise.at(row, position + tree.depths[node]) for node in nodes]
            scores_RV = scores_RV + torch.stack(noise).to(scores_RV)
        laws_RV = scores_RV.softmax(-1)
        children = [(place, child) for place, node in enumerate(nodes) for child in tree.children(node)]
        places = torch.tensor([place for place, _ in children], device=laws_RV.device)
        tokens = torch.tensor([tree.tokens[child] for _, child in children], device=laws_RV.device)
        return dict(zip((child for _, child in children), laws_RV[places, tokens].tolist(), strict=True))
