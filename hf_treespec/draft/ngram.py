"""Trees out of the text itself: what followed the same words before will follow them again.

No model and no training: the index of a row counts, for every context of up to `max_match` tokens, which tokens
followed it. A node of the tree is expanded by its own context, that is the committed text plus the path to the node,
so a continuation that runs out of the text goes on by matching its own last tokens (periodic text repeats its period
for as long as the tree is deep).

How the votes of different context lengths are mixed is prediction by partial matching (Cleary and Witten 1984): an
occurrence votes once, at the longest context that it shares with the node; the longest context takes its share and
hands the rest, the escape probability, to the next shorter one. The escape of a context rises with the number of
distinct tokens that followed it (escape method C, Moffat 1990) and falls with its length. What no context explains
goes to recent tokens by the number of different tokens they have followed (Kneser and Ney 1995).

Lengths are in tokens. L is the length of the text, N the nodes of the tree.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from heapq import nlargest
from itertools import islice
from math import log
from operator import itemgetter

from hf_treespec.draft.base import DraftRow
from hf_treespec.errors import TreeConfigError, TreeSpecError
from hf_treespec.tree import GROWTH_POLICIES, Candidate, TokenTree, TreeBuilder, TreeLimits, grow

__all__ = ["NgramDraft", "NgramIndex"]

_share = itemgetter(1)


class _Context:
    """A context and what followed it.

    Attributes:
        longer: by the token before this context, the context longer by one.
        counts: how often each token followed; the most recent follower is last. Empty in the empty context.
        total: sum of `counts`.
    """

    __slots__ = ("counts", "longer", "total")

    def __init__(self) -> None:
        self.longer: dict[int, _Context] = {}
        self.counts: dict[int, int] = {}
        self.total = 0


class NgramIndex:
    """Followers of every context of a text that grows at its end.

    Adding a token touches `max_match` contexts, whatever the length of the text; nothing is ever scanned again.

    Args:
        max_match: longest context, in tokens.

    Attributes:
        spread: by token, how many different tokens it has followed; the most recent token is last.
    """

    __slots__ = ("_root", "_seen", "_tail", "max_match", "spread")

    def __init__(self, max_match: int) -> None:
        self.max_match = max_match
        self._root = _Context()
        self._seen = 0
        self._tail: list[int] = []
        self.spread: dict[int, int] = {}

    def __len__(self) -> int:
        """Tokens read so far."""
        return self._seen

    def update(self, tokens: Sequence[int]) -> None:
        """Read the tokens that were appended since the last call, in O(max_match) each.

        Args:
            tokens: the whole text; its first `len(self)` tokens must be those of the last call.

        Raises:
            TreeSpecError: if the text shrank or its last known tokens changed.
        """
        seen = self._seen
        # The window is enough to notice a row that was cut, refilled or mixed up, at a cost independent of L.
        if list(tokens[max(0, seen - len(self._tail)) : seen]) != self._tail:
            raise TreeSpecError(
                f"internal error: an n-gram index has read {seen} tokens ending in {self._tail}, but now the row has "
                f"{len(tokens)} tokens that do not begin with them; rows may only be appended to"
            )
        reach = self.max_match
        root, spread = self._root, self.spread
        for end in range(seen, len(tokens)):
            token = tokens[end]
            context = root
            for start in range(end - 1, max(end - 1 - reach, -1), -1):
                longer = context.longer.get(tokens[start])
                if longer is None:
                    longer = context.longer[tokens[start]] = _Context()
                context = longer
                # Taking the token out first moves it to the end: the dict stays ordered by recency.
                context.counts[token] = context.counts.pop(token, 0) + 1
                context.total += 1
            first = end == 0 or root.longer[tokens[end - 1]].counts[token] == 1
            spread[token] = spread.pop(token, 0) + first
        self._seen = len(tokens)
        self._tail = list(tokens[max(0, len(tokens) - reach) :])

    def match(self, backwards: Iterable[int]) -> list[_Context]:
        """Contexts that have been seen, the empty one first, the longest last.

        Args:
            backwards: the tokens before the position asked for, nearest first; read only as far as they match.

        Returns:
            `match[k]` holds the followers of the last k tokens; at most `max_match + 1` entries.
        """
        context = self._root
        found = [context]
        for token in islice(backwards, self.max_match):
            longer = context.longer.get(token)
            if longer is None:
                break
            context = longer
            found.append(context)
        return found


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

    def __init__(
        self,
        *,
        growth: str = "best_first",
        max_match: int = 8,
        max_occurrences: int = 32,
        novelty: float = 2.0,
        novelty_decay: float = 0.7,
        background: float = 0.5,
    ) -> None:
        if growth not in GROWTH_POLICIES:
            raise TreeConfigError(f"growth={growth!r} must be one of {GROWTH_POLICIES}")
        for name, count in (("max_match", max_match), ("max_occurrences", max_occurrences)):
            if count < 1:
                raise TreeConfigError(f"{name}={count} must be at least 1")
        # An infinite or zero novelty would make a confidence 0 or 1, whose logarithms cannot rank anything.
        if not 0.0 < novelty < float("inf"):
            raise TreeConfigError(f"novelty={novelty} must be positive and finite")
        if not 0.0 < novelty_decay <= 1.0:
            raise TreeConfigError(f"novelty_decay={novelty_decay} must lie in (0, 1]")
        if not 0.0 <= background <= 1.0:
            raise TreeConfigError(f"background={background} must lie in [0, 1]")
        self.growth = growth
        self.max_match = max_match
        self.max_occurrences = max_occurrences
        self.background = background
        # novelty by context length; entry 0 is never read
        self._novelty = [novelty * novelty_decay ** (length - 1) for length in range(max_match + 1)]
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

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Nothing to learn here: the accepted tokens are read from the rows at the next proposal."""


