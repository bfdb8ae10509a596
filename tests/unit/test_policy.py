"""The size policy on made-up texts, drafts and round times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import log

import pytest

from hf_treespec.control import Costs, SizePolicy
from hf_treespec.tree import PATHS, TokenTree, TreeBuilder, TreeLimits

LIMITS = TreeLimits(max_nodes=16, max_depth=8, max_children=4)
WRONG = -1


def steep(nodes: int) -> float:
    """A CPU: the first nodes are dear, a full tree costs more than two plain rounds."""
    return 1.0 + (0.12 * nodes if nodes <= 4 else 0.48 + 0.06 * (nodes - 4))


def flat(nodes: int) -> float:
    """A GPU: nodes are nearly free."""
    return 1.0 + 0.002 * nodes


@dataclass
class World:
    """Decodes the text 0, 1, 2, ... with chains of which `right(position)` tokens are right.

    Args:
        right: agreeing tokens of a chain proposed at a position.
        cost: seconds of a round by nodes.
        confidence: of each drafted token, as the draft states it; None for a draft without scores.
        nodes: that the policy is configured to.
        drafting: seconds of a proposal, besides those of the round.
        level: seconds of each level of a proposal.
        catch_up: seconds for each token that came since the latest proposal but one.
    """

    right: Callable[[int], int]
    cost: Callable[[int], float] = steep
    confidence: Callable[[int], float] | None = None
    nodes: int = 16
    drafting: float = 0.0
    level: float = 0.0
    catch_up: float = 0.0
    read: int = 0
    sizes: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    seconds: float = 0.0
    position: int = 0

    def tree(self, limits: TreeLimits) -> TokenTree:
        nodes = min(limits.max_nodes, limits.max_depth)
        if self.confidence is not None and limits.goes_on is not None:
            builders = [TreeBuilder(self.position)]
            for depth in range(nodes):
                if depth and not limits.goes_on(builders, [[depth]]):
                    nodes = depth
                    break
                builders[0].add(depth, 1, log(self.confidence(self.position)))
        good = min(self.right(self.position), nodes)
        tokens = [self.position, *range(self.position + 1, self.position + 1 + good), *[WRONG] * (nodes - good)]
        scores = None
        if self.confidence is not None:
            scores = tuple(depth * log(self.confidence(self.position)) for depth in range(nodes + 1))
        return TokenTree(tuple(tokens), tuple(range(-1, nodes)), scores)

    def run(self, policy: SizePolicy, tokens: int) -> World:
        end = self.position + tokens
        while self.position < end:
            start, limits = self.position, policy.limits()
            proposed = self.tree(limits)
            drafting = self.drafting + self.level * proposed.drafted
            if proposed.drafted and self.level:
                drafting += self.catch_up * (start - self.read)
                self.read = start + 1
            (tree,) = policy.cut([proposed], {0: start + 1}, [start], drafting=drafting)
            self.at.append(start)
            self.sizes.append(tree.drafted)
            assert policy.plain == (tree.drafted == 0 < proposed.drafted or limits.max_nodes == 0 < self.nodes)
            seconds = self.cost(tree.drafted)
            self.seconds += seconds + (drafting if self.level else 0.0)
            self.position += 1 + min(self.right(start), tree.drafted)
            policy.observe(trees={0: tree}, seconds=seconds, texts={0: range(self.position + 1)})
        return self

    @property
    def rate(self) -> float:
        return self.position / self.seconds


def policy(*, cheap: bool, fallback: str = "auto", max_nodes: int = 16, costs: Costs | None = None) -> SizePolicy:
    limits = TreeLimits(max_nodes=max_nodes, max_depth=8, max_children=4)
    return SizePolicy(limits, fallback=fallback, cheap=cheap, in_step=True, batch=1, costs=costs)


def fixed(world: Callable[[], World], size: int, tokens: int) -> float:
    """Tokens a second with trees of one size."""
    one = world()
    one.nodes = size
    return one.run(policy(cheap=True, fallback="off", max_nodes=size), tokens).rate


MIXES: dict[str, Callable[[int], int]] = {
    "never": lambda position: 0,
    "always": lambda position: 8,
    "two": lambda position: 2,
    "now and then": lambda position: 6 if position % 10 == 0 else 0,
    "one in two": lambda position: position % 2,
    "shorter and shorter": lambda position: max(0, 3 - position // 400),
}


@pytest.mark.parametrize("cost", [steep, flat], ids=["steep", "flat"])
@pytest.mark.parametrize("level", [0.0, 0.1, 0.4], ids=["cheap", "dear", "dearer"])
@pytest.mark.parametrize("mix", MIXES)
def test_the_chosen_sizes_are_about_as_fast_as_the_best_fixed_size(
    mix: str, level: float, cost: Callable[[int], float]
) -> None:
    def world() -> World:
        return World(MIXES[mix], cost, confidence=lambda position: 0.6, level=level)

    best = max(fixed(world, size, 1200) for size in (0, 1, 2, 3, 4, 6, 8))
    chosen = world().run(policy(cheap=not level), 1200)
    if mix == "now and then":
        # Nearly all trees of a dear draft are useless. That the rest would pay for them cannot be known.
        best = min(best, 1.0) if level else best
    assert chosen.rate > (0.95 if level else 0.97) * best


def stairs(width: int, step: float, slope: float = 0.002) -> Callable[[int], float]:
    """Flat between multiples of so many tokens, of which the root is one."""
    return lambda nodes: 1.0 + step * (nodes // width) + slope * nodes


STAIRS = {"of 8": stairs(8, 0.8), "of 4": stairs(4, 0.3), "of 16": stairs(16, 1.5), "of 3": stairs(3, 0.25)}


@pytest.mark.parametrize("level", [0.0, 0.05])
@pytest.mark.parametrize("right", [1, 2, 4, 8])
@pytest.mark.parametrize("cost", STAIRS)
def test_on_staircases_the_size_is_that_of_the_best_sweep(cost: str, right: int, level: float) -> None:
    def world() -> World:
        return World(lambda position: right, STAIRS[cost], confidence=lambda position: 0.8, level=level)

    best = max(fixed(world, size, 90) for size in range(9))
    costs = Costs()
    first, judge = world(), policy(cheap=not level, costs=costs)
    first.run(judge, 300)
    position, seconds = first.position, first.seconds
    first.run(judge, 600)
    assert (first.position - position) / (first.seconds - seconds) > 0.97 * best
    # The next call begins with what this one found out.
    assert world().run(policy(cheap=not level, costs=costs), 600).rate > 0.96 * best


@pytest.mark.parametrize("right", [3, 8])
def test_a_draft_that_costs_more_than_it_brings_is_left_out_however_good_it_is(right: int) -> None:
    world = World(lambda position: right, lambda nodes: 1.0 + 0.1 * nodes, level=1.0)
    world.run(policy(cheap=False), 2000)
    # A tree brings `right` tokens more, for the time of as many plain rounds and more: it could never pay.
    assert world.rate > 0.98 and sum(size > 0 for size in world.sizes) < 20


@pytest.mark.parametrize("level", [0.1, 0.25, 0.5, 0.8])
@pytest.mark.parametrize("confidence", [0.9, 0.3])
def test_a_useless_dear_draft_costs_little(level: float, confidence: float) -> None:
    def world() -> World:
        return World(MIXES["never"], steep, confidence=lambda position: confidence, level=level, catch_up=0.02)

    costs = Costs()
    first = world().run(policy(cheap=False, costs=costs), 256)
    assert first.seconds < 1.06 * 256
    second = world().run(policy(cheap=False, costs=costs), 256)
    assert second.seconds < 1.03 * 256
    # Calls of a few tokens, of which every one may be the first to meet a good draft.
    short = [world().run(policy(cheap=False, costs=costs), 32).seconds for _ in range(4)]
    assert max(short) < 1.12 * 32


def test_probes_of_a_dear_draft_take_a_small_share_of_the_time() -> None:
    world = World(MIXES["never"], lambda nodes: 1.0 + 0.02 * nodes, level=0.8)
    world.run(policy(cheap=False), 3000)
    assert world.seconds < 3000 * 1.03
    assert max(at for at, size in zip(world.at, world.sizes, strict=True) if size) > 2500


def test_a_draft_that_knows_when_it_is_right_beats_every_fixed_size() -> None:
    def world() -> World:
        def right(position: int) -> int:
            return max(0, 8 - position % 40) if position % 40 < 8 else 0

        return World(right, confidence=lambda position: 0.95 if position % 40 < 8 else 0.05)

    best = max(fixed(world, size, 2000) for size in (0, 1, 2, 3, 4, 6, 8))
    assert world().run(policy(cheap=True), 2000).rate > 1.05 * best


def test_trees_that_are_never_right_are_left_out() -> None:
    world = World(MIXES["never"], confidence=lambda position: 0.6).run(policy(cheap=True), 1000)
    assert sum(size > 0 for size in world.sizes) <= 30


def test_a_cheap_draft_is_taken_up_as_soon_as_it_would_have_been_right() -> None:
    world = World(lambda position: 0 if position < 300 else 8, confidence=lambda position: 0.6)
    world.run(policy(cheap=True), 500)
    first = next(at for at, size in zip(world.at, world.sizes, strict=True) if at > 260 and size)
    assert 300 <= first < 316
    later = [size for at, size in zip(world.at, world.sizes, strict=True) if at > 400]
    assert later.count(8) >= len(later) - 1


def test_a_dear_draft_is_found_to_pay_again_by_a_probe() -> None:
    world = World(lambda position: 0 if position < 300 else 8, level=0.1).run(policy(cheap=False), 1200)
    later = [size for at, size in zip(world.at, world.sizes, strict=True) if at > 560]
    assert min(later) == 8


def test_sizes_are_timed_again_after_a_while() -> None:
    slow_from = 600

    def run(cost: Callable[[int, int], float]) -> World:
        world = World(lambda position: 1, confidence=lambda position: 0.6)
        world.cost = lambda nodes: cost(nodes, world.position)
        return world.run(policy(cheap=True), 2000)

    # Nodes become dear: trees stop. Nodes become free: trees begin.
    dearer = run(lambda nodes, at: flat(nodes) if at < slow_from else 1.0 + 2.0 * nodes)
    cheaper = run(lambda nodes, at: flat(nodes) if at >= slow_from else 1.0 + 2.0 * nodes)
    for world, late in ((dearer, False), (cheaper, True)):
        trees = [size > 0 for at, size in zip(world.at, world.sizes, strict=True) if at > 1500]
        assert sum(flag == late for flag in trees) > 0.95 * len(trees)


def test_without_fallback_the_size_is_fixed() -> None:
    for cheap in (True, False):
        world = World(MIXES["never"]).run(policy(cheap=cheap, fallback="off"), 50)
        assert set(world.sizes) == {8}


def test_a_tree_without_scores_is_judged_by_what_such_trees_brought() -> None:
    world = World(MIXES["two"], flat, level=0.1).run(policy(cheap=False), 300)
    late = world.sizes[30:]
    assert late.count(2) + late.count(3) > 0.9 * len(late)


def test_asking_changes_nothing() -> None:
    one, other = World(MIXES["one in two"], level=0.1), World(MIXES["one in two"], level=0.1)
    judge, curious = policy(cheap=False), policy(cheap=False)
    for _ in range(100):
        assert all(curious.limits() == judge.limits() for _ in range(3))
        one.run(judge, 1)
        other.run(curious, 1)
    assert one.sizes == other.sizes


def test_rows_in_step_advance_by_the_shortest_of_them() -> None:
    """Of two rows one is never right: in step trees are useless, apart they are not."""
    drafted = {}
    for in_step in (True, False):
        chooser = SizePolicy(LIMITS, fallback="auto", cheap=True, in_step=in_step, batch=2)
        texts = [list(range(1)), list(range(1))]
        sizes = []
        for _ in range(60):
            trees = []
            for row, text in enumerate(texts):
                last = text[-1]
                ahead = [last + 1, last + 2, last + 3] if row else [WRONG] * 3
                trees.append(TokenTree((last, *ahead), (-1, 0, 1, 2), (0.0, -0.4, -0.8, -1.2)))
            emitted = [len(text) for text in texts]
            scored = chooser.cut(trees, dict(enumerate(emitted)), emitted)
            sizes.append(scored[1].drafted)
            gained = [1, 1 if in_step else 1 + scored[1].drafted]
            for text, count in zip(texts, gained, strict=True):
                text.extend(range(text[-1] + 1, text[-1] + 1 + count))
            chooser.observe(trees={0: scored[0]}, seconds=steep(scored[0].drafted), texts=dict(enumerate(texts)))
        drafted[in_step] = sizes[20:]
    assert set(drafted[True]) == {0} and set(drafted[False]) == {3}


@pytest.mark.parametrize(("drafting", "size"), [(0.0, 0), (0.3, 0), (20.0, 1)])
def test_what_drafting_takes_counts_at_every_size(drafting: float, size: int) -> None:
    """A node that brings 0.03 tokens for 0.12 rounds pays only where the rest of a round is dear enough."""
    world = World(lambda position: int(position % 33 == 0), confidence=lambda position: 0.03, drafting=drafting)
    sizes = world.run(policy(cheap=True), 1000).sizes[300:]
    assert sizes.count(size) > 0.8 * len(sizes)


def test_what_is_kept_of_a_cut_tree_is_told_in_the_drafts_own_numbers() -> None:
    """Read path by path, a bushy tree of a dear draft is cut too, and the draft must learn which of its nodes stay."""
    bush = TokenTree((0, 11, 12, 13, 21, 31), (-1, 0, 0, 0, 1, 4), (0.0, -0.1, -2.0, -3.0, -0.2, -0.3))
    chooser = SizePolicy(
        TreeLimits(max_nodes=5, max_depth=4, max_children=4),
        fallback="auto", cheap=True, in_step=True, batch=2, measure=PATHS,
    )  # fmt: skip
    root = TokenTree.root_only(0)
    # The first rounds time the largest trees.
    cut = chooser.cut([bush, root], {0: 1, 1: 1}, [0, 0])
    assert cut[0].tokens == (0, 11, 21, 31) and cut[1] == root
    assert chooser.kept == [[0, 1, 4, 5], [0]]


def test_of_rows_apart_only_those_are_drafted_for_that_gain_by_it() -> None:
    """One row is always right, one never, and one turns from never to always."""
    chooser = SizePolicy(LIMITS, fallback="auto", cheap=False, in_step=False, batch=3)
    texts = [[0], [0], [0]]
    asked: list[list[bool]] = []
    for step in range(160):
        limits = chooser.limits()
        right = [8, 0, 8 if step >= 80 else 0]
        trees = []
        for row, text in enumerate(texts):
            nodes = 0 if chooser.leaves_out(row) else min(limits.max_nodes, limits.max_depth)
            ahead = [text[-1] + one + 1 if one < right[row] else WRONG - one for one in range(nodes)]
            scores = tuple(depth * log(0.7) for depth in range(nodes + 1))
            trees.append(TokenTree((text[-1], *ahead), tuple(range(-1, nodes)), scores))
        lengths = [len(text) for text in texts]
        asked.append([bool(tree.drafted) for tree in trees])
        levels = max(tree.drafted for tree in trees)
        scored = chooser.cut(trees, dict(enumerate(lengths)), lengths, drafting=0.1 * levels)
        for row, (text, tree) in enumerate(zip(texts, scored, strict=True)):
            count = 1 + min(right[row], tree.drafted)
            text.extend(range(text[-1] + 1, text[-1] + 1 + count))
        seconds = flat(max(tree.drafted for tree in scored))
        chooser.observe(trees=dict(enumerate(scored)), seconds=seconds, texts=dict(enumerate(texts)))
    late = asked[40:80]
    assert all(one[0] for one in late)
    assert sum(one[1] for one in late) < 16 and sum(one[2] for one in late) < 16
    assert sum(one[2] for one in asked[120:]) > 36 and sum(one[1] for one in asked[120:]) < 16


def test_the_map_of_confidence_is_worth_its_while() -> None:
    """A draft that is right where it is modest and wrong where it is sure: no correction by size alone finds out."""

    def world() -> World:
        def right(position: int) -> int:
            return 0 if position % 12 < 6 else 6

        return World(right, steep, confidence=lambda position: 0.9 if position % 12 < 6 else 0.45)

    learnt = world().run(policy(cheap=True), 1500)
    without = policy(cheap=True)
    without.confidence.learn = lambda: None  # type: ignore[method-assign]
    assert learnt.rate > 1.1 * world().run(without, 1500).rate


def test_worth_that_is_no_confidence_is_left_as_it_is() -> None:
    """Two nodes beside the chain are never right, and are worth reading for what the target says of them."""
    for confident in (True, False):
        chooser = SizePolicy(LIMITS, fallback="auto", cheap=True, in_step=True, batch=1, confident=confident)
        text, scores = [0], (0.0, log(0.9), log(0.6), log(0.59))
        for _ in range(40):
            last = text[-1]
            tree = TokenTree((last, last + 1, WRONG, WRONG - 1), (-1, 0, 0, 0), scores)
            (scored,) = chooser.cut([tree], {0: len(text)}, [len(text)])
            text.extend(range(last + 1, last + 2 + bool(scored.drafted)))
            chooser.observe(trees={0: scored}, seconds=flat(scored.drafted), texts={0: text})
        assert scored.scores is not None and (scored.scores == scores[: len(scored)]) == (not confident)
        assert (chooser.limits().ranks is None) == (not confident)


@pytest.mark.parametrize("levels", [None, 3])
def test_drafting_is_booked_by_the_levels_that_were_read(levels: int | None) -> None:
    chooser = policy(cheap=False, fallback="off")
    text = [0]
    for _ in range(3):
        tree = TokenTree((text[-1], WRONG), (-1, 0), (0.0, -0.1))
        (scored,) = chooser.cut([tree], {0: len(text)}, [len(text)], drafting=0.3, levels=levels)
        text.append(text[-1] + 1)
        chooser.observe(trees={0: scored}, seconds=1.0, texts={0: text})
    assert chooser.costs.drafting.known() == {levels or 1: 0.3}
