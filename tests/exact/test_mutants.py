"""Known bugs are seen: the exact law of three tokens under each of them differs from the target's.

Nothing here is statistical; tests/integration/test_distribution.py runs the bugs in generate(). The table of bugs
has no M02 and no M17, and one row for M15 and M16.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from exact.laws import Joint, law_of_target, total_variation, worst
from exact.library import law_through_library
from exact.worlds import Law, Text, World, normalised, texts_of
from hf_treespec.rules import RULES
from hf_treespec.tree import TokenTree, TreeLimits
from hf_treespec.verify import NodeScorer
from mutant_patches import in_turn
from mutants import MUTANTS, Mutant, mutant

plan_module = importlib.import_module("hf_treespec.verify.plan")
PROMPT = (2, 0)


@dataclass(frozen=True)
class Penalised(World):
    """The target has a repetition penalty as transformers has it; prompt and text count."""

    factor: float = 3.0

    def __hash__(self) -> int:
        return hash((self.vocab, self.seed, self.factor))

    def p(self, text: Text) -> Law:
        logits = [math.log(chance) for chance in super().p(text)]
        return normalised([
            math.exp(x * self.factor if token in text else x) for token, x in enumerate(logits)
        ])  # fmt: skip

    def targets(self, trees: Sequence[TokenTree]) -> Tensor:
        """By the library's scorer."""
        processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(self.factor)])
        laws = []
        for tree in trees:
            logits = torch.tensor([World.p(self, text) for text in texts_of(tree, PROMPT)]).log()[None]
            scorer = NodeScorer(processors, 1)
            scores = scorer.tree_scores(logits, [tree], [len(PROMPT)], self, lambda row, node: None)
            laws.append(scores[0].double().softmax(-1))
        return torch.nn.utils.rnn.pad_sequence(laws, batch_first=True, padding_value=1 / self.vocab)

    def text(self, length: int) -> Tensor:
        # What lies behind the committed text is written over by the scorer.
        return torch.tensor([[*PROMPT, *[0] * 9]])[:, :length]


def first(joint: Joint) -> Joint:
    out: Joint = {}
    for text, chance in joint.items():
        out[text[:1]] = out.get(text[:1], 0.0) + chance
    return out


def bias(found: Mutant, seed: int, vocab: int = 3) -> tuple[float, float]:
    """Total variation of three tokens and of the first one; the patches of `found` are in effect."""
    children = found.children
    limits = TreeLimits(max_nodes=2 if children == 1 else 4, max_depth=2, max_children=children)
    if found.penalty:
        world: World = Penalised(seed=seed, vocab=vocab)
        law = law_through_library(
            RULES[found.rule], world, limits, 3, prompt=PROMPT, targets=world.targets
        )  # fmt: skip
    else:
        world = World(seed=seed, vocab=vocab, apart=1.0)
        law = law_through_library(RULES[found.rule], world, limits, 3, prompt=PROMPT)
    truth = law_of_target(world, 3, PROMPT)
    return total_variation(law, truth), total_variation(first(law), first(truth))


SEEDS = (1, 2, 3)
# Total variation of three tokens and of the first, mean over SEEDS; V = 4, four drafted nodes of depth two.
BIASES: dict[str, tuple[float, float]] = {
    "M01": (0.0283, 0.0096),
    "M03": (0.5789, 0.4063),
    "M04": (0.0682, 0.0418),
    "M05": (0.0124, 0.0000),
    "M06": (0.1650, 0.0000),
    "M07": (0.0983, 0.0765),
    "M08": (0.1924, 0.1171),
    "M09": (0.2582, 0.2271),
    "M10": (0.2412, 0.1591),
    "M11": (0.1552, 0.1025),
    "M12": (0.3477, 0.0000),
    "M13": (0.2598, 0.2086),
    "M14": (0.0125, 0.0071),
    "M15": (0.8322, 0.5745),
    "M16": (0.2323, 0.1756),
    "M18": (0.0943, 0.0640),
    "M19": (0.0965, 0.0965),
    "M20": (0.0541, 0.0000),
    "M21": (0.6975, 0.5008),
    "M22": (0.1201, 0.0765),
    "M23": (0.0866, 0.0000),
    "M24": (0.0942, 0.0347),
    "M25": (0.2626, 0.0000),
}


