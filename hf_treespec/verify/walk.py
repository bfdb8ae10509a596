"""The walk: down the tree along the tokens that the target itself chooses.

At a node the target's token is chosen exactly as in plain decoding (arg-max of the processed scores, plus the
position's noise under sampling). If a child carries it the walk goes there, else it stops; either way the token is
emitted. This is greedy matching and Gumbel-coupled sampling in one (notes: Gumbel-max coupling), and lossless by
construction: the emitted tokens do not depend on the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Protocol

import torch
from torch import Tensor

from hf_treespec.tree import TokenTree
from hf_treespec.verify.noise import GumbelNoise
from hf_treespec.verify.processors import NodeScorer, TextBuffer

__all__ = ["Decider", "TextState", "walk_trees"]


class TextState(TextBuffer, Protocol):
    """The text that a walk extends."""

    def length(self, row: int) -> int:
        """Text length of the row, prompt padding included."""
        ...

    def position(self, row: int) -> int:
        """Position of the row's next token, padding not counted: the key of its noise."""
        ...

    def forced_token(self, row: int) -> int | None:
        """Token that the row must emit whatever the target says (padding after its end), or None."""
        ...

    def emit(self, tokens: dict[int, int], scores: dict[int, Tensor], logits: dict[int, Tensor]) -> set[int]:
        """Append one token to each of some rows, consult the stopping criteria; returns the rows that go on."""
        ...


_NO_TOKEN = -1


def _require_finite(best: float) -> None:
    # Plain sampling fails here too; an arg-max over NaN would choose a token without a word.
    if not isfinite(best):
        raise RuntimeError(
            f"sampling: the best score of a token is {best}; the logits, or what a logits processor made of them, "
            "hold inf or nan, or leave no token at all"
        )


class Decider:
    """Chooses the token at a node.

    Args:
        scorer: processors.
        noise: Gumbel noise, or None for greedy decoding.
    """

    def __init__(self, scorer: NodeScorer, noise: GumbelNoise | None) -> None:
        self._scorer = scorer
        self._noise = noise

    def choose(self, state: TextState, logits: dict[int, Tensor]) -> tuple[dict[int, int], dict[int, Tensor]]:
        """Token and processed scores per row, for rows that stand at nodes with the given raw logits `[V]`."""
        forced = {row: token for row in logits if (token := state.forced_token(row)) is not None}
        # Forced rows too: a processor gets the whole batch as in plain decoding, and may keep a state of it.
        scores = self._scorer.scores(logits, {row: state.length(row) for row in logits}, state)
        tokens = dict(forced)
        for row, row_scores in scores.items():
            if row not in forced:
                if self._noise is None:
                    tokens[row] = int(row_scores.argmax())
                else:
                    best = (row_scores + self._noise.at(row, state.position(row))).max(-1)
                    _require_finite(float(best.values))
                    tokens[row] = int(best.indices)
        return tokens, scores

    def choose_all(self, state: TextState, logits_BNV: Tensor, trees: Sequence[TokenTree]) -> list[list[int]]:
        """Tokens at every node in one go: one transfer to the host a round, where a transfer is dear.

        Only for scorers that are `length_free`, and batches without forced rows. A node whose scores are not finite
        gets -1: only a walk that comes there may complain.
        """
        batch, nodes, vocab = logits_BNV.shape
        scores_BNV = self._scorer.flat_scores(logits_BNV.reshape(-1, vocab), state).view(batch, nodes, vocab)
        if self._noise is None:
            return scores_BNV.argmax(-1).tolist()
        chosen = []
        for row, tree in enumerate(trees):
            first = state.position(row)
            noise_DV = torch.stack([self._noise.at(row, first + depth) for depth in range(tree.max_depth + 1)])
            depths_N = torch.tensor([*tree.depths, *[0] * (nodes - len(tree))], device=noise_DV.device)
            top = (scores_BNV[row] + noise_DV[depths_N]).max(-1)
            chosen.append(torch.where(top.values.isfinite(), top.indices, _NO_TOKEN))
        flat = torch.cat(chosen).tolist()
        return [flat[row * nodes : (row + 1) * nodes] for row in range(batch)]


def walk_trees(
    state: TextState,
    trees: Sequence[TokenTree],
    logits_at: Callable[[int, int], Tensor],
    decider: Decider,
    rows: Sequence[int],
    *,
    in_step: bool,
    choices: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """Walk one tree per row.

    Args:
        state: the text, extended token by token.
        trees: one per batch row.
        logits_at: raw logits `[V]` of (row, node).
        decider: chooses tokens.
        rows: rows that take part.
        in_step: all rows emit the same number of tokens: the walk ends for all as soon as it ends for one.
        choices: tokens per row and node if they are known already.

    Returns:
        Per row the visited nodes, root first; their keys and values are to be kept. Empty for rows that took no part.
    """
    paths: list[list[int]] = [[] for _ in trees]
    at = dict.fromkeys(rows, 0)
    while at:
        for row, node in at.items():
            paths[row].append(node)
        logits = {row: logits_at(row, node) for row, node in at.items()}
        if choices is None:
            tokens, scores = decider.choose(state, logits)
        else:
            tokens, scores = {row: choices[row][node] for row, node in at.items()}, {}
            if _NO_TOKEN in tokens.values():
                _require_finite(float("nan"))
        going = state.emit(tokens, scores, logits)
        below = {row: child for row, node in at.items() if (child := trees[row].child(node, tokens[row])) is not None}
        if in_step:
            at = below if len(below) == len(at) and going == set(at) else {}
        else:
            at = {row: child for row, child in below.items() if row in going}
    return paths
