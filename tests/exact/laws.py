"""The exact law of the text that a rule gives, by enumeration of every tree and every coin."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import torch

from exact.reference import winner_chances
from exact.worlds import Growth, Text, World, all_trees, texts_of
from hf_treespec.rules import Rule
from hf_treespec.tree import TokenTree
from hf_treespec.verify import DraftLaws, Plan, plan

Joint = dict[Text, float]
PROMPT = (0,)
# In place of a token that a law without one was asked for: an error.
ERROR = -1


def padded(rows: list[list[tuple[float, ...]]], vocab: int) -> torch.Tensor:
    width = max(map(len, rows))
    filler = tuple(1.0 / vocab for _ in range(vocab))
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows], dtype=torch.float64)


def planned(rule: Rule, trees: list[TokenTree], world: World, prompt: Text) -> Plan:
    """The library's plan for some trees, as one batch."""
    targets, laws, rows = [], [], []
    for tree in trees:
        texts = texts_of(tree, prompt)
        targets.append([world.p(text) for text in texts])
        found = {}
        for node, text in enumerate(texts):
            if any(child in tree.sampled for child in tree.children(node)):
                found[node] = len(laws)
                laws.append(world.q(text))
        rows.append(found)
    draft = DraftLaws(torch.tensor(laws, dtype=torch.float64), rows) if laws else None
    return plan(rule, trees, padded(targets, world.vocab), draft)


def completed(joint: Joint, text: Text, weight: float, length: int, world: World, prompt: Text) -> None:
    """Add what the target makes of a text that is shorter than `length`; longer ones are cut, at eos too."""
    text = text[:length]
    if world.eos is not None and world.eos in text:
        text = text[: text.index(world.eos) + 1]
        joint[text] += weight
        return
    if len(text) == length or ERROR in text:
        joint[text] += weight
        return
    for token, chance in enumerate(world.p((*prompt, *text))):
        if math.isnan(chance):
            joint[(*text, ERROR)] += weight
            return
        if chance:
            completed(joint, (*text, token), weight * chance, length, world, prompt)


def law_of_text(
    rule: Rule, world: World, growth: Growth, length: int, *, randoms: int = 1, prompt: Text = PROMPT
) -> Joint:
    """Law of the first `length` tokens behind the prompt, from one round and the target's own words after it."""
    trees, weights = zip(*all_trees(world, rule, growth, prompt, randoms=randoms), strict=True)
    found = planned(rule, list(trees), world, prompt)
    joint: Joint = defaultdict(float)
    accepts, residuals = found.accept_BN.tolist(), found.residual_BNV.tolist()
    for tree, weight, accept, residual in zip(trees, weights, accepts, residuals, strict=True):
        for node, chance in enumerate(winner_chances(rule, tree, accept)):
            path = tuple(tree.path_tokens(node)[1:])
            for token, last in enumerate(residual[node]):
                if chance * last:
                    completed(joint, (*path, token), weight * chance * last, length, world, prompt)
    return joint


def law_of_target(world: World, length: int, prompt: Text = PROMPT) -> Joint:
    joint: Joint = defaultdict(float)
    completed(joint, (), 1.0, length, world, prompt)
    return joint


def total_variation(one: Joint, other: Joint) -> float:
    return math.fsum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other}) / 2


def worst(one: Joint, other: Joint) -> float:
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})


def all_coins(count: int) -> list[tuple[bool, ...]]:
    return list(itertools.product((False, True), repeat=count))
