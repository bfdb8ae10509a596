"""Tiny languages: laws of target and draft that depend on the whole text, and every tree that a draft can draw.

Everything here is plain Python in float64 and knows nothing of the library but `TokenTree` and the names of the rules.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from hf_treespec.rules import Draws, Rule
from hf_treespec.tree import TokenTree

Law = tuple[float, ...]
Text = tuple[int, ...]
NO_LAW: Law = (math.nan,)
# (tokens so far, parents so far, node) -> children wanted; may look at everything that has been drawn.
Growth = Callable[[Text, Text, int], int]


def normalised(weights: list[float]) -> Law:
    total = math.fsum(weights)
    return tuple(w / total for w in weights)


@dataclass(frozen=True)
class World:
    """Two laws over V tokens.

    Args:
        vocab: V.
        seed: of the tables.
        spread: standard deviation of the target's logits.
        apart: of what the draft's logits differ by; 0 is the same law.
        target_zeros: tokens out of V that the target never says, chosen by the text.
        draft_zeros: the same of the draft.
        penalty: factor on the odds of tokens that the text holds already.
        disjoint: target says even tokens only, the draft odd ones.
        eos: token that ends the text, if any.
        lost: token behind which the target has no law.
        draft_lost: the same of the draft.
    """

    vocab: int = 3
    seed: int = 0
    spread: float = 1.0
    apart: float = 0.8
    target_zeros: int = 0
    draft_zeros: int = 0
    penalty: float = 1.0
    disjoint: bool = False
    eos: int | None = None
    lost: int | None = None
    draft_lost: int | None = None

    def __hash__(self) -> int:
        return hash((self.vocab, self.seed, self.spread, self.apart, self.penalty, self.disjoint))

    @cache  # noqa: B019
    def _laws(self, text: Text) -> tuple[Law, Law]:
        dice = random.Random(repr((self.seed, text)))
        logits = [dice.gauss(0, self.spread) for _ in range(self.vocab)]
        moved = [logit + dice.gauss(0, self.apart) for logit in logits]
        laws = []
        for values, zeros, parity in ((logits, self.target_zeros, 0), (moved, self.draft_zeros, 1)):
            weights = [
                math.exp(value) * (self.penalty if token in text else 1.0) for token, value in enumerate(values)
            ]
            for token in dice.sample(range(self.vocab), zeros):
                weights[token] = 0.0
            if self.disjoint:
                weights = [weight if token % 2 == parity else 0.0 for token, weight in enumerate(weights)]
            laws.append(normalised(weights))
        return laws[0], laws[1]

    def p(self, text: Text) -> Law:
        return NO_LAW * self.vocab if text[-1] == self.lost else self._laws(text)[0]

    def q(self, text: Text) -> Law:
        return NO_LAW * self.vocab if text[-1] == self.draft_lost else self._laws(text)[1]


def without(law: Law, tokens: list[int]) -> Law | None:
    weights = [0.0 if token in tokens else weight for token, weight in enumerate(law)]
    return normalised(weights) if math.fsum(weights) > 0 else None


def families(draws: Draws, q: Law, count: int, randoms: int) -> Iterator[tuple[list[tuple[int, bool]], float]]:
    """All lists of children of a node, as (token, whether it is random), with their probabilities."""
    ranked = [t for t in sorted(range(len(q)), key=lambda t: -q[t]) if q[t] > 0]
    randoms = {Draws.TOP: 0, Draws.HYBRID: min(randoms, count)}.get(draws, count)
    top = ranked[: count - randoms]
    after = [(token, False) for token in top]
    if draws is Draws.IID:
        for tokens in itertools.product(range(len(q)), repeat=randoms):
            weight = math.prod(q[t] for t in tokens)
            if weight:
                yield [(t, True) for t in tokens], weight
        return

    def distinct(taken: list[int], weight: float) -> Iterator[tuple[list[tuple[int, bool]], float]]:
        law = without(q, top + taken)
        if len(taken) == randoms or law is None:
            yield [(t, True) for t in taken] + after, weight
            return
        for token, chance in enumerate(law):
            if chance:
                yield from distinct([*taken, token], weight * chance)

    yield from distinct([], 1.0)


def texts_of(tree: TokenTree, prompt: Text) -> list[Text]:
    """Text at each node, its own token included; the root is the last token of the prompt."""
    return [(*prompt[:-1], *tree.path_tokens(node)) for node in range(len(tree))]


def all_trees(
    world: World, rule: Rule, growth: Growth, prompt: Text, *, randoms: int = 1
) -> Iterator[tuple[TokenTree, float]]:
    """Every tree that the draft can draw below the prompt, with its probability."""

    def grow(tokens: Text, parents: Text, drawn: frozenset[int], at: int, weight: float) -> Iterator:
        if at == len(tokens):
            yield TokenTree(tokens, parents, sampled=drawn), weight
            return
        text, node = [], at
        while node >= 0:
            text.append(tokens[node])
            node = parents[node]
        whole = (*prompt[:-1], *text[::-1])
        count = 0 if at and tokens[at] == world.eos else growth(tokens, parents, at)
        if not count:
            yield from grow(tokens, parents, drawn, at + 1, weight)
            return
        for family, chance in families(rule.draws, world.q(whole), count, randoms):
            new = frozenset(len(tokens) + i for i, (_, is_drawn) in enumerate(family) if is_drawn)
            yield from grow(
                (*tokens, *(token for token, _ in family)),
                (*parents, *[at] * len(family)),
                drawn | new,
                at + 1,
                weight * chance,
            )

    yield from grow((prompt[-1],), (-1,), frozenset(), 0, 1.0)


def depth_of(parents: Text, node: int) -> int:
    depth = 0
    while parents[node] >= 0:
        node, depth = parents[node], depth + 1
    return depth


def bush(*counts: int) -> Growth:
    """So many children at each depth."""
    return lambda tokens, parents, node: (*counts, *[0] * 9)[depth_of(parents, node)]


def adapted(seed: int, most: int, deepest: int, budget: int) -> Growth:
    """Children by a hash of everything that has been drawn so far."""

    def growth(tokens: Text, parents: Text, node: int) -> int:
        if depth_of(parents, node) >= deepest or len(tokens) > budget:
            return 0
        return random.Random(repr((seed, tokens, parents, node))).randint(0 if node else 1, most)

    return growth
