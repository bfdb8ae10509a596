"""Trees out of the text itself: what followed the same words before will follow them again.

No model and no training: the index of a row counts, for every context of up to `max_match` tokens, which tokens
followed it. A node of the tree is expanded by its own context: the end of the committed text plus the path to the
node. So the children of the root are what followed the matches of the text's end, and those continuations share a
trie; one that reaches the end of the text goes on by matching its own last tokens, hence periodic text repeats its
period for as long as the tree is deep.

How the votes of different context lengths are mixed is prediction by partial matching (Cleary and Witten 1984): an
occurrence votes once, at the longest context that it shares with the node; the longest context takes its share and
hands the rest, the escape probability, to the next shorter one. The escape of a context rises with the number of
distinct tokens that followed it (escape method C, Moffat 1990) and falls with its length. What no context explains
goes to recent tokens by the number of different tokens they have followed (Kneser and Ney 1995).

Lengths are in tokens. A proposal costs time in proportion to the nodes and to `max_match * max_occurrences`,
whatever the length of the text.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from itertools import islice
from math import exp, log
from operator import itemgetter

from hf_treespec.draft.base import DraftRow
from hf_treespec.draft.ngram_index import Match, NgramIndex
from hf_treespec.errors import TreeConfigError
from hf_treespec.tree import GROWTH_POLICIES, Candidate, TokenTree, TreeBuilder, TreeLimits, grow
from hf_treespec.verify import DraftLaws

__all__ = ["NgramDraft"]

_second = itemgetter(1)


class NgramDraft:
    """Draft source that needs no model: trees of what followed the same n-grams in prompt and text.

    The defaults were fitted to greedy texts of SmolLM2-135M (code, school mathematics, chat); the optimum is flat.

    Args:
        growth: one of `hf_treespec.tree.GROWTH_POLICIES`.
        max_match: longest context that is matched, in tokens.
        max_occurrences: distinct followers looked at per context, the most recent first; bounds the time of a
            proposal in long texts.
        novelty: how readily the token after a context of length 1 is taken to be one that never followed it; the
            escape probability is `c d / (n + c d)` for n votes on d distinct tokens, with c = `novelty`.
        novelty_decay: factor on c for each further token of the context; a longer match is trusted more.
        background: probability that a token which no context predicts repeats one of the `max_occurrences` most
            recent distinct tokens; with 0 the tree is smaller and holds continuations of matches only.

    Raises:
        TreeConfigError: if an argument is out of range.
    """

    name = "ngram"
    cheap = True

    def __init__(
        self,
        *,
        growth: str = "best_first",
        max_match: int = 8,
        max_occurrences: int = 40,
        novelty: float = 2.0,
        novelty_decay: float = 0.7,
        background: float = 0.4,
    ) -> None:
        if growth not in GROWTH_POLICIES:
            raise TreeConfigError(f"growth={growth!r} must be one of {GROWTH_POLICIES}")
        for name, count in (("max_match", max_match), ("max_occurrences", max_occurrences)):
            if count < 1:
                raise TreeConfigError(f"{name}={count} must be at least 1")
        # At either extreme every confidence rounds to 0 or 1, and the logarithms rank nothing.
        if not 1e-6 <= novelty <= 1e6:
            raise TreeConfigError(f"novelty={novelty} must lie in [1e-6, 1e6]")
        if not 0.0 < novelty_decay <= 1.0:
            raise TreeConfigError(f"novelty_decay={novelty_decay} must lie in (0, 1]")
        if not 0.0 <= background <= 1.0:
            raise TreeConfigError(f"background={background} must lie in [0, 1]")
        self.growth = growth
        self.max_match = max_match
        self.max_occurrences = max_occurrences
        self.background = background
        # by context length; entry 0 is never read
        self.escape_weights = [novelty * novelty_decay ** max(length - 1, 0) for length in range(max_match + 1)]
        self._indices: dict[int, NgramIndex] = {}

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[TokenTree]:
        """One tree per row; see `hf_treespec.draft.base.Draft`. Reads the tokens appended since the last call.

        Args:
            rows: rows of the batch; `row.tokens[-1]` is the root.
            limits: budget per row; a row with `max_nodes == 0` gets its root only, and is not read.

        Returns:
            One tree per row, within its limits.

        Raises:
            TreeSpecError: if the tokens of a row did not merely grow since the last call.
        """
        trees = [TokenTree.root_only(row.tokens[-1]) for row in rows]
        # Rows are grown one by one: there is no forward to share between them.
        for place, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            if limit.max_nodes and limit.max_depth:
                index = self._indices.get(row.index)
                if index is None:
                    index = self._indices[row.index] = NgramIndex(self.max_match)
                index.update(row.tokens)
                expander = _RowExpander(self, index, row.tokens, limit)
                trees[place] = grow([row.tokens[-1]], expander, [limit], self.growth)[0][0]
        return trees

    def laws(self, batch: int) -> DraftLaws | None:
        """None: no node is random; see `Draft.laws`."""
        return None

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Nothing to learn here: the accepted tokens are read from the rows at the next proposal."""


