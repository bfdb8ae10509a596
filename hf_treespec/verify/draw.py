"""From a plan to a node and a token: the coins of verification by independent draws.

Coins are keyed by (seed, stream of the row, position of the root, purpose, node), so that a row's text depends on
neither its neighbours nor the batch, and no number is used twice: rounds begin at different positions.

Shapes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

import torch
from torch import Tensor

from hf_treespec.tree import TokenTree
from hf_treespec.verify.plan import Plan

__all__ = ["NO_TOKEN", "draw", "expected_accepted", "post_order", "taken", "winners"]

NO_TOKEN = -1


def post_order(tree: TokenTree) -> list[int]:
    """Nodes with children before their parents and siblings in order."""
    order: list[int] = []
    stack = [(0, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        else:
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(tree.children(node)))
    return order


def winners(plan: Plan, trees: Sequence[TokenTree], coins_BN: Tensor) -> Tensor:
    """The last accepted node of each row, int64 `[B]`.

    Args:
        plan: of the round.
        trees: one per row.
        coins_BN: uniform in [0, 1), one for each node.
    """
    passed_BN = coins_BN < plan.accept_BN
    batch, nodes = passed_BN.shape
    device = passed_BN.device
    if plan.joint:
        orders = [post_order(tree) for tree in trees]
        order_BN = torch.tensor([order + [0] * (nodes - len(order)) for order in orders], device=device)
        # The root always passes and comes last; its copies in the padding come later.
        first = passed_BN.gather(1, order_BN).to(torch.int8).argmax(1, keepdim=True)
        return order_BN.gather(1, first)[:, 0]
    # Where each node hands over to: its first child that passed, or itself.
    width = max(len(tree.children(node)) for tree in trees for node in range(len(tree)))
    if not width:
        return torch.zeros(batch, dtype=torch.long, device=device)
    table = [
        [[*tree.children(node), *[node] * (width - len(tree.children(node)))] for node in range(len(tree))]
        + [[0] * width] * (nodes - len(tree))
        for tree in trees
    ]
    children_BNK = torch.tensor(table, device=device)
    own_BN1 = torch.arange(nodes, device=device).expand(batch, nodes)[..., None]
    real_BNK = children_BNK != own_BN1
    ok_BNK = passed_BN.gather(1, children_BNK.reshape(batch, -1)).view_as(children_BNK) & real_BNK
    first_BN1 = ok_BNK.to(torch.int8).argmax(-1, keepdim=True)
    next_BN = torch.where(ok_BNK.any(-1, keepdim=True), children_BNK.gather(-1, first_BN1), own_BN1)[..., 0]
    at = torch.zeros(batch, 1, dtype=torch.long, device=device)
    for _ in range(max(tree.max_depth for tree in trees)):
        at = next_BN.gather(1, at)
    return at[:, 0]


def draw(
    plan: Plan, trees: Sequence[TokenTree], coins_BN: Tensor, noise_BV: Tensor
) -> list[tuple[int, int, list[float]]]:
    """Last accepted node and the token behind it, per row; one transfer to the host.

    Args:
        plan: of the round.
        trees: one per row.
        coins_BN: uniform in [0, 1), one for each node.
        noise_BV: standard Gumbel noise for the last token.

    Returns:
        Per row the node, the token (`NO_TOKEN` where the law holds a NaN), and `Plan.accept_BN` of the row.
    """
    nodes_B = winners(plan, trees, coins_BN)
    rows = torch.arange(len(trees), device=nodes_B.device)
    law_BV = plan.residual_BNV[rows, nodes_B]
    # Of a law with zeros the log is -inf, which no noise lifts.
    tokens_B = (law_BV.to(noise_BV.dtype).log() + noise_BV).argmax(-1)
    tokens_B = torch.where(law_BV.isfinite().all(-1), tokens_B, NO_TOKEN)
    # Ids are exact in any float that has the bits for them.
    accept_BN = plan.accept_BN.to(noise_BV.dtype)
    found = torch.cat([nodes_B[:, None].to(accept_BN), tokens_B[:, None].to(accept_BN), accept_BN], dim=1).tolist()
    return [(int(row[0]), int(row[1]), row[2:]) for row in found]


def expected_accepted(
    accepts: Sequence[Sequence[float]], trees: Sequence[TokenTree], *, joint: bool, ends: Set[int] = frozenset()
) -> float:
    """Expected accepted tokens of each row over the coins: the Rao-Blackwell form of the real number.

    Rows in step go as far as all of them do. The token that ends the last text is behind the node that counts.

    Args:
        accepts: `Plan.accept_BN` of rows that advance in step; one row, if it advances by itself.
        trees: their trees.
        joint: `Plan.joint`.
        ends: ids that end a text.
    """
    rows = [(_last_chances(accept, tree, joint=joint), tree) for accept, tree in zip(accepts, trees, strict=True)]
    total = 0.0
    for depth in range(1, min((tree.max_depth for tree in trees), default=0) + 1):
        total += math.prod(
            sum(chance for chance, at in zip(chances, tree.depths, strict=True) if at >= depth)
            for chances, tree in rows
        )
        # All texts end together.
        total -= math.prod(
            sum(
                chance
                for chance, at, token in zip(chances, tree.depths, tree.tokens, strict=True)
                if at == depth and token in ends
            )
            for chances, tree in rows
        )
    return total


def _last_chances(accept: Sequence[float], tree: TokenTree, *, joint: bool) -> list[float]:
    """Per node the probability that it is the last accepted one."""
    chances = [0.0] * len(tree)
    if joint:
        alive = 1.0
        for node in post_order(tree):
            chances[node] = alive * accept[node]
            alive *= 1.0 - accept[node]
        return chances
    chances[0] = 1.0
    for node in range(len(tree)):
        for child in tree.children(node):
            chances[child] = chances[node] * accept[child]
            chances[node] -= chances[child]
    return chances


def taken(accept: Sequence[float], tree: TokenTree, *, joint: bool) -> list[float]:
    """Per node the probability, before any coin, that it is accepted where its parent is; 1 for the root.

    Args:
        accept: `Plan.accept_BN` of the row.
        tree: its tree.
        joint: `Plan.joint`.
    """
    # That a node is accepted once it is asked: that it passes, or, joint, that anything in its subtree does.
    once = list(accept)
    if joint:
        missed = [1.0 - one for one in accept]
        for node in range(len(tree) - 1, 0, -1):
            once[node] = 1.0 - missed[node]
            missed[tree.parents[node]] *= missed[node]
    out = [1.0] * len(tree)
    for node in range(len(tree)):
        alive = 1.0
        for child in tree.children(node):
            out[child] = alive * once[child]
            alive *= 1.0 - once[child]
            if joint and node:
                out[child] = out[child] / once[node] if once[node] else 0.0
    return out
