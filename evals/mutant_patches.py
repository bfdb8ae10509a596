"""The patches behind `mutants.py`: each gives a list of (owner, attribute, value) to replace in the library.

Shapes: B rows, N nodes, M = B * N, V vocabulary, as in `hf_treespec.verify.plan`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.draft import ChildSampler
from hf_treespec.tree import Candidate, TokenTree
from hf_treespec.verify import DraftLaws, NodeScorer, Plan, independent

# The package has functions of these names.
_plan = importlib.import_module("hf_treespec.verify.plan")
_draw = importlib.import_module("hf_treespec.verify.draw")

Patch = tuple[Any, str, Any]


# --- the test of siblings, one after the other


def in_turn(
    *,
    forgets_draws: bool = False,
    unnormalised: bool = False,
    frozen_a: bool = False,
    uncapped: bool = False,
    stale: list[tuple[Tensor, Tensor]] | None = None,
) -> Callable[[Any, Tensor], None]:
    """`_Siblings.accept_in_turn` with switches for what can go wrong in it; with none of them, what it is."""

    def accept_in_turn(self: Any, accept_M: Tensor) -> None:
        for slot, (here, child, tokens, drawn) in enumerate(self._slots):
            a, p = self.a[here], self.p[here]
            law = self._law(here, tokens, drawn)
            scaled = a[:, None] * p
            ratio = (scaled.gather(1, tokens[:, None]) / law.gather(1, tokens[:, None]))[:, 0]
            accept_M[child] = ratio if uncapped else ratio.clamp(max=1.0)
            if stale is not None and slot:
                stale.append((child, p))
            left = (scaled - law).clamp(min=0.0)
            mass = left.sum(-1)
            some = mass > 1e-12
            rest = mass + (1.0 - a)
            if not frozen_a:
                kept = torch.where(rest > 1e-12, mass / rest, torch.ones_like(a))
                self.a[here] = torch.where(some, kept, torch.zeros_like(a))
            share = torch.ones_like(mass) if unnormalised else mass
            self.p[here] = torch.where(some[:, None], left / share[:, None], p)
            if self._rest is not None and self._rule.draws != "iid" and not forgets_draws:
                self._rest[here[drawn], tokens[drawn]] = 0.0

    return accept_in_turn


def testing(**switches: Any) -> Callable[[], Sequence[Patch]]:
    return lambda: [(_plan._Siblings, "accept_in_turn", in_turn(**switches))]


def typical() -> Sequence[Patch]:
    def accept_in_turn(self: Any, accept_M: Tensor) -> None:
        self.accept_typical(accept_M)

    return [(_plan._Siblings, "accept_in_turn", accept_in_turn)]


def threshold(level: float) -> Callable[[], Sequence[Patch]]:
    """Children pass once the sum of the target's mass on them and their elder siblings is `level` of a coin."""

    def accept_in_turn(self: Any, accept_M: Tensor) -> None:
        before, whole, p = torch.zeros_like(self.a), torch.zeros_like(self.a), self.p.clone()
        for here, child, tokens, _ in self._slots:
            whole[here] = whole[here] + p[here].gather(1, tokens[:, None])[:, 0]
            now = (whole[here] / level).clamp(max=1.0)
            accept_M[child] = torch.where(before[here] < 1, (now - before[here]) / (1 - before[here]), 1.0)
            before[here] = now
            self.p[here, tokens] = 0.0
        self.p = self.p / self.p.sum(-1, keepdim=True)

    return lambda: [(_plan._Siblings, "accept_in_turn", accept_in_turn)]


def argmax() -> Sequence[Patch]:
    def accept_in_turn(self: Any, accept_M: Tensor) -> None:
        for here, child, tokens, _ in self._slots:
            accept_M[child] = (self.p[here].argmax(-1) == tokens).to(self.p)

    return [(_plan._Siblings, "accept_in_turn", accept_in_turn)]


