"""Acceptance probabilities and residual laws of a whole tree, as tensor functions without a coin.

The state of a node is (a, p'): the probability that it is still to be accepted, and its residual target law; it begins
with (1, p). A child c that was drawn from a law L is accepted with b = min(1, a p'(c) / L(c)); else the state becomes
r = (a p' - L)+, S = sum r, a = S / (S + 1 - a), p' = r / S. L is one-hot for a child that was not drawn at random.

Top-down rules begin each node that they come to with a = 1. Joint rules begin it with its b, and what is left of a
once all its children are rejected is the probability that the node itself is the last to be accepted.

Lossless because "accept with probability a, go on with x ~ p'" and "draw c ~ L; accept it with b and go on below it,
else go on with (a', p')" have the same law: the mass of a first token x is min(L, a p')(x) + (a p' - L)+(x) = a p'(x).

A node behind which no text goes on, because its token ends the text or because the target's law there holds a NaN, is
a leaf: the draft's guesses below it are worth nothing, and must not move the walk to where they are.

Shapes: B rows, N nodes with the root (rows with fewer are padded), M = B * N, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_treespec.errors import TreeSpecError
from hf_treespec.rules import Draws, Rule
from hf_treespec.tree import TokenTree

__all__ = ["DraftLaws", "Plan", "plan"]

# A residual of less mass is rounding; the chance of coming there is as small.
_NO_MASS = 1e-12
_BISECTIONS = 50


@dataclass(frozen=True, slots=True)
class DraftLaws:
    """The laws that children were drawn from: the very arrays, after all processors of the draft.

    Args:
        laws_RV: probabilities, one row for each node that has sampled children.
        rows: per batch row a map from node to row of `laws_RV`.
    """

    laws_RV: Tensor
    rows: Sequence[Mapping[int, int]] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Plan:
    """What decides a round before a coin is thrown.

    Args:
        accept_BN: float. Joint: probability that the node is the last accepted one, given that none before it in
            post-order is. Top-down: that it is accepted, given that its parent is and no sibling before it.
        residual_BNV: law of the token after a node whose children were all rejected; NaN where the target's is.
        joint: which of the two.
    """

    accept_BN: Tensor
    residual_BNV: Tensor
    joint: bool


def plan(
    rule: Rule,
    trees: Sequence[TokenTree],
    target_BNV: Tensor,
    laws: DraftLaws | None = None,
    ends: Set[int] = frozenset(),
) -> Plan:
    """Plan a round.

    Args:
        rule: a lossless rule, or "typical-lossy".
        trees: one per row; siblings in the order in which they were drawn.
        target_BNV: the target's law at each node after all processors, probabilities; NaN where it leaves no token.
        laws: of nodes with sampled children.
        ends: ids that end a text, other than at the root.

    Returns:
        The plan, in the dtype and on the device of `target_BNV`.

    Raises:
        TreeSpecError: if a draft left out the law of a node whose children it sampled.
    """
    batch, nodes, vocab = target_BNV.shape
    target_MV = target_BNV.reshape(batch * nodes, vocab)
    residual_MV = target_MV.clone()
    accept_M = target_MV.new_ones(batch * nodes)
    levels, behind = _levels(trees, ends)
    if behind:
        accept_M[torch.tensor([row * nodes + node for row, node in behind], device=target_BNV.device)] = 0.0
    for level in levels:
        state = _Siblings(rule, level, trees, nodes, target_MV, laws)
        if rule.joint:
            state.a = accept_M[state.at]
        lost = state.p.sum(-1).isnan()
        if not rule.lossless:
            state.accept_typical(accept_M)
        elif rule.shared_test:
            state.accept_shared(accept_M)
        else:
            state.accept_in_turn(accept_M)
        state.close(lost, accept_M)
        if not rule.lossless:
            continue
        residual_MV[state.at] = state.p
        if rule.joint:
            # Nobody asks any more with what probability the node began, but where nothing can be below it.
            accept_M[state.at] = torch.where(lost, accept_M[state.at], state.a)
    if rule.joint:
        accept_M[::nodes] = 1.0
    return Plan(accept_M.view(batch, nodes), residual_MV.view_as(target_BNV), rule.joint)


def _levels(trees: Sequence[TokenTree], ends: Set[int]) -> tuple[list[list[tuple[int, int]]], list[tuple[int, int]]]:
    """Per depth the inner nodes that a text may go on from, and all nodes behind the others, as (row, node)."""
    levels: list[list[tuple[int, int]]] = []
    behind: list[tuple[int, int]] = []
    for row, tree in enumerate(trees):
        closed: set[int] = set()
        for node in range(len(tree)):
            if node and tree.parents[node] in closed:
                behind.append((row, node))
                closed.add(node)
            elif node and tree.tokens[node] in ends:
                closed.add(node)
            elif tree.children(node):
                depth = tree.depths[node]
                levels.extend([] for _ in range(depth + 1 - len(levels)))
                levels[depth].append((row, node))
    return levels, behind


class _Siblings:
    """All children of the inner nodes of one depth, tested slot by slot.

    Args:
        rule: the rule.
        level: inner nodes, as (row, node).
        trees: the trees.
        nodes: N.
        target_MV: laws of the target.
        laws: of the draft.
    """

    def __init__(
        self,
        rule: Rule,
        level: Sequence[tuple[int, int]],
        trees: Sequence[TokenTree],
        nodes: int,
        target_MV: Tensor,
        laws: DraftLaws | None,
    ) -> None:
        device = target_MV.device
        self._rule = rule
        self.at = torch.tensor([row * nodes + node for row, node in level], device=device)
        self.p = target_MV[self.at]
        self.a = self.p.new_ones(len(level))
        found = [
            [(c, trees[row].tokens[c], c in trees[row].sampled) for c in trees[row].children(node)]
            for row, node in level
        ]
        self._slots: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for slot in range(max(map(len, found))):
            places = [i for i, children in enumerate(found) if len(children) > slot]
            self._slots.append(
                (
                    torch.tensor(places, device=device),
                    torch.tensor([level[i][0] * nodes + found[i][slot][0] for i in places], device=device),
                    torch.tensor([found[i][slot][1] for i in places], device=device),
                    torch.tensor([found[i][slot][2] for i in places], device=device),
                )
            )
        self._rest: Tensor | None = None
        random = [any(drawn for _, _, drawn in children) for children in found]
        if any(random):
            known = []
            for i, (row, node) in enumerate(level):
                if laws is not None and node in laws.rows[row]:
                    known.append((i, laws.rows[row][node]))
                elif random[i]:
                    raise TreeSpecError(
                        f"the draft sampled children of node {node} of row {row} and left out the law they come from"
                    )
            assert laws is not None
            rest = torch.zeros_like(self.p)
            index = torch.tensor(known, device=device).unbind(-1)
            rest[index[0]] = laws.laws_RV.to(rest)[index[1]]
            # Random children are drawn beside those that were chosen for being the most likely.
            for here, _, tokens, drawn in self._slots:
                rest[here[~drawn], tokens[~drawn]] = 0.0
            self._rest = rest

    def _law(self, here: Tensor, tokens: Tensor, drawn: Tensor) -> Tensor:
        """The law that each child of a slot was drawn from, given the ones before it, `[S, V]`."""
        if self._rest is None:
            return torch.zeros_like(self.p[here]).scatter_(1, tokens[:, None], 1.0)
        rest = self._rest[here]
        law = rest / rest.sum(-1, keepdim=True)
        law[~drawn] = 0.0
        # In place: laws of a whole vocabulary are the largest tensors of a round.
        return law.scatter_(1, tokens[:, None], torch.where(drawn[:, None], law.gather(1, tokens[:, None]), 1.0))

    def close(self, lost: Tensor, accept_M: Tensor) -> None:
        """Accept no child of some of the nodes."""
        for here, child, _, _ in self._slots:
            accept_M[child] = accept_M[child].masked_fill(lost[here], 0.0)

    def accept_in_turn(self, accept_M: Tensor) -> None:
        """Test children one after the other, and give the state that is left once all are rejected."""
        for here, child, tokens, drawn in self._slots:
            a, p = self.a[here], self.p[here]
            law = self._law(here, tokens, drawn)
            of_token = tokens[:, None]
            scaled = a[:, None] * p
            accept_M[child] = (scaled.gather(1, of_token) / law.gather(1, of_token))[:, 0].clamp(max=1.0)
            left = scaled.sub_(law).clamp_(min=0.0)
            mass = left.sum(-1)
            some = mass > _NO_MASS
            self.a[here] = torch.where(some, mass / (mass + (1.0 - a)), torch.zeros_like(a))
            self.p[here] = torch.where(some[:, None], left.div_(mass[:, None]), p)
            if self._rest is not None and self._rule.draws is not Draws.IID:
                self._rest[here[drawn], tokens[drawn]] = 0.0

    def accept_shared(self, accept_M: Tensor) -> None:
        """K-SEQ: every draw c passes with min(1, p(c) / (rho q(c))); rho makes that fit the draws of the node.

        rho in [1, k] solves 1 - (1 - b)^k = rho b with b = sum min(p / rho, q).
        """
        if self._rest is None:
            # Children that were not drawn at random: as one-hot laws.
            return self.accept_in_turn(accept_M)
        p = self.p
        drawn = torch.stack(
            [torch.zeros_like(self.a).index_add(0, here, flag.to(p)) for here, _, _, flag in self._slots]
        )
        k = drawn.sum(0)
        mass = self._rest.sum(-1, keepdim=True)
        # Of a node without random children nothing is left, which is no law.
        q = self._rest / torch.where(mass == 0, torch.ones_like(mass), mass)
        low, high = torch.ones_like(k), k.clamp(min=1.0)
        for _ in range(_BISECTIONS):
            rho = (low + high) / 2
            b = torch.minimum(p / rho[:, None], q).sum(-1)
            more = 1 - (1 - b) ** k > rho * b
            low, high = torch.where(more, rho, low), torch.where(more, high, rho)
        rho = high
        passed = torch.minimum(p / rho[:, None], q)
        b = passed.sum(-1)
        for here, child, tokens, _ in self._slots:
            of_token = tokens[:, None]
            accept_M[child] = (passed[here].gather(1, of_token) / q[here].gather(1, of_token))[:, 0]
        share = torch.where(b > _NO_MASS, (1 - (1 - b) ** k) / b, torch.zeros_like(b))
        left = (p - passed * share[:, None]).clamp(min=0.0)
        mass = left.sum(-1, keepdim=True)
        self.p = torch.where(mass > _NO_MASS, left / mass, p)

    def accept_typical(self, accept_M: Tensor) -> None:
        """Accept what the target finds typical, p(c) > min(0.09, 0.3 exp(-H)); not the target's own law."""
        entropy = -(self.p * self.p.clamp(min=torch.finfo(self.p.dtype).tiny).log()).sum(-1)
        threshold = torch.minimum(torch.full_like(entropy, 0.09), 0.3 * torch.exp(-entropy))
        for here, child, tokens, _ in self._slots:
            accept_M[child] = (self.p[here].gather(1, tokens[:, None])[:, 0] > threshold[here]).to(self.p)