class _RowExpander:
    """Candidates for the nodes of one row's tree, during one proposal."""

    def __init__(self, draft: NgramDraft, index: NgramIndex, tokens: Sequence[int], limit: TreeLimits) -> None:
        self._draft = draft
        self._index = index
        self._tokens = tokens
        self._limit = limit
        # negated scores of the best `max_nodes` candidates so far, ascending
        self._best: list[float] = []
        recent = dict(islice(reversed(index.spread.items()), draft.max_occurrences))
        scale = draft.background / sum(recent.values())
        common = sorted(recent.items(), key=_second, reverse=True)
        self._common = [(token, scale * count) for token, count in common]

    def __call__(
        self, builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]
    ) -> list[list[list[Candidate]]]:
        """See `hf_treespec.tree.Expander`; one row."""
        builder = builders[0]
        if self._draft.growth == "static":
            return [[self._candidates(builder, node) for node in frontier[0]]]
        return [[self._pruned(builder, node) for node in frontier[0]]]

    def _backwards(self, builder: TreeBuilder, node: int) -> Iterable[int]:
        """Tokens up to and including that of `node`, the last one first."""
        while node:
            yield builder.tokens[node]
            node = builder.parents[node]
        yield from reversed(self._tokens)

    def _candidates(self, builder: TreeBuilder, node: int, floor: float = 0.0) -> list[Candidate]:
        """Children of a node with a probability above `floor`, best first; ties by match length, then recency."""
        shares = self._shares(self._index.match(self._backwards(builder, node)), floor)
        ranked = sorted([item for item in shares.items() if item[1] > floor], key=_second, reverse=True)
        return [Candidate(token, log(share)) for token, share in ranked[: self._limit.max_children]]

    def _pruned(self, builder: TreeBuilder, node: int) -> list[Candidate]:
        """Children of a node that can still enter the tree.

        The tree keeps the best `max_nodes` candidates of all levels, and the earlier one of equals, so a candidate
        that is not among the best so far never will be. Leaving it out here keeps the builder small.
        """
        best, room, score = self._best, self._limit.max_nodes, builder.scores[node]
        # The factor keeps rounding in exp and log from deciding a tie.
        floor = 0.999999 * exp(-best[-1] - score) if len(best) >= room else 0.0
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

    def _shares(self, matches: Sequence[Match], floor: float) -> dict[int, float]:
        """Estimated probability of each next token; the sum is at most 1.

        Args:
            matches: contexts of the node, as `NgramIndex.match` returns them.
            floor: tokens without a match are of no interest at or below this probability.

        Returns:
            Token to probability, in order of match length, then recency.
        """
        shares: dict[int, float] = {}
        rest = 1.0
        voted: dict[int, int] = {}
        for length, counts in reversed(matches):
            # An occurrence of the longer context is one of the shorter context too, and has voted already.
            votes: dict[int, int] = {}
            for token in islice(reversed(counts), self._draft.max_occurrences):
                own = counts[token] - voted.get(token, 0)
                if own:
                    votes[token] = own
            voted = counts
            unseen = self._draft.escape_weights[length] * len(votes)
            scale = rest / (sum(votes.values()) + unseen) if votes else 0.0
            for token, own in votes.items():
                shares[token] = shares.get(token, 0.0) + scale * own
            if votes:
                rest = scale * unseen
        for token, share in self._common:
            if rest * share <= floor:
                break
            shares.setdefault(token, rest * share)
        return shares
