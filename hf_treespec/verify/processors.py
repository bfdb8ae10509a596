"""Logits processors evaluated at tree nodes, each on the true prefix of its node.

The walk visits nodes in the order in which their tokens are emitted. So for a batch that advances in step every
processor is called exactly as plain decoding calls it: once per emitted token, with the whole batch, in order. That is
right for any processor, with or without state. Rows of unequal length are allowed only if all processors are pure.

Shapes: B batch rows, L text length with padding, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.tree import TokenTree
from hf_treespec.verify.guidance import NodeGuidance

if TYPE_CHECKING:
    from transformers import LogitsProcessorList

__all__ = ["NodeScorer", "TextBuffer", "are_length_free", "are_pure"]


class TextBuffer(Protocol):
    """Where the scorer reads the text."""

    def text(self, length: int) -> Tensor:
        """int64 `[B, length]`: the first `length` ids of every row, prompt padding included."""
        ...


def are_length_free(processors: Sequence[object]) -> bool:
    """Whether every processor looks at its row of logits only."""
    return all(type(processor) in _compat.length_free_processors() for processor in processors)


def are_pure(processors: Sequence[object]) -> bool:
    """Whether every processor is known to be a function of its arguments."""
    pure = _compat.pure_processors() | {NodeGuidance}
    return all(type(processor) in pure for processor in processors)


class NodeScorer:
    """Turns raw logits of nodes into the scores that plain decoding would choose from.

    Args:
        processors: the list that `generate` prepared, used as it is.
        batch_size: B.
    """

    def __init__(self, processors: LogitsProcessorList, batch_size: int) -> None:
        self._processors = processors
        self._batch = batch_size
        self._length_free = are_length_free(processors)

    def scores(
        self, logits: Mapping[int, Tensor], lengths: Mapping[int, int], buffer: TextBuffer
    ) -> dict[int, Tensor]:
        """Processed scores of one node per row.

        Args:
            logits: row -> raw logits `[V]`.
            lengths: row -> text length before the token to choose.
            buffer: the text.

        Returns:
            row -> float32 scores `[V]`, fresh tensors.
        """
        # Float32 before any processor, as plain decoding does; the copy keeps processors that write in place harmless.
        raw = {row: row_logits.to(torch.float32, copy=True) for row, row_logits in logits.items()}
        if not self._processors:
            return raw
        if self._length_free:
            return dict(zip(raw, self.flat_scores(torch.stack(list(raw.values())), buffer), strict=True))
        out: dict[int, Tensor] = {}
        for length in sorted(set(lengths.values())):
            here = [row for row in raw if lengths[row] == length]
            out.update(self._together({row: raw[row] for row in here}, buffer.text(length)))
        return out

    def _together(self, logits: Mapping[int, Tensor], ids: Tensor) -> dict[int, Tensor]:
        """Processed scores of some rows whose texts are equally long: row -> `[V]`.

        Processors may index by row, so the batch keeps its shape: the other rows lend a copy of some logits.
        """
        some = next(iter(logits.values()))
        stacked = torch.stack([logits.get(row, some) for row in range(self._batch)])
        processed = _compat.process_logits(self._processors, ids, stacked)
        return {row: processed[row] for row in logits}

    def flat_scores(self, logits: Tensor, buffer: TextBuffer) -> Tensor:
        """Processed scores of any number of nodes at once, for a `length_free` list.

        Args:
            logits: raw logits `[n, V]`.
            buffer: the text; processors that look at logits alone only want some ids of the right shape.

        Returns:
            float32 `[n, V]`.
        """
        logits = logits.to(torch.float32, copy=True)
        if not self._processors:
            return logits
        ids = buffer.text(1)[:1].expand(logits.shape[0], 1)
        return _compat.process_logits(self._processors, ids, logits)

    def tree_scores(
        self,
        logits_BNV: Tensor,
        trees: Sequence[TokenTree],
        lengths: Sequence[int],
        buffer: TextBuffer,
        stand: Callable[[int, int], None],
    ) -> Tensor:
        """Processed scores of all nodes, each on its own prefix; for `are_pure` lists.

        Args:
            logits_BNV: raw logits.
            trees: one per row.
            lengths: per row the text length with the root.
            buffer: the text.
            stand: told which (row, node) a call is about.

        Returns:
            float32 `[B, N, V]`.
        """
        batch, nodes, vocab = logits_BNV.shape
        if not self._processors or self._length_free:
            return self.flat_scores(logits_BNV.reshape(-1, vocab), buffer).view(batch, nodes, vocab)
        scores_BNV = logits_BNV.to(torch.float32, copy=True)
        for node in range(nodes):
            ends = {row: lengths[row] + tree.depths[node] for row, tree in enumerate(trees) if node < len(tree)}
            for end in sorted(set(ends.values())):
                here = [row for row in ends if ends[row] == end]
                ids = buffer.text(end).clone()
                for row in here:
                    stand(row, node)
                    path = trees[row].path_tokens(node)
                    ids[row, end - len(path) :] = torch.tensor(path, device=ids.device)
                for row, scores_V in self._together({row: logits_BNV[row, node].float() for row in here}, ids).items():
                    scores_BNV[row, node] = scores_V
        return scores_BNV
