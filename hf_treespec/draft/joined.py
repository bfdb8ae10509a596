"""One tree by a draft that costs forwards and by predictors that cost next to nothing.

The predictors of the text always speak. The costly draft, a model say, is asked when what it adds is worth its time:
its tree then becomes one more predictor, so that the node budget goes to whoever is most likely to be right, node by
node, and the two count as much as they were right of late (`draft.text`).

Whether to ask is decided by gain and cost. The engine tells what a tree promises: tokens, and seconds without
drafting. What the promise was with the costly draft is remembered by what the text alone had promised; where the text
is sure, there is little to add.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from statistics import median_low

from torch import Tensor

from hf_treespec import clock
from hf_treespec.draft.base import Draft, DraftRow, FeatureDraft, Features
from hf_treespec.draft.layers import BorrowingDraft, Lender
from hf_treespec.draft.text import Predictor, TextDraft
from hf_treespec.tree import TokenTree, TreeLimits
from hf_treespec.verify import DraftLaws

__all__ = ["JoinedDraft"]

# Tokens that the text alone promises besides the target's own, between the classes that are learnt apart.
_CLASSES = (0.25, 0.5, 1.0, 2.0, 4.0)
# Times that the costly draft is asked in a class before it is judged, and rounds without it before it is tried again.
_TRIALS, _PAUSE = 4, 32
_TRIAL_SHARE = 0.05  # of the time, that such trials may take; beyond it they become rarer
_RECENT = 4  # timings of the costly draft that count
_DECAY = 0.9  # weight of the past


class JoinedDraft:
    """Draft source over another one and predictors of the text. For coupled verification, or greedy decoding.

    Args:
        costly: its trees must have scores.
        predictors: their names must differ from one another and from that of `costly`.
        growth: policy of the joint tree.
        vocab_size: width of the target's logits.
    """

    cheap = True

    def __init__(self, costly: Draft, predictors: Sequence[Predictor], *, growth: str, vocab_size: int) -> None:
        self._costly = costly
        self._proposed = _Proposed(costly.name)
        self._text = TextDraft([self._proposed, *predictors], growth=growth, vocab_size=vocab_size)
        self._trees: list[TokenTree] = []
        self._worth = _Worth()
        self.name = self._text.name
        self.learns = self._text.learns
        self.promise: Callable[[Sequence[TokenTree], Sequence[int]], tuple[float, float] | None] | None = None

    @property
    def origins(self) -> list[list[tuple[str, ...]]]:
        """See `CreditedDraft`."""
        return self._text.origins

    @property
    def features(self) -> Features:
        """See `FeatureDraft`; there are none if the costly draft reads none."""
        if not isinstance(self._costly, FeatureDraft):
            raise AttributeError(f"{self._costly.name} reads no hidden states")
        return self._costly.features

    def read(self, states: Sequence[Tensor | None]) -> None:
        """See `FeatureDraft.read`; the costly draft is told in every round, asked or not."""
        if isinstance(self._costly, FeatureDraft):
            self._costly.read(states)

    def borrow(self, lender: Lender, rows: Sequence[DraftRow]) -> None:
        """See `BorrowingDraft.borrow`."""
        if isinstance(self._costly, BorrowingDraft):
            self._costly.borrow(lender, rows)

    @property
    def forward_seconds(self) -> float:
        """Seconds in forwards of the costly draft."""
        return float(getattr(self._costly, "forward_seconds", 0.0))

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[TokenTree]:
        """One tree per row; see `Draft.propose`."""
        self._proposed.trees = {}
        self._trees = self._text.propose(rows, limits)
        alive = [place for place, limit in enumerate(limits) if limit.max_nodes and limit.max_depth]
        if not alive:
            return self._trees
        without = self._promised(alive)
        if not self._worth.asks(without):
            return self._trees
        start = clock.now()
        trees = self._costly.propose(rows, limits)
        self._proposed.trees = {row.index: tree for row, tree in zip(rows, trees, strict=True)}
        seconds = clock.now() - start
        self._trees = self._text.propose(rows, limits)
        self._worth.learn(without, self._promised(alive), seconds)
        return self._trees

    def _promised(self, alive: Sequence[int]) -> tuple[float, float] | None:
        return None if self.promise is None else self.promise(self._trees, alive)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Tell the costly draft, if it was asked, how far its own tree was right."""
        if not self._proposed.trees:
            return
        own = list(self._proposed.trees.values())
        self._costly.commit(
            [_same_path(tree, path, mine) for tree, path, mine in zip(self._trees, paths, own, strict=True)]
        )

    def observe(self, trees: Sequence[TokenTree], logits_BNV: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """See `LearningDraft.observe`."""
        self._text.observe(trees, logits_BNV, paths)

    def laws(self, batch: int) -> DraftLaws | None:
        """None: no node is random; see `Draft.laws`."""
        return None


def _same_path(tree: TokenTree, path: Sequence[int], other: TokenTree) -> list[int]:
    """The nodes of another tree with the tokens of a path, as far as it has them."""
    found = [0] if path else []
    for node in path[1:]:
        # Behind the root of an ended row there is padding, of which no tree was proposed.
        child = other.child(found[-1], tree.tokens[node]) if node < len(tree) else None
        if child is None:
            break
        found.append(child)
    return found


class _Proposed(Predictor):
    """What a tree proposes, as a predictor; it abstains where it has no tree or the tree has ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.trees: dict[int, TokenTree] = {}

    def begin(self, row: DraftRow) -> None:
        """Nothing to read: the tree was made of the whole text."""

    def shares(self, row: DraftRow, path: Sequence[int], floor: float) -> dict[int, float]:
        """Confidence in each child of the node, given the node."""
        tree = self.trees.get(row.index)
        node: int | None = 0
        for token in path:
            node = None if tree is None or node is None else tree.child(node, token)
        if tree is None or node is None or tree.scores is None:
            return {}
        above = tree.scores[node]
        return {tree.tokens[child]: exp(tree.scores[child] - above) for child in tree.children(node)}


@dataclass(slots=True)
class _Class:
    """What is known of rounds in which the text alone promised about as much."""

    asked: int = 0
    passed: int = 0
    tokens: float = 0.0
    seconds: float = 0.0


class _Worth:
    """Whether asking the costly draft brings more tokens a second than going on without it."""

    def __init__(self) -> None:
        self._classes = [_Class() for _ in range(len(_CLASSES) + 1)]
        # None before the first call, which reads the whole prompt and is no measure.
        self._recent: deque[float] | None = None
        self._asking = True

    @property
    def _seconds(self) -> float:
        """What asking takes: the lower median, as of few timings the first is often a warm-up."""
        return median_low(self._recent) if self._recent else 0.0

    def _of(self, promise: tuple[float, float]) -> _Class:
        return self._classes[bisect(_CLASSES, promise[0] - 1.0)]

    def asks(self, without: tuple[float, float] | None) -> bool:
        """Decide.

        Args:
            without: tokens and seconds that the text alone promises; None if nothing is known, where it stays at what
                was decided last, which is yes in the beginning.
        """
        if without is not None and self._recent is not None:
            self._asking = self._pays(without)
        return self._asking

    def _pays(self, without: tuple[float, float]) -> bool:
        known = self._of(without)
        pays = known.tokens / (known.seconds + self._seconds) > without[0] / without[1] if known.asked else True
        pause = max(_PAUSE, self._seconds / (_TRIAL_SHARE * without[1]))
        if pays or known.asked < _TRIALS or known.passed >= pause:
            known.passed = 0
            return True
        known.passed += 1
        return False

    def learn(self, without: tuple[float, float] | None, joined: tuple[float, float] | None, seconds: float) -> None:
        """Take in a round in which it was asked.

        Args:
            without: what the text alone had promised.
            joined: what the joint tree promises.
            seconds: that asking took.
        """
        if self._recent is None:
            self._recent = deque(maxlen=_RECENT)
            return
        self._recent.append(seconds)
        if without is None or joined is None:
            return
        known = self._of(without)
        tokens, taken = joined
        known.tokens = _mean(known.tokens, tokens) if known.asked else tokens
        known.seconds = _mean(known.seconds, taken) if known.asked else taken
        known.asked += 1


def _mean(past: float, new: float) -> float:
    return _DECAY * past + (1.0 - _DECAY) * new