def each_path_alone() -> Sequence[Patch]:
    """Every path is verified as if it were the only one, and the longest that passes is kept."""

    def accept_in_turn(self: Any, accept_M: Tensor) -> None:
        p = self.p.clone()
        for here, child, tokens, drawn in reversed(self._slots):
            law = self._law(here, tokens, drawn)
            ratio = p[here].gather(1, tokens[:, None]) / law.gather(1, tokens[:, None])
            accept_M[child] = ratio[:, 0].clamp(max=1.0)
            left = (p[here] - law).clamp(min=0.0)
            mass = left.sum(-1, keepdim=True)
            self.p[here] = torch.where(mass > 1e-12, left / mass, p[here])

    def winners(plan: Plan, trees: Sequence[TokenTree], coins_BN: Tensor) -> Tensor:
        best = []
        for tree, passed in zip(trees, (coins_BN < plan.accept_BN).tolist(), strict=True):
            alive = {0}
            for node in range(1, len(tree)):
                if passed[node] and tree.parents[node] in alive:
                    alive.add(node)
            best.append(max(sorted(alive), key=lambda node: tree.depths[node]))
        return torch.tensor(best, device=coins_BN.device)

    return [(_plan._Siblings, "accept_in_turn", accept_in_turn), (_draw, "winners", winners)]


# --- the plan as a whole


def _replanned(change: Callable[[Plan, Sequence[TokenTree], Tensor], None]) -> Sequence[Patch]:
    right = independent.plan

    def plan(
        rule: Any, trees: Sequence[TokenTree], target_BNV: Tensor, laws: DraftLaws | None = None, *ends: Any
    ) -> Plan:
        found = right(rule, trees, target_BNV, laws, *ends)
        change(found, trees, target_BNV)
        return found

    return [(independent, "plan", plan)]


def correction_from_target() -> Sequence[Patch]:
    def change(plan: Plan, trees: Sequence[TokenTree], target_BNV: Tensor) -> None:
        plan.residual_BNV.copy_(target_BNV)

    return _replanned(change)


def bonus_from_parent() -> Sequence[Patch]:
    def change(plan: Plan, trees: Sequence[TokenTree], target_BNV: Tensor) -> None:
        for row, tree in enumerate(trees):
            for node in range(1, len(tree)):
                if not tree.children(node):
                    plan.residual_BNV[row, node] = target_BNV[row, tree.parents[node]]

    return _replanned(change)


def coin_used_again() -> Sequence[Patch]:
    """One uniform goes down the running sum of the siblings, and then picks the last token by its place in the law.

    Given that all children were rejected it lies in [b, 1), b the chance of any: what that makes of the last token.
    """

    def change(plan: Plan, trees: Sequence[TokenTree], target_BNV: Tensor) -> None:
        for row, tree in enumerate(trees):
            for node in range(len(tree)):
                children = list(tree.children(node))
                if children:
                    b = 1 - (1 - plan.accept_BN[row, children]).prod()
                    if b < 1:
                        law = plan.residual_BNV[row, node]
                        ends = (law / law.sum()).cumsum(-1).clamp(min=float(b))
                        starts = torch.cat([b[None].to(ends), ends[:-1]])
                        plan.residual_BNV[row, node] = (ends - starts) / (1 - b)

    return _replanned(change)