def mean_bias(found: Mutant, seeds: Sequence[int] = SEEDS) -> tuple[float, float]:
    pairs = [bias(found, seed, 4) for seed in seeds]
    return math.fsum(pair[0] for pair in pairs) / len(pairs), math.fsum(pair[1] for pair in pairs) / len(pairs)


@pytest.mark.parametrize("name", list(MUTANTS))
def test_every_bug_is_seen(name: str) -> None:
    found = MUTANTS[name]
    # The scorer gives float32.
    clean = 1e-6 if found.penalty else 1e-12
    with mutant(name):
        three, one = mean_bias(found)
    assert max(bias(found, 1, 4)) < clean
    assert three > 1e-3
    assert one < clean or not found.first_exact
    assert (three, one) == pytest.approx(BIASES[name], abs=2e-4)


def test_the_table_has_all_of_them() -> None:
    assert list(MUTANTS) == list(BIASES)
    assert [n for n in range(1, 26) if f"M{n:02}" not in MUTANTS] == [2, 17]


def test_a_bug_ends_with_its_context_and_others_are_refused() -> None:
    before = {
        name: [(owner, what, getattr(owner, what)) for owner, what, _ in m.patches()] for name, m in MUTANTS.items()
    }
    for name, places in before.items():
        with pytest.raises(ZeroDivisionError), mutant(name):
            assert any(getattr(owner, what) is not right for owner, what, right in places)
            raise ZeroDivisionError
        assert all(getattr(owner, what) is right for owner, what, right in places)
    with pytest.raises(KeyError, match="M02.*expected one of M01, M03"), mutant("M02"):
        pass


@pytest.mark.parametrize("rule", ["rrs", "rrsw", "traversal", "hybrid-joint", "block"])
def test_the_mutated_loop_without_a_bug_is_the_library(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, limits = World(seed=5, vocab=4, apart=1.0), TreeLimits(max_nodes=4, max_depth=2, max_children=2)
    limits = TreeLimits(max_nodes=3, max_depth=3, max_children=1) if RULES[rule].chain else limits
    right = law_through_library(RULES[rule], world, limits, 3)
    monkeypatch.setattr(plan_module._Siblings, "accept_in_turn", in_turn())
    assert worst(law_through_library(RULES[rule], world, limits, 3), right) < 1e-14


WORLDS = [
    World(seed=3, vocab=4, apart=1.2),
    World(seed=4, target_zeros=1, draft_zeros=1, vocab=4),
    World(seed=5, apart=0),
]
ENDING = [
    World(seed=6, eos=1),
    # Nothing is asked behind an eos, and what a draft or a target says there is no matter.
    World(seed=7, eos=1, lost=1),
    World(seed=8, eos=1, draft_lost=1),
    # A text is an error as often as under plain decoding, and otherwise its law is what it was.
    World(seed=9, lost=1),
    World(seed=9, lost=2, apart=0, eos=1),
    World(seed=10, draft_lost=1),
]
LIMITS = [(4, 2, 2), (3, 3, 1), (3, 1, 3), (5, 3, 2)]


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.lossless])
def test_all_of_the_library_together_is_lossless(rule: str) -> None:
    """Its draws, the laws it keeps, its growth, plan and winners; not only its plan."""
    for world, (nodes, depth, children) in [
        *itertools.product(WORLDS, LIMITS),
        *itertools.product(ENDING, LIMITS[:2]),
    ]:
        if RULES[rule].draws == "iid" and world.vocab == 4 and nodes > 3:
            nodes = 3
        limits = TreeLimits(max_nodes=nodes, max_depth=depth, max_children=1 if RULES[rule].chain else children)
        joint = law_through_library(RULES[rule], world, limits, 3)
        assert abs(math.fsum(joint.values()) - 1) < 1e-12
        assert worst(joint, law_of_target(world, 3)) < 1e-12, (world, limits)


@pytest.mark.parametrize("randoms", [0, 1, 2])
@pytest.mark.parametrize("rule", ["hybrid", "hybrid-joint"])
def test_hybrids_of_the_library(rule: str, randoms: int) -> None:
    limits = TreeLimits(max_nodes=4, max_depth=2, max_children=3)
    joint = law_through_library(RULES[rule], WORLDS[0], limits, 3, randoms=randoms)
    assert worst(joint, law_of_target(WORLDS[0], 3)) < 1e-12
