"""Emitting what a round of independent draws came to, over every outcome of its coins."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hf_treespec.engine.state import GrowingText, StopRules
from hf_treespec.rules import RULES
from hf_treespec.tree import TokenTree
from hf_treespec.verify import Outcome, expected_accepted, follow_paths, plan
from hf_treespec.verify.draw import NO_TOKEN

END, PAD, VOCAB = 2, 0, 6
# An end at depth one with more behind it, one at depth two, and paths of three without any.
BUSH = TokenTree((1, 3, 2, 4, 2, 5, 3, 5), (-1, 0, 0, 1, 1, 2, 3, 5))
CHAIN = TokenTree((1, 2, 2, 3), (-1, 0, 1, 2))


def texts(batch: int, *, in_step: bool) -> GrowingText:
    rules = StopRules(max_length=None, eos=frozenset({END}), has_eos=True, others=(), rowwise=True)
    prompt = torch.ones(batch, 1, dtype=torch.long)
    return GrowingText(
        prompt, real_tokens=[1] * batch, prompt_tokens=[[1]] * batch, rules=rules, pad=PAD, in_step=in_step
    )


def followed(trees: list[TokenTree], nodes: tuple[int, ...], last: list[int], *, in_step: bool) -> tuple[Any, Any]:
    paths = []
    for tree, node in zip(trees, nodes, strict=True):
        path = []
        while node >= 0:
            path.append(node)
            node = tree.parents[node]
        paths.append(path[::-1])
    scores = torch.zeros(len(trees), max(map(len, trees)), VOCAB)
    text = texts(len(trees), in_step=in_step)
    outcome = Outcome(paths, last, scores, [], [])
    walked = follow_paths(
        text, trees, outcome, lambda row, node: scores[row, node], range(len(trees)), in_step=in_step
    )  # fmt: skip
    return walked, text


@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("rule", ["naive", "traversal"])
@pytest.mark.parametrize("trees", [[BUSH], [BUSH, BUSH], [BUSH, CHAIN], [CHAIN, CHAIN], [CHAIN, BUSH, BUSH]])
def test_the_expected_length_is_the_mean_over_the_coins(trees: list[TokenTree], rule: str, in_step: bool) -> None:
    dice = torch.Generator().manual_seed(3)
    target = torch.rand(len(trees), len(BUSH), VOCAB, generator=dice, dtype=torch.float64).softmax(-1)
    decided = plan(RULES[rule], trees, target, None, frozenset({END}))
    accepts = [row[: len(tree)] for row, tree in zip(decided.accept_BN.tolist(), trees, strict=True)]
    # Per row every node and its probability to be the last one.
    chances = []
    for tree, accept in zip(trees, accepts, strict=True):
        found = [0.0] * len(tree)
        for outcome in itertools.product((True, False), repeat=len(tree) - 1):
            weight, passed = 1.0, [True, *outcome]
            for chance, won in zip(accept[1:], outcome, strict=True):
                weight *= chance if won else 1.0 - chance
            found[winner(tree, passed, joint=decided.joint)] += weight
        chances.append(found)
    total = 0.0
    for nodes in itertools.product(*(range(len(tree)) for tree in trees)):
        weight = 1.0
        for found, node in zip(chances, nodes, strict=True):
            weight *= found[node]
        if weight:
            walked, text = followed(trees, nodes, [4] * len(trees), in_step=in_step)
            total += weight * sum(tree.depths[path[-1]] for tree, path in zip(trees, walked, strict=True))
            for new in text.sequences()[:, 1:].tolist():
                assert END not in new or not any(new[new.index(END) + 1 :])
    groups = [range(len(trees))] if in_step else [[row] for row in range(len(trees))]
    means = [
        len(group)
        * expected_accepted(
            [accepts[row] for row in group], [trees[row] for row in group], joint=decided.joint, ends={END}
        )
        for group in groups
    ]
    assert sum(means) == pytest.approx(total, abs=1e-12)


def winner(tree: TokenTree, passed: list[bool], *, joint: bool, node: int = 0) -> int:
    """The last accepted node, said once more."""
    for child in tree.children(node):
        if joint:
            found = winner(tree, passed, joint=True, node=child)
            if found >= 0:
                return found
        elif passed[child]:
            return winner(tree, passed, joint=False, node=child)
    return node if passed[node] or not node else -1


def test_a_law_without_a_token_is_an_error_where_the_text_comes_to_it() -> None:
    with pytest.raises(RuntimeError, match="leave no token"):
        followed([BUSH], (3,), [NO_TOKEN], in_step=True)
    # Behind an end, and where a neighbour stops before, it is none.
    for nodes, last, in_step in [((4,), [NO_TOKEN], False), ((3, 0), [NO_TOKEN, 4], True)]:
        followed([BUSH] * len(nodes), nodes, last, in_step=in_step)