def stale_at_leaves() -> Sequence[Patch]:
    stale: list[tuple[Tensor, Tensor]] = []

    def change(plan: Plan, trees: Sequence[TokenTree], target_BNV: Tensor) -> None:
        nodes, vocab = target_BNV.shape[1:]
        for children, laws in stale:
            for child, law in zip(children.tolist(), laws, strict=True):
                if not trees[child // nodes].children(child % nodes):
                    plan.residual_BNV.view(-1, vocab)[child] = law
        stale.clear()

    return [*testing(stale=stale)(), *_replanned(change)]


def law_of_parent() -> Sequence[Patch]:
    right = independent.plan

    def plan(
        rule: Any, trees: Sequence[TokenTree], target_BNV: Tensor, laws: DraftLaws | None = None, *ends: Any
    ) -> Plan:
        if laws is not None:
            rows = [
                # A row that has ended keeps its laws longer than its tree.
                {node: found.get(tree.parents[node], row) for node, row in found.items() if node < len(tree)}
                for tree, found in zip(trees, laws.rows, strict=True)
            ]
            laws = replace(laws, rows=rows)
        return right(rule, trees, target_BNV, laws, *ends)

    return [(independent, "plan", plan)]


# --- the draws


def drawing(change: Callable[..., list[Candidate]]) -> Callable[[], Sequence[Patch]]:
    """`change(draw, sampler, count, law_V)` with `draw(count, law_V)`, the right one."""

    def patches() -> Sequence[Patch]:
        right = ChildSampler._draw

        def _draw(
            self: ChildSampler, row: int, position: int, node: int, count: int, law_V: Tensor
        ) -> list[Candidate]:
            return change(lambda n, law: right(self, row, position, node, n, law), self, count, law_V)

        return [(ChildSampler, "_draw", _draw)]

    return patches


def _reported(draw: Any, sampler: Any, count: int, drawn_V: Tensor, said_V: Tensor) -> list[Candidate]:
    """Children from one law that are said to be from another."""
    before = len(sampler._laws)
    children = draw(count, drawn_V / drawn_V.sum())
    if len(sampler._laws) > before:
        sampler._laws[-1] = said_V
    return children


def colder(draw: Any, sampler: Any, count: int, law_V: Tensor) -> list[Candidate]:
    return _reported(draw, sampler, count, law_V ** (1 / 0.7), law_V)


def nucleus(draw: Any, sampler: Any, count: int, law_V: Tensor) -> list[Candidate]:
    ordered = law_V.sort(descending=True)
    inside = ordered.values.cumsum(-1) - ordered.values < 0.8
    return _reported(draw, sampler, count, law_V.index_fill(0, ordered.indices[~inside], 0.0), law_V)


def by_q(draw: Any, sampler: Any, count: int, law_V: Tensor) -> list[Candidate]:
    return sorted(draw(count, law_V), key=lambda child: -float(law_V[child.token]))


def pruned(draw: Any, sampler: Any, count: int, law_V: Tensor) -> list[Candidate]:
    children = draw(count + 1, law_V)
    best = sorted(range(len(children)), key=lambda i: -float(law_V[children[i].token]))[:count]
    return [children[i] for i in sorted(best)]


def without_repeats(draw: Any, sampler: Any, count: int, law_V: Tensor) -> list[Candidate]:
    return list({child.token: child for child in reversed(draw(count, law_V))}.values())[::-1]


def top_as_sampled(draw: Any, sampler: Any, count: int, law_V: Tensor) -> list[Candidate]:
    children = draw(count, law_V)
    best = law_V.topk(len(children)).indices.tolist()
    return [child._replace(token=token) for child, token in zip(children, best, strict=True)]


def top_first() -> Sequence[Patch]:
    """The most likely children are tested before the random one, whose law is not renormalised over the others."""

    def change(draw: Any, sampler: Any, count: int, law_V: Tensor) -> list[Candidate]:
        return sorted(draw(count, law_V), key=lambda child: child.sampled)

    def _law(self: Any, here: Tensor, tokens: Tensor, drawn: Tensor) -> Tensor:
        law = torch.zeros_like(self.p[here]).scatter_(1, tokens[:, None], 1.0)
        return law if self._rest is None else torch.where(drawn[:, None], self._rest[here], law)

    return [*drawing(change)(), (_plan._Siblings, "_law", _law)]


def order_by_subtree() -> Sequence[Patch]:
    """The last child of the root is put in front if what was drawn below the first one is unlikelier than the draft's
    mean."""
    right, decide = TokenTree.children, independent.plan
    poor: list[TokenTree] = []

    def looks_poor(tree: TokenTree, row: int, laws: DraftLaws) -> bool:
        first = next(iter(right(tree, 0)), None)
        # Of a row that has ended no law was drawn from.
        if first not in laws.rows[row] or not (below := right(tree, first)):
            return False
        law_V = laws.laws_RV[laws.rows[row][first]]
        return float(law_V[[tree.tokens[node] for node in below]].log().mean()) < float(
            torch.xlogy(law_V, law_V).sum()
        )

    def plan(
        rule: Any, trees: Sequence[TokenTree], target_BNV: Tensor, laws: DraftLaws | None = None, *ends: Any
    ) -> Plan:
        poor[:] = [] if laws is None else [tree for row, tree in enumerate(trees) if looks_poor(tree, row, laws)]
        return decide(rule, trees, target_BNV, laws, *ends)

    def children(self: TokenTree, node: int) -> tuple[int, ...]:
        found = right(self, node)
        return found[-1:] + found[:-1] if node == 0 and any(self is tree for tree in poor) else found

    return [(independent, "plan", plan), (TokenTree, "children", children)]


def committed_only() -> Sequence[Patch]:
    def tree_scores(
        self: NodeScorer, logits_BNV: Tensor, trees: Any, lengths: Sequence[int], buffer: Any, stand: Any
    ) -> Tensor:
        scores = []
        for row, length in enumerate(lengths):
            ids = buffer.text(length)[row : row + 1].expand(logits_BNV.shape[1], -1)
            scores.append(_compat.process_logits(self._processors, ids, logits_BNV[row].float()))
        return torch.stack(scores)

    return [(NodeScorer, "tree_scores", tree_scores)]
