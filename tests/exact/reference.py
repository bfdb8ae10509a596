"""Verification by independent draws, written down once more: plain Python, one tree, one coin at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from exact.worlds import Law, Text, World, normalised, texts_of, without
from hf_treespec.rules import Draws, Rule
from hf_treespec.tree import TokenTree


@dataclass
class Reference:
    """accept[node] and residual[node] as in `hf_treespec.verify.Plan`."""

    accept: list[float]
    residual: list[Law]


def laws_of_children(rule: Rule, tree: TokenTree, node: int, q: Law) -> list[Law]:
    """The law that each child was drawn from, given the siblings before it."""
    chosen = [tree.tokens[c] for c in tree.children(node) if c not in tree.sampled]
    laws: list[Law] = []
    gone: list[int] = []
    for child in tree.children(node):
        token = tree.tokens[child]
        if child not in tree.sampled:
            laws.append(tuple(float(t == token) for t in range(len(q))))
            continue
        law = without(q, chosen + gone)
        assert law is not None
        laws.append(law)
        if rule.draws is not Draws.IID:
            gone.append(token)
    return laws


def rejected(a: float, p: Law, law: Law) -> tuple[float, Law]:
    left = [max(a * x - y, 0.0) for x, y in zip(p, law, strict=True)]
    mass = math.fsum(left)
    if mass <= 1e-12:
        return 0.0, p
    return mass / (mass + (1.0 - a)), tuple(x / mass for x in left)


def kseq(p: Law, q: Law, k: int) -> tuple[float, Law]:
    """rho and the residual of k i.i.d. draws."""

    def b(rho: float) -> float:
        return math.fsum(min(x / rho, y) for x, y in zip(p, q, strict=True))

    low, high = 1.0, float(k)
    for _ in range(200):
        rho = (low + high) / 2
        low, high = (rho, high) if 1 - (1 - b(rho)) ** k > rho * b(rho) else (low, rho)
    share = (1 - (1 - b(high)) ** k) / b(high) if b(high) > 1e-12 else 0.0
    left = [max(x - min(x / high, y) * share, 0.0) for x, y in zip(p, q, strict=True)]
    return high, normalised(left) if math.fsum(left) > 1e-12 else p


def reference(rule: Rule, tree: TokenTree, world: World, prompt: Text) -> Reference:
    texts = texts_of(tree, prompt)
    accept = [1.0] * len(tree)
    residual = [world.p(text) for text in texts]
    left = [1.0] * len(tree)
    for node in range(len(tree)):
        children = tree.children(node)
        if not children:
            left[node] = accept[node]
            continue
        p, a = world.p(texts[node]), accept[node] if rule.joint else 1.0
        if rule.shared_test and children[0] in tree.sampled:
            q = world.q(texts[node])
            rho, p = kseq(p, q, len(children))
            for child in children:
                token = tree.tokens[child]
                accept[child] = min(1.0, world.p(texts[node])[token] / (rho * q[token]))
        else:
            for child, law in zip(children, laws_of_children(rule, tree, node, world.q(texts[node])), strict=True):
                token = tree.tokens[child]
                accept[child] = min(1.0, a * p[token] / law[token])
                a, p = rejected(a, p, law)
        left[node], residual[node] = a, p
    if rule.joint:
        accept = left
    accept[0] = 1.0
    return Reference(accept, residual)


def winner_chances(rule: Rule, tree: TokenTree, accept: list[float]) -> list[float]:
    """Probability that each node is the last accepted one."""
    chances = [0.0] * len(tree)
    if not rule.joint:

        def down(node: int, alive: float) -> None:
            for child in tree.children(node):
                down(child, alive * accept[child])
                alive *= 1 - accept[child]
            chances[node] += alive

        down(0, 1.0)
        return chances

    def up(node: int, alive: float) -> float:
        for child in tree.children(node):
            alive = up(child, alive)
        chances[node] = alive * accept[node]
        return alive * (1 - accept[node])

    up(0, 1.0)
    return chances
