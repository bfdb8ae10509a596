"""The rules of verification by independent draws, by name: how children are drawn, and how they are tested.

Every rule is an instance of two choices. *Draws* says by which law the children of a node come about; *joint* whether
a node is judged by what becomes of its subtree (leaf to root), or each node by itself on the way down.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hf_treespec.errors import TreeConfigError

__all__ = ["COUPLED", "RULES", "Draws", "Rule", "rule_named"]

COUPLED = "coupled"


class Draws(StrEnum):
    """How the children of a node are drawn from the draft's law q.

    Attributes:
        TOP: the most likely ones; nothing is random.
        IID: all from q, with repetition.
        DISTINCT: each from q without the ones before it.
        HYBRID: the `random_children` first ones from q without the most likely ones and without one another, then the
            most likely ones.
    """

    TOP = "top"
    IID = "iid"
    DISTINCT = "distinct"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Args:
        name: what `TreeConfig(verification=...)` calls it.
        draws: how children are drawn.
        joint: whether nodes are tested from the leaves to the root.
        chain: whether a tree is one path.
        shared_test: K-SEQ's test, one threshold for all children of a node.
        lossless: whether the text follows the target's law.
        source: paper or algorithm.
    """

    name: str
    draws: Draws
    joint: bool = False
    chain: bool = False
    shared_test: bool = False
    lossless: bool = True
    source: str = ""


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("naive", Draws.TOP, source="target sampling; the optimum for trees that are not random"),
        Rule("rrs", Draws.IID, source="SpecInfer's multi-step sampling (Miao et al. 2023, arXiv 2305.09781)"),
        Rule("rrs-joint", Draws.IID, joint=True, source="SpecInfer's draws, verified as traversal"),
        Rule("rrsw", Draws.DISTINCT, source="Sequoia (Chen et al. 2024, arXiv 2402.12374)"),
        Rule("traversal", Draws.DISTINCT, joint=True, source="traversal verification (Weng et al. 2025, 2505.12398)"),
        Rule("block", Draws.IID, joint=True, chain=True, source="block verification (Sun et al. 2024, 2403.10444)"),
        Rule("hybrid", Draws.HYBRID, source="greedy draft sampling (Hu et al. 2025, arXiv 2502.18779)"),
        Rule("hybrid-joint", Draws.HYBRID, joint=True, source="greedy draft sampling, traversal verification"),
        Rule("kseq", Draws.IID, shared_test=True, source="K-SEQ of SpecTr (Sun et al. 2023, arXiv 2310.15141)"),
        Rule("typical-lossy", Draws.TOP, lossless=False, source="typical acceptance (Cai et al. 2024, 2401.10774)"),
    )
}


def rule_named(name: str) -> Rule:
    """The rule of that name.

    Raises:
        TreeConfigError: if there is none.
    """
    if name not in RULES:
        raise TreeConfigError(f"verification={name!r}: expected {COUPLED!r} or one of {', '.join(map(repr, RULES))}")
    return RULES[name]
