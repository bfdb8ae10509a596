"""The exact law of the text by the library's own draft, plan and winners: a choice oracle replays every branch.

Only two things are not the library's: the two draws of `ChildSampler` ask the oracle (that they follow the law that
they are given is tested in tests/unit/test_sampling.py), and coins are the two strata of each test.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from exact.laws import ERROR, PROMPT, Joint, completed, padded
from exact.worlds import Text, World, texts_of
from hf_treespec.draft import ChildSampler
from hf_treespec.rules import Rule
from hf_treespec.tree import TokenTree, TreeLimits, grow_adapted
from hf_treespec.verify import DraftLaws, GumbelNoise, Plan, RoundNoise, independent

_draw = importlib.import_module("hf_treespec.verify.draw")
# Trees -> the target's laws `[B, N, V]`, where they are not the world's own.
Targets = Callable[[Sequence[TokenTree]], Tensor]


class Oracle:
    """Makes choices by a script, and takes the first option beyond it."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script = list(script)
        self.widths: list[int] = []
        self.weight = 1.0

    def choose(self, weights: Sequence[float]) -> int:
        total = math.fsum(weights)
        options = [i for i, weight in enumerate(weights) if weight > 0]
        place = len(self.widths)
        if place == len(self.script):
            self.script.append(0)
        self.widths.append(len(options))
        chosen = options[self.script[place]]
        self.weight *= weights[chosen] / total
        return chosen


def every_branch(run: Callable[[Oracle], object]) -> Iterator[tuple[object, float]]:
    script: list[int] | None = []
    while script is not None:
        oracle = Oracle(script)
        found = run(oracle)
        yield found, oracle.weight
        script = None
        for place in reversed(range(len(oracle.widths))):
            if oracle.script[place] + 1 < oracle.widths[place]:
                script = [*oracle.script[:place], oracle.script[place] + 1]
                break


class OracleSampler(ChildSampler):
    def __init__(self, rule: Rule, randoms: int, vocab: int, oracle: Oracle) -> None:
        super().__init__(rule, randoms, RoundNoise(GumbelNoise(0, vocab)))
        self._oracle = oracle

    def _iid(self, row: int, position: int, node: int, count: int, rest_V: Tensor) -> list[int]:
        return [self._oracle.choose(rest_V.tolist()) for _ in range(count)]

    def _distinct(self, row: int, position: int, node: int, count: int, rest_V: Tensor) -> list[int]:
        rest, found = rest_V.tolist(), []
        while len(found) < count and any(rest):
            found.append(self._oracle.choose(rest))
            rest[found[-1]] = 0.0
        return found


def drafts(
    rule: Rule, world: World, limits: TreeLimits, prompt: Text, randoms: int
) -> Iterator[tuple[TokenTree, DraftLaws | None, float]]:
    """Every tree of the library's draft, with the laws it keeps and its probability."""

    def run(oracle: Oracle) -> tuple[TokenTree, DraftLaws | None]:
        sampler = OracleSampler(rule, randoms, world.vocab, oracle)
        sampler.begin()

        def expand(builders, frontier):
            (builder,), (nodes,) = builders, frontier
            tree = builder.freeze()[0]
            texts = texts_of(tree, prompt)
            laws = torch.tensor([world.q(texts[node]) for node in nodes], dtype=torch.float64)
            return [sampler.draw(0, len(prompt) - 1, nodes, [builder.wanted[node] for node in nodes], laws)]

        ((tree, _),) = grow_adapted([prompt[-1]], expand, [limits])
        return tree, sampler.laws(1)

    for (tree, laws), weight in every_branch(run):
        yield tree, laws, weight


_WINNERS: dict[tuple[object, ...], list[int]] = {}


def _winners(plan: Plan, tree: TokenTree) -> list[int]:
    """The library's winner under every outcome of every test."""
    # Trees with the same children in the same order have the same; a bug may be in the function or in the order.
    key = (_draw.winners, tuple(tree.children(node) for node in range(len(tree))), plan.joint)
    if key not in _WINNERS:
        outcomes = list(itertools.product((0.25, 0.75), repeat=len(tree) - 1))
        coins = torch.tensor([[0.0, *outcome] for outcome in outcomes])
        accept = torch.full_like(coins, 0.5)
        trees = [tree] * len(outcomes)
        _WINNERS[key] = _draw.winners(Plan(accept, accept[..., None], plan.joint), trees, coins).tolist()
    return _WINNERS[key]


def chances_of_winners(plan: Plan, tree: TokenTree, row: int) -> list[float]:
    """Probability of each node to be the last accepted one, by every outcome of every test."""
    accept = plan.accept_BN[row, 1 : len(tree)].clamp(0.0, 1.0).tolist()
    chances = [0.0] * len(tree)
    outcomes = itertools.product((True, False), repeat=len(tree) - 1)
    for node, outcome in zip(_winners(plan, tree), outcomes, strict=True):
        chances[node] += math.prod(b if passed else 1 - b for b, passed in zip(accept, outcome, strict=True))
    return chances


def law_through_library(
    rule: Rule,
    world: World,
    limits: TreeLimits,
    length: int,
    *,
    randoms: int = 1,
    prompt: Text = PROMPT,
    targets: Targets | None = None,
) -> Joint:
    """Law of the first `length` tokens behind the prompt."""
    trees, kept, weights = zip(*drafts(rule, world, limits, prompt, randoms), strict=True)
    stacked, rows = [], []
    for laws in kept:
        rows.append({} if laws is None else {n: len(stacked) + place for n, place in laws.rows[0].items()})
        stacked.extend([] if laws is None else laws.laws_RV)
    if targets is None:
        target = padded([[world.p(text) for text in texts_of(tree, prompt)] for tree in trees], world.vocab)
    else:
        target = targets(trees)
    ends = frozenset() if world.eos is None else frozenset({world.eos})
    plan = independent.plan(rule, trees, target, DraftLaws(torch.stack(stacked), rows) if stacked else None, ends)
    joint: Joint = defaultdict(float)
    for row, (tree, weight) in enumerate(zip(trees, weights, strict=True)):
        for node, chance in enumerate(chances_of_winners(plan, tree, row)):
            if chance:
                law = plan.residual_BNV[row, node].tolist()
                total, path = math.fsum(law), tuple(tree.path_tokens(node)[1:])
                if math.isnan(total):
                    completed(joint, (*path, ERROR), weight * chance, length, world, prompt)
                    continue
                for token, mass in enumerate(law):
                    if mass:
                        completed(joint, (*path, token), weight * chance * mass / total, length, world, prompt)
    return joint
