"""How probable the children of accepted nodes were to the target: for controllers that compare the two laws.

Shapes: B rows, N nodes of a tree, R accepted nodes of all rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.tree import TokenTree
from hf_treespec.verify import GumbelNoise

if TYPE_CHECKING:
    from transformers import LogitsProcessorList

__all__ = ["ConfidenceNotice", "TargetShares"]


class TargetShares:
    """The target's law at the accepted nodes of a tree, shaped as the draft's is: by what needs no prefix.

    Args:
        processors: those that shape the draft's law too; None for none.
        noise: that target and draft share, so that their laws are compared given it; None without.
    """

    def __init__(self, processors: LogitsProcessorList | None, noise: GumbelNoise | None) -> None:
        self._processors = processors
        self._noise = noise

    def of_rows(
        self,
        trees: Sequence[TokenTree],
        paths: Mapping[int, Sequence[int]],
        logits_BNV: Tensor,
        positions: Sequence[int],
        device: torch.device,
    ) -> dict[int, dict[int, float]]:
        """By row the probability of each child of a node on its path, given the node; one transfer for all rows.

        Rows whose trees tell no confidences are left out: there is nothing to compare with.

        Args:
            trees: that were scored, one per row of the batch.
            paths: accepted nodes of the rows that are asked for, the root first.
            logits_BNV: raw logits.
            positions: per row of the batch, of the token behind the root.
            device: of the text, where processors and noise are.
        """
        told = {row: path for row, path in paths.items() if trees[row].scores is not None}
        nodes = [(row, node) for row, path in told.items() for node in path if trees[row].children(node)]
        if not nodes:
            return {}
        rows, places = torch.tensor(nodes, device=logits_BNV.device).T
        scores_RV = logits_BNV[rows, places].to(device, torch.float32)
        if self._processors:
            ids = torch.zeros((len(nodes), 1), dtype=torch.long, device=device)
            scores_RV = _compat.process_logits(self._processors, ids, scores_RV)
        if self._noise is not None:
            noise = [self._noise.at(row, positions[row] + trees[row].depths[node]) for row, node in nodes]
            scores_RV = scores_RV + torch.stack(noise).to(scores_RV)
        laws_RV = scores_RV.softmax(-1)
        children = [(at, row, child) for at, (row, node) in enumerate(nodes) for child in trees[row].children(node)]
        entries = [(at, trees[row].tokens[child]) for at, row, child in children]
        at, tokens = torch.tensor(entries, device=device).T
        shares: dict[int, dict[int, float]] = {}
        for (_, row, child), share in zip(children, laws_RV[at, tokens].tolist(), strict=True):
            shares.setdefault(row, {})[child] = share
        return shares


class ConfidenceNotice:
    """Tells once that a controller of the depth has nothing to go by.

    Args:
        control: `TreeConfig.depth_control`.
        confident: whether what the draft states of its nodes is a confidence at all.
    """

    def __init__(self, control: str, confident: bool) -> None:
        self._control, self._confident = control, confident or control != "kl"
        self._open = control in ("confidence", "kl")

    def see(self, trees: Sequence[TokenTree], draft: str) -> None:
        """Look at the trees of a round; the first that has drafted nodes decides."""
        drafted = [tree for tree in trees if tree.drafted] if self._open else []
        if not drafted:
            return
        self._open = False
        if not self._confident or all(tree.scores is None for tree in drafted):
            _compat.warn_once(
                f"TreeConfig(depth_control={self._control!r}) has no effect here: it goes by how sure the draft says "
                f"it is of its nodes, and {draft!r} does not say; expected a draft model or head, or "
                "depth_control='cost' or 'pid', which need no confidences"
            )
