"""Verification by independent draws: a round decided by a plan and coins, and followed token by token.

Shapes: B rows, N nodes with the root, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_treespec.rules import Rule
from hf_treespec.tree import TokenTree
from hf_treespec.verify.draw import NO_TOKEN, draw, expected_accepted, taken
from hf_treespec.verify.noise import RoundNoise
from hf_treespec.verify.plan import DraftLaws, plan
from hf_treespec.verify.processors import NodeScorer
from hf_treespec.verify.walk import TextState

__all__ = ["IndependentDecider", "Outcome", "follow_paths"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round came to.

    Args:
        paths: per row the accepted nodes, root first.
        last: per row the token behind them; `NO_TOKEN` where the target's law leaves none.
        scores_BNV: processed scores of all nodes.
        expected: per row the expected accepted tokens over the coins, as far as the ids of tokens tell where texts
            end; 0 for rows that have ended.
        taken: per row and node the probability that it is accepted where its parent is, before any coin.
    """

    paths: list[list[int]]
    last: list[int]
    scores_BNV: Tensor
    expected: list[float]
    taken: list[list[float]]


class IndependentDecider:
    """Decides rounds by a rule.

    Args:
        rule: the rule.
        scorer: processors, all of them pure.
        noise: random numbers.
        ends: ids that end a text: what a tree holds behind them is left alone.
    """

    def __init__(self, rule: Rule, scorer: NodeScorer, noise: RoundNoise, ends: Set[int] = frozenset()) -> None:
        self.rule = rule
        self._scorer = scorer
        self._noise = noise
        self._ends = ends

    def decide(
        self,
        state: TextState,
        trees: Sequence[TokenTree],
        logits_BNV: Tensor,
        laws: DraftLaws | None,
        stand: Callable[[int, int], None],
        rows: Sequence[int],
        *,
        in_step: bool,
    ) -> Outcome:
        """Decide how far each row goes and which token follows.

        Args:
            state: the text.
            trees: one per row.
            logits_BNV: raw logits of the target.
            laws: of nodes with random children.
            stand: told which (row, node) a call of the processors is about.
            rows: rows that draw their tokens; what is decided for others means nothing.
            in_step: whether these go on only as far as all of them do.
        """
        batch, nodes, _ = logits_BNV.shape
        lengths = [state.length(row) for row in range(batch)]
        scores_BNV = self._scorer.tree_scores(logits_BNV, trees, lengths, state, stand)
        target_BNV = scores_BNV.to(self._noise.dtype).softmax(-1)
        decided = plan(self.rule, trees, target_BNV, laws, self._ends)
        # The position of the root: no other round of the row has it.
        at = [state.position(row) - 1 for row in range(batch)]
        coins_BN = torch.stack([self._noise.coins(row, at[row], nodes) for row in range(batch)])
        noise_BV = torch.stack([self._noise.of_last(row, at[row]) for row in range(batch)])
        drawn = draw(decided, trees, coins_BN, noise_BV)
        paths = [_path(tree, node) for tree, (node, _, _) in zip(trees, drawn, strict=True)]
        expected = [0.0] * batch
        for group in [list(rows)] if in_step else [[row] for row in rows]:
            accepts, here = [drawn[row][2] for row in group], [trees[row] for row in group]
            mean = expected_accepted(accepts, here, joint=decided.joint, ends=self._ends)
            for row in group:
                expected[row] = mean
        chances = [taken(accept, tree, joint=decided.joint) for tree, (_, _, accept) in zip(trees, drawn, strict=True)]
        return Outcome(paths, [token for _, token, _ in drawn], scores_BNV, expected, chances)


def _path(tree: TokenTree, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = tree.parents[node]
    return path[::-1]


def follow_paths(
    state: TextState,
    trees: Sequence[TokenTree],
    outcome: Outcome,
    logits_at: Callable[[int, int], Tensor],
    rows: Sequence[int],
    *,
    in_step: bool,
) -> list[list[int]]:
    """Emit what a round came to, token by token; the arguments and the result are those of `walk_trees`.

    A row that cannot go on because another one ends drops the rest of its path: where that happens depends on nothing
    behind it, so that the law of the text stays the target's. A row that has ended drops it too, for padding. What the
    rest would have been is no matter, nor whether there is a law for it.

    Raises:
        RuntimeError: where scores hold NaN or leave no token, as in plain sampling.
    """
    paths: list[list[int]] = [[] for _ in trees]
    going = list(rows)
    step = 0
    while going:
        nodes = {row: outcome.paths[row][step] for row in going}
        for row, node in nodes.items():
            paths[row].append(node)
        tokens: dict[int, int] = {}
        more: set[int] = set()
        for row in going:
            path, forced = outcome.paths[row], state.forced_token(row)
            goes_on = step + 1 < len(path)
            tokens[row] = trees[row].tokens[path[step + 1]] if goes_on else outcome.last[row]
            if forced is not None and forced != tokens[row]:
                tokens[row], goes_on = forced, False
            elif forced is None and tokens[row] == NO_TOKEN:
                raise RuntimeError(
                    "sampling: the logits, or what a logits processor made of them, hold inf or nan, or leave no "
                    "token at all"
                )
            if goes_on:
                more.add(row)
        # Copies: a view would keep the scores of the whole tree alive.
        scores = {row: outcome.scores_BNV[row, node].clone() for row, node in nodes.items()}
        alive = state.emit(tokens, scores, {row: logits_at(row, node) for row, node in nodes.items()})
        if in_step:
            going = going if more == set(going) == alive else []
        else:
            going = [row for row in going if row in more and row in alive]
        step += 1
    return paths
