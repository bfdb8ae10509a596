"""Token recycling: the target's own top candidates at earlier nodes as the draft of later ones.

At every node the target names not one token but a ranking. Those rankings, visited or not, are kept in a table with a
row per token: what the target found most probable the last time it read that token. A tree grows over the table from
token to token (Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with
Token Recycling", arXiv 2408.08696). Here rows keep the probabilities too, so that the tree is grown by what is most
likely to be accepted instead of by a fixed shape, and under sampling candidates are ranked with the noise that the
target will add.

Shapes: B rows, N nodes, V vocabulary, K candidates of a row of the table.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_treespec.draft.base import DraftRow
from hf_treespec.draft.text import Predictor
from hf_treespec.tree import TokenTree

__all__ = ["RecyclePredictor", "RecycleTable", "forget_tables", "table_of"]

# Probability of the successor of a token in a prompt, before the target has said anything of it.
_OF_PROMPT = 0.5
# Mean of exp(noise) over the part of it that is not extreme: what the tokens outside of the table may gain by it.
_OUTSIDE_GAIN = 1.8
# Predicted and right proposals that trust in the table starts from, and the weight of the past.
_PRIOR, _DECAY = 4.0, 0.98
_LEAST = 1e-4


class RecycleTable:
    """The top candidates of each token. Lies on the host, 8 bytes for each of its `[V, K]` entries.

    Args:
        vocab_size: V.
        candidates: K.
    """

    def __init__(self, vocab_size: int, candidates: int) -> None:
        self.tokens_VK: NDArray[np.int32] = np.full((vocab_size, candidates), -1, np.int32)
        self.shares_VK: NDArray[np.float32] = np.zeros((vocab_size, candidates), np.float32)

    @property
    def candidates(self) -> int:
        """K."""
        return int(self.tokens_VK.shape[1])

    def knows(self, token: int) -> bool:
        """Whether the token has candidates."""
        return bool(self.tokens_VK[token, 0] >= 0)

    def of(self, token: int) -> list[tuple[int, float]]:
        """Candidates of a token and their probabilities, the best first."""
        found = zip(self.tokens_VK[token].tolist(), self.shares_VK[token].tolist(), strict=True)
        return [(candidate, share) for candidate, share in found if candidate >= 0 and share > 0.0]

    def put(self, tokens: NDArray[Any], candidates: NDArray[Any], shares: NDArray[Any]) -> None:
        """Replace the rows of some tokens; where a token comes twice the later row stays.

        Args:
            tokens: `[R]`.
            candidates: `[R, K]`, best first; -1 for none.
            shares: `[R, K]`, their probabilities.
        """
        # Written out: numpy promises no order for repeated indices.
        if not len(tokens):
            return
        last = {token: place for place, token in enumerate(tokens.tolist())}
        rows, places = list(last), list(last.values())
        self.tokens_VK[rows] = candidates[places]
        self.shares_VK[rows] = shares[places]


# Per model, so that a call begins with what the calls before it have learnt; by size.
_TABLES: weakref.WeakKeyDictionary[Any, dict[tuple[int, int], RecycleTable]] = weakref.WeakKeyDictionary()


def table_of(model: Any, vocab_size: int, candidates: int) -> RecycleTable:
    """The table of a model and of a size, which lives as long as the model does."""
    tables, size = _TABLES.setdefault(model, {}), (vocab_size, candidates)
    if size not in tables:
        tables[size] = RecycleTable(*size)
    return tables[size]


def forget_tables(of: Callable[[Any], bool]) -> None:
    """Drop the tables of the models for which `of` is true."""
    for model in [model for model in _TABLES if of(model)]:
        _TABLES.pop(model, None)


class RecyclePredictor(Predictor):
    """Draft source over a table of the target's own candidates.

    Args:
        table: it is read and written; threads may share one, at worst they read each other's rows.
        readable: token ids that the target can read; no others are proposed.
        temperature: of the target's law under sampling.
    """

    name = "recycle"
    learns = True
    judged = True

    def __init__(self, table: RecycleTable, *, readable: int, temperature: float = 1.0) -> None:
        self.table = table
        self._readable = readable
        self._power = 1.0 / max(temperature, 1e-3)
        self._begun: set[int] = set()
        # Decayed sums over judged nodes: probability given to candidates, and how often one of them was right.
        self._given = self._right = _PRIOR

    @property
    def trust(self) -> float:
        """What a probability in the table is worth where its token comes again."""
        return min(max(self._right / self._given, _LEAST), 1.0)

    def begin(self, row: DraftRow) -> None:
        """Learn the successors of the prompt's tokens of which the target has said nothing yet."""
        if row.index in self._begun:
            return
        self._begun.add(row.index)
        followers: dict[int, dict[int, None]] = {}
        limit = len(self.table.tokens_VK)
        for token, follower in zip(row.tokens, row.tokens[1:], strict=False):
            if max(token, follower) < limit and not self.table.knows(token):
                # The most recent follower is last.
                known = followers.setdefault(token, {})
                known.pop(follower, None)
                known[follower] = None
        count = self.table.candidates
        for token, found in followers.items():
            best = list(reversed(found))[:count]
            self.table.tokens_VK[token, : len(best)] = best
            self.table.shares_VK[token, : len(best)] = [_OF_PROMPT ** (place + 1) for place in range(len(best))]

    def shares(self, row: DraftRow, path: Sequence[int], floor: float) -> dict[int, float]:
        """Probabilities out of the table, as far as they are to be trusted; see `Predictor.shares`."""
        token = path[-1] if path else row.tokens[-1]
        if token >= len(self.table.tokens_VK):
            return {}
        found = [(candidate, share) for candidate, share in self.table.of(token) if candidate < self._readable]
        if not found:
            return {}
        trust = self.trust
        if row.noise_of is None:
            return {candidate: trust * share for candidate, share in found}
        # Perturbed log probabilities, with the best at 0: at low temperatures nothing else would be left of them.
        outside = log(max(1.0 - sum(share for _, share in found), _LEAST)) * self._power + log(_OUTSIDE_GAIN)
        position = row.offset + len(row.tokens) + len(path)
        noise = row.noise_of(position, [candidate for candidate, _ in found])
        perturbed = [log(share) * self._power + value for (_, share), value in zip(found, noise, strict=True)]
        best = max(*perturbed, outside)
        scores = [exp(value - best) for value in perturbed]
        scale = trust / (sum(scores) + exp(outside - best))
        return {candidate: scale * score for (candidate, _), score in zip(found, scores, strict=True)}

    def judge(self, shares: Mapping[int, float], token: int) -> None:
        """See `Predictor.judge`."""
        if shares:
            # What was told had been scaled by the trust.
            self._given = _DECAY * self._given + sum(shares.values()) / self.trust
            self._right = _DECAY * self._right + (token in shares)

    def observe(self, trees: Sequence[TokenTree], logits_BNV: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Put the target's candidates at all nodes into the table; one transfer to the host.

        What the target said at accepted nodes is written last: there it had the true text before it.
        """
        count = min(self.table.candidates, logits_BNV.shape[-1])
        logits = logits_BNV.detach()
        top = logits.topk(count, dim=-1)
        shares = (top.values.float() - logits.float().logsumexp(-1, keepdim=True)).exp()
        # Ids are exact in float32 up to 2**24: one tensor, one transfer.
        shares_BNK, ids_BNK = torch.stack([shares, top.indices.float()]).cpu().numpy()
        rows, nodes, tokens = [], [], []
        for row, (tree, path) in enumerate(zip(trees, paths, strict=True)):
            if path:
                visited = set(path)
                order = [*(node for node in range(len(tree)) if node not in visited), *path]
                rows += [row] * len(order)
                nodes += order
                tokens += [tree.tokens[node] for node in order]
        if not rows:
            return
        candidates_RK, shares_RK = ids_BNK[rows, nodes].astype(np.int32), shares_BNK[rows, nodes]
        tokens_R = np.array(tokens)
        # A node without a finite law teaches nothing.
        known = np.isfinite(shares_RK[:, 0]) & (tokens_R < len(self.table.tokens_VK))
        pad = ((0, 0), (0, self.table.candidates - count))
        self.table.put(
            tokens_R[known],
            np.pad(candidates_RK[known], pad, constant_values=-1),
            np.pad(shares_RK[known], pad),
        )
