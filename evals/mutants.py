"""Known bugs of speculative sampling as patches on the library, to see that tests and evals catch them.

    with mutant("M07"):
        model.generate(..., do_sample=True, tree_config=TreeConfig(verification=MUTANTS["M07"].rule))

Each of them biases the text. The numbers are those of a list of plausible bugs, in which M02 and M17 are not
assigned; M15 and M16 share a row there. What each costs, tests/exact/test_mutants.py computes by enumeration: the
total variation of the law of three tokens, and of the first one alone, which some leave exact.

A patch replaces attributes of the library's modules and classes for the length of the context, in this process only.
So these two modules know the library's inside; other evals know its public interface, and the rules from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mutant_patches as to
from hf_treespec.rules import COUPLED, RULES
from mutant_patches import Patch

__all__ = ["COUPLED", "MUTANTS", "RULES", "Mutant", "mutant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A bug.

    Args:
        name: M01 to M25.
        wrong: what is wrong.
        rule: the verification rule that shows it.
        patches: what to replace: (owner, attribute, value).
        children: children of a node that it takes to show.
        first_exact: whether the first token of a round still follows the target.
        penalty: whether it takes a repetition penalty to show.
    """

    name: str
    wrong: str
    rule: str
    patches: Callable[[], Sequence[Patch]]
    children: int = 2
    first_exact: bool = False
    penalty: bool = False


@contextmanager
def mutant(name: str) -> Iterator[Mutant]:
    """Run with a bug.

    Raises:
        KeyError: if there is none of that name.
    """
    if name not in MUTANTS:
        raise KeyError(f"mutant {name!r}: expected one of {', '.join(MUTANTS)}")
    found = MUTANTS[name]
    changes = found.patches()
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in changes]
    try:
        for owner, attribute, value in changes:
            setattr(owner, attribute, value)
        yield found
    finally:
        for owner, attribute, value in before:
            setattr(owner, attribute, value)


MUTANTS: dict[str, Mutant] = {
    found.name: found
    for found in (
        Mutant(
            name="M01",
            wrong="a rejected token stays in q",
            rule="rrsw",
            patches=to.testing(forgets_draws=True),
        ),
        Mutant(
            name="M03",
            wrong="top-k children tested as if drawn",
            rule="rrsw",
            patches=to.drawing(to.top_as_sampled),
        ),
        Mutant(
            name="M04",
            wrong="correction from p, not the residual",
            rule="rrsw",
            patches=to.correction_from_target,
        ),
        Mutant(name="M05", wrong="p' not renormalised", rule="rrsw", patches=to.testing(unnormalised=True)),
        Mutant(name="M06", wrong="q of the parent node", rule="rrsw", patches=to.law_of_parent, first_exact=True),
        Mutant(name="M07", wrong="draws at temperature 0.7, q at 1", rule="rrsw", patches=to.drawing(to.colder)),
        Mutant(name="M08", wrong="draws from the top 0.8, raw q kept", rule="rrsw", patches=to.drawing(to.nucleus)),
        Mutant(name="M09", wrong="siblings sorted by q", rule="rrsw", patches=to.drawing(to.by_q)),
        Mutant(name="M10", wrong="drawn children pruned by score", rule="rrsw", patches=to.drawing(to.pruned)),
        Mutant(name="M11", wrong="the coin picks the last token too", rule="naive", patches=to.coin_used_again),
        Mutant(
            name="M12",
            wrong="bonus from the parent",
            rule="rrsw",
            patches=to.bonus_from_parent,
            first_exact=True,
        ),
        Mutant(name="M13", wrong="a new sample on mismatch", rule="naive", patches=to.correction_from_target),
        Mutant(
            name="M14",
            wrong="repeated draws dropped",
            rule="rrs",
            patches=to.drawing(to.without_repeats),
            children=3,
        ),
        Mutant(name="M15", wrong="typical acceptance", rule="naive", patches=to.typical),
        Mutant(name="M16", wrong="acceptance threshold 0.8", rule="naive", patches=to.threshold(0.8)),
        Mutant(name="M18", wrong="each path by itself, longest kept", rule="rrs", patches=to.each_path_alone),
        Mutant(
            name="M19",
            wrong="a not updated by rejections",
            rule="traversal",
            patches=to.testing(frozen_a=True),
        ),
        Mutant(
            name="M20",
            wrong="joint ratio without a cap",
            rule="block",
            patches=to.testing(uncapped=True),
            children=1,
            first_exact=True,
        ),
        Mutant(name="M21", wrong="argmax matching under sampling", rule="naive", patches=to.argmax),
        Mutant(name="M22", wrong="top child first, q~ not renormalised", rule="hybrid", patches=to.top_first),
        Mutant(
            name="M23",
            wrong="stale residual at a leaf",
            rule="rrsw",
            patches=to.stale_at_leaves,
            first_exact=True,
        ),
        Mutant(
            name="M24",
            wrong="order of siblings by their subtrees",
            rule="rrs-joint",
            patches=to.order_by_subtree,
        ),
        Mutant(
            name="M25",
            wrong="penalty for the committed text only",
            rule="rrsw",
            patches=to.committed_only,
            first_exact=True,
            penalty=True,
        ),
    )
}