class _RowExpander:
    """Candidates for the nodes of one row's tree, during one proposal."""

    def __init__(self, draft: NgramDraft, index: NgramIndex, tokens: Sequence[int], limit: TreeLimits) -> None:
        self._draft = draft
        self._index = index
        self._tokens = tokens
        self._limit = limit
        self._prune = draft.growth != "static"
        # negated scores of the best `max_nodes` candidates so far, ascending
        self._best: list[float] = []
        recent = dict(islice(reversed(index.spread.items()), draft.max_occurrences))
        votes = sum(recent.values())
        common = nlargest(limit.max_children, recent.items(), key=_share)
        self._common = [(token, draft.background * count / votes) for token, count in common]

    def __call__(
        self, builders: Sequence[TreeBuilder], frontier: Sequence[Sequence[int]]
    ) -> list[list[list[Candidate]]]:
        """See `hf_treespec.tree.Expander`; one row."""
        builder = builders[0]
        return [[self._candidates(builder, node) for node in frontier[0]]]

    def _backwards(self, builder: TreeBuilder, node: int) -> Iterable[int]:
        """Tokens up to and including those of `node`, the last one first."""
        while node:
            yield builder.tokens[node]
            node = builder.parents[node]
        yield from reversed(self._tokens)

    def _candidates(self, builder: TreeBuilder, node: int) -> list[Candidate]:
        """Children of a node, best first."""
        shares = self._shares(self._index.match(self._backwards(builder, node)))
        ranked = nlargest(self._limit.max_children, shares.items(), key=_share)
        if not self._prune:
            return [Candidate(token, log(share)) for token, share in ranked]
        found = []
        base, best, room = builder.scores[node], self._best, self._limit.max_nodes
        for token, share in ranked:
            candidate = Candidate(token, log(share))
            cost = -(base + candidate.log_confidence)
            # The tree keeps the best `max_nodes` candidates of all levels and ties go to the earlier one, so a
            # candidate that is not among the best now never will be: it need not enter the builder.
            if len(best) >= room:
                if cost >= best[-1]:
                    break
                best.pop()
            insort(best, cost)
            found.append(candidate)
        return found

    def _shares(self, contexts: Sequence[_Context]) -> dict[int, float]:
        """Estimated probability of each next token; the sum is below 1.

        Args:
            contexts: contexts of the node by length, as `NgramIndex.match` returns them.

        Returns:
            Token to probability, in order of match length, then recency.
        """
        shares: dict[int, float] = {}
        rest = 1.0
        total, voted = 0, {}
        for length in range(len(contexts) - 1, 0, -1):
            context = contexts[length]
            # An occurrence of the longer context is one of the shorter context too, and has voted already.
            if context.total == total:
                continue
            votes = []
            count = 0
            for token in islice(reversed(context.counts), self._draft.max_occurrences):
                own = context.counts[token] - voted.get(token, 0)
                if own:
                    votes.append((token, own))
                    count += own
            total, voted = context.total, context.counts
            if not votes:
                continue
            unseen = self._draft._novelty[length] * len(votes)
            scale = rest / (count + unseen)
            for token, own in votes:
                shares[token] = shares.get(token, 0.0) + scale * own
            rest *= unseen / (count + unseen)
        if self._draft.background:
            for token, share in self._common:
                shares[token] = shares.get(token, 0.0) + rest * share
        return shares
