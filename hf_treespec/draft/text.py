"""Trees from what is known of the text without a second model: one or several predictors, grown and mixed alike.

A `Predictor` says for any node which tokens may follow it and how probable each is. `TextDraft` grows the tree from
that. With several predictors a node's children come from their mixture, so that what two of them propose under one
node is one child. The weights are those of the predictors' past: a predictor gains by the probability that it gave to
the tokens that came, and keeps a share so that it can come back (fixed share, Herbster and Warmuth 1998). One that
knows nothing of a node abstains there: it neither counts nor is judged (sleeping experts, Freund et al. 1997).

Under coupled verification the text does not depend on any of this; under independent draws the children count as
proposed with certainty, as none of them is drawn at random.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import exp, log
from operator import itemgetter

from torch import Tensor

from hf_treespec.draft.base import DraftRow
from hf_treespec.errors import TreeConfigError
from hf_treespec.tree import GROWTH_POLICIES, Candidate, TokenTree, TreeBuilder, TreeLimits, grow, with_asked
from hf_treespec.verify import DraftLaws

__all__ = ["Predictor", "TextDraft"]

_second = itemgetter(1)
# What a predictor is taken to have given to a token that it did not name.
_LEAST = 1e-3
# Of the weights of those who spoke, what is dealt out evenly after each token.
_EVEN = 0.05
# What the predictors said of the nodes of a tree: by path from the root, the shares of each.
_Shares = dict[tuple[int, ...], list[dict[int, float]]]


class Predictor:
    """What may follow a node, by one source. One object serves one call of `generate`.

    Attributes:
        name: what the statistics call it.
        learns: whether `observe` is to be called.
        judged: whether `judge` is to be called.
        asks: whether `asked` is to be called.
    """

    name: str
    learns = False
    judged = False
    asks = False

    def begin(self, row: DraftRow) -> None:
        """Read the tokens of a row that came since the last call. Called before its tree is grown."""
        raise NotImplementedError

    def shares(self, row: DraftRow, path: Sequence[int], floor: float) -> dict[int, float]:
        """Estimated probability of each next token; the sum is at most 1.

        Args:
            row: row of the tree.
            path: tokens from the root, which is not included, to the node.
            floor: tokens at or below this probability are of no interest.

        Returns:
            Token to probability; of equal ones the first is preferred. Empty where the predictor abstains.
        """
        raise NotImplementedError

    def asked(self, row: DraftRow, limits: TreeLimits) -> Sequence[tuple[Sequence[int], float]]:
        """Paths that the target is to read for what it says of them, whether it accepts them or not.

        Args:
            row: row of the tree, after `begin`.
            limits: of the whole tree; candidates get what the paths leave of it.

        Returns:
            Per path its tokens below the root, and the worth of reading one of its nodes, in accepted tokens.
        """
        return ()

    def judge(self, shares: Mapping[int, float], token: int) -> None:
        """Learn that `token` followed a node for which `shares` were told."""

    def observe(self, trees: Sequence[TokenTree], logits_BNV: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """See `hf_treespec.draft.LearningDraft`."""


@dataclass(slots=True)
class _Told:
    """What the predictors said of the tree of a text of this length."""

    length: int
    shares: _Shares


class TextDraft:
    """Draft source over one or several predictors.

    Args:
        predictors: at least one; their names must differ.
        growth: one of `hf_treespec.tree.GROWTH_POLICIES`.
        vocab_size: width of the target's logits; prompts of some models hold ids beyond it, which no text can go on
            with. None proposes all.

    Raises:
        TreeConfigError: for an unknown policy.
    """

    cheap = True

    def __init__(
        self, predictors: Sequence[Predictor], *, growth: str = "best_first", vocab_size: int | None = None
    ) -> None:
        if growth not in GROWTH_POLICIES:
            raise TreeConfigError(f"growth={growth!r} must be one of {GROWTH_POLICIES}")
        self.predictors = tuple(predictors)
        self.growth = growth
        self._vocab_size = vocab_size
        self.name = "+".join(predictor.name for predictor in predictors)
        self.learns = any(predictor.learns for predictor in predictors)
        self.origins: list[list[tuple[str, ...]]] = []
        self._judges = len(predictors) > 1 or any(predictor.judged for predictor in predictors)
        self._told: dict[int, _Told] = {}
        self._weights: dict[int, list[float]] = {}

    def weights(self, row: int) -> list[float]:
        """How much each predictor counts for a batch row; they sum to 1."""
        even = [1.0 / len(self.predictors)] * len(self.predictors)
        return self._weights.setdefault(row, even)

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[TokenTree]:
        """One tree per row; see `hf_treespec.draft.Draft`. Reads the tokens appended since the last call.

        Args:
            rows: rows of the batch; `row.tokens[-1]` is the root.
            limits: budget per row; a row with `max_nodes == 0` gets its root only, and is not read.

        Returns:
            One tree per row, within its limits.

        Raises:
            TreeSpecError: if the tokens of a row did not merely grow since the last call.
        """
        trees = []
        self.origins = []
        # Rows are grown one by one: there is no forward to share between them.
        for row, limit in zip(rows, limits, strict=True):
            root = row.tokens[-1]
            if not (limit.max_nodes and limit.max_depth):
                trees.append(TokenTree.root_only(root))
                self.origins.append([()])
                continue
            self._judge(row)
            for predictor in self.predictors:
                predictor.begin(row)
            expander = _RowExpander(self, row, limit)
            tree = grow([root], expander, [limit], self.growth)[0][0]
            if self._judges:
                self._told[row.index] = _Told(len(row.tokens), expander.told)
            origins = self._credit(tree, expander.told, limit.max_children)
            for predictor in self.predictors:
                if predictor.asks:
                    tree, origins = _asking(tree, origins, predictor, row, limit)
            trees.append(tree)
            self.origins.append(origins)
        return trees

    def laws(self, batch: int) -> DraftLaws | None:
        """None: no node is random; see `Draft.laws`."""
        return None

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Nothing to learn here: the accepted tokens are read from the rows at the next proposal."""

    def observe(self, trees: Sequence[TokenTree], logits_BNV: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Hand the target's logits to the predictors that learn from them; see `LearningDraft.observe`."""
        for predictor in self.predictors:
            if predictor.learns:
                predictor.observe(trees, logits_BNV, paths)

    def shares(self, row: DraftRow, path: tuple[int, ...], floor: float, told: _Shares) -> dict[int, float]:
        """Probability of each next token by all predictors together, of those that the target can say."""
        found = self._shares(row, path, floor, told)
        if self._vocab_size is None or max(found, default=0) < self._vocab_size:
            return found
        return {token: share for token, share in found.items() if token < self._vocab_size}

    def _shares(self, row: DraftRow, path: tuple[int, ...], floor: float, told: _Shares) -> dict[int, float]:
        if len(self.predictors) == 1:
            # A predictor that is judged is told of no floor, lest it be judged by what it was not asked.
            found = self.predictors[0].shares(row, path, 0.0 if self._judges else floor)
            if self._judges:
                told[path] = [found]
            return found
        mixed: dict[int, float] = {}
        told[path] = [predictor.shares(row, path, 0.0) for predictor in self.predictors]
        weights = self.weights(row.index)
        awake = sum(weight for weight, shares in zip(weights, told[path], strict=True) if shares)
        for weight, shares in zip(weights, told[path], strict=True):
            for token, share in shares.items():
                mixed[token] = mixed.get(token, 0.0) + weight / awake * share
        return mixed

    def _judge(self, row: DraftRow) -> None:
        """Compare what was told of the last tree of the row with what came."""
        last = self._told.pop(row.index, None)
        if last is None:
            return
        path: tuple[int, ...] = ()
        for token in row.tokens[last.length :]:
            told = last.shares.get(path)
            if told is None:
                return
            for predictor, shares in zip(self.predictors, told, strict=True):
                if predictor.judged:
                    predictor.judge(shares, token)
            awake = [place for place, shares in enumerate(told) if shares]
            if len(awake) > 1 and any(token in shares for shares in told):
                weights = self.weights(row.index)
                held = sum(weights[place] for place in awake)
                gained = [weights[place] * max(told[place].get(token, 0.0), _LEAST) for place in awake]
                scale, even = held * (1.0 - _EVEN) / sum(gained), held * _EVEN / len(gained)
                for place, gain in zip(awake, gained, strict=True):
                    weights[place] = scale * gain + even
            path = (*path, token)

    def _credit(self, tree: TokenTree, told: _Shares, children: int) -> list[tuple[str, ...]]:
        """Per node the predictors that would have proposed it alone; of a node that none would, those that know it."""
        if len(self.predictors) == 1:
            return [(), *[(self.name,)] * tree.drafted]
        paths: list[tuple[int, ...]] = [()]
        best: dict[int, list[list[int]]] = {}
        origins: list[tuple[str, ...]] = [()]
        for node in range(1, len(tree)):
            parent, token = tree.parents[node], tree.tokens[node]
            paths.append((*paths[parent], token))
            shares = told[paths[parent]]
            if parent not in best:
                best[parent] = [nlargest(children, one, key=one.__getitem__) for one in shares]
            names = [p.name for p, top in zip(self.predictors, best[parent], strict=True) if token in top]
            known = [p.name for p, one in zip(self.predictors, shares, strict=True) if token in one]
            origins.append(tuple(names or known))
        return origins


def _asking(
    tree: TokenTree, origins: Sequence[tuple[str, ...]], predictor: Predictor, row: DraftRow, limits: TreeLimits
) -> tuple[TokenTree, list[tuple[str, ...]]]:
    """The tree with the paths that a predictor asks for, which it proposes with that."""
    whole = with_asked(tree, predictor.asked(row, limits), limits)
    credit = []
    for node, candidate in enumerate(whole.candidates):
        names = () if candidate is None else origins[candidate]
        credit.append((*names, predictor.name) if node in whole.asked and predictor.name not in names else names)
    return whole.tree, credit


class _RowExpander:
    """Candidates for the nodes of one row's tree, during one proposal."""

    def __init__(self, draft: TextDraft, row: DraftRow, limit: TreeLimits) -> None:
        self._draft = draft
        self._row = row
        self._limit = limit
        self.told: _Shares = {}
        # negated scores of the best `max_nodes` candidates so far, ascending
        self._best: list[float] = []

    def __call__(
        self, builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]
    ) -> list[list[list[Candidate]]]:
        """See `hf_treespec.tree.Expander`; one row."""
        builder = builders[0]
        if self._draft.growth == "static":
            return [[self._candidates(builder, node) for node in frontier[0]]]
        return [[self._pruned(builder, node) for node in frontier[0]]]

    def _candidates(self, builder: TreeBuilder, node: int, floor: float = 0.0) -> list[Candidate]:
        """Children of a node with a probability above `floor`, best first."""
        path: list[int] = []
        while node:
            path.append(builder.tokens[node])
            node = builder.parents[node]
        shares = self._draft.shares(self._row, tuple(reversed(path)), floor, self.told)
        ranked = sorted([item for item in shares.items() if item[1] > floor], key=_second, reverse=True)
        return [Candidate(token, log(share)) for token, share in ranked[: self._limit.max_children]]

    def _pruned(self, builder: TreeBuilder, node: int) -> list[Candidate]:
        """Children of a node that can still enter the tree.

        The tree keeps the best `max_nodes` candidates of all levels, and the earlier one of equals, so a candidate
        that is not among the best so far never will be. Leaving it out here keeps the builder small.
        """
        best, room, score = self._best, self._limit.max_nodes, builder.scores[node]
        # The factor keeps rounding in exp and log from deciding a tie. Below a node that is worse than the worst one
        # kept nothing can enter, however much worse it is.
        floor = 0.999999 * exp(min(-best[-1] - score, 0.0)) if len(best) >= room else 0.0
        found = []
        for candidate in self._candidates(builder, node, floor):
            cost = -(score + candidate.log_confidence)
            if len(best) >= room:
                if cost >= best[-1]:
                    break
                best.pop()
            insort(best, cost)
            found.append(candidate)
        return found
