"""What followed the same words before will follow them again: predictions out of the text itself.

No model and no training: the index of a row counts, for every context of its last tokens, which tokens followed it. A
node of the tree is judged by its own context: the end of the committed text plus the path to the node. So the children
of the root are what followed the matches of the text's end, and those continuations share a trie; one that reaches the
end of the text goes on by matching its own last tokens, hence periodic text repeats its period for as long as the tree
is deep.

How the votes of different context lengths are mixed is prediction by partial matching (Cleary and Witten 1984): an
occurrence votes once, at the longest context that it shares with the node; the longest context takes its share and
hands the rest, the escape probability, to the next shorter one. The escape of a context rises with the number of
distinct tokens that followed it (escape method C, Moffat 1990) and falls with its length. What no context explains
goes to recent tokens by the number of different tokens they have followed (Kneser and Ney 1995).

Which contexts there are is the index's matter: up to `max_match` tokens (`NgramIndex`, the source "ngram"), or of any
length (`SuffixIndex`, the source "suffix"; contexts without a bound are PPM*, Cleary and Teahan 1997). A corpus on
disk can vote beside the text.

Lengths are in tokens. A proposal costs time in proportion to the nodes and to the contexts and followers looked at,
whatever the length of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import NamedTuple, Protocol

from hf_treespec.draft.base import DraftRow
from hf_treespec.draft.ngram_index import Match, NgramIndex
from hf_treespec.draft.suffix_index import SuffixIndex
from hf_treespec.draft.text import Predictor, TextDraft
from hf_treespec.errors import TreeConfigError

__all__ = [
    "ContextPredictor",
    "ContextSource",
    "NgramDraft",
    "SuffixDraft",
    "TextIndex",
    "ngram_predictor",
    "suffix_predictor",
]

_second = itemgetter(1)
# Longer contexts are not trusted any more than one of this length.
_LONGEST_ESCAPE = 64


class ContextSource(Protocol):
    """Something other than the text of the row that knows what followed contexts, such as a corpus."""

    def matches(self, backwards: Iterable[int]) -> Iterable[Match]:
        """Matches of a context, the longest first.

        Args:
            backwards: tokens of the context, the last one first; read only as far as they match.
        """
        ...


class TextIndex(Protocol):
    """An index of a growing text.

    Attributes:
        spread: by token, how many different tokens it has followed; the most recent token is last.
    """

    spread: dict[int, int]

    def update(self, tokens: Sequence[int]) -> None:
        """Read the tokens that were appended since the last call."""
        ...

    def after(self, path: Sequence[int]) -> Iterable[Match]:
        """Matches of the text followed by `path`, the longest first."""
        ...


class _Row(NamedTuple):
    text: TextIndex
    common: list[tuple[int, float]]


class ContextPredictor(Predictor):
    """Prediction by partial matching over an index of each row's text.

    The defaults were fitted to greedy texts of SmolLM2-135M (code, school mathematics, chat); the optimum is flat.

    Args:
        name: of the source.
        make_index: makes the index of a row.
        corpus: votes beside the text: at contexts of one length after it.
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

    def __init__(
        self,
        name: str,
        make_index: Callable[[], TextIndex],
        *,
        corpus: ContextSource | None = None,
        max_occurrences: int = 40,
        novelty: float = 2.0,
        novelty_decay: float = 0.7,
        background: float = 0.4,
    ) -> None:
        if max_occurrences < 1:
            raise TreeConfigError(f"max_occurrences={max_occurrences} must be at least 1")
        # At either extreme every confidence rounds to 0 or 1, and the logarithms rank nothing.
        if not 1e-6 <= novelty <= 1e6:
            raise TreeConfigError(f"novelty={novelty} must lie in [1e-6, 1e6]")
        if not 0.0 < novelty_decay <= 1.0:
            raise TreeConfigError(f"novelty_decay={novelty_decay} must lie in (0, 1]")
        if not 0.0 <= background <= 1.0:
            raise TreeConfigError(f"background={background} must lie in [0, 1]")
        self.name = name
        self.corpus = corpus
        self.max_occurrences = max_occurrences
        self.background = background
        # by context length; entry 0 is never read
        self.escape_weights = [novelty * novelty_decay ** max(n - 1, 0) for n in range(_LONGEST_ESCAPE + 1)]
        self._make_index = make_index
        self._rows: dict[int, _Row] = {}

    def begin(self, row: DraftRow) -> None:
        """Bring the index of the row up to date; see `Predictor.begin`."""
        known = self._rows.get(row.index)
        index = self._make_index() if known is None else known.text
        index.update(row.tokens)
        recent = dict(islice(reversed(index.spread.items()), self.max_occurrences))
        scale = self.background / sum(recent.values())
        common = sorted(recent.items(), key=_second, reverse=True)
        self._rows[row.index] = _Row(index, [(token, scale * count) for token, count in common])

    def shares(self, row: DraftRow, path: Sequence[int], floor: float) -> dict[int, float]:
        """Estimated probability of each next token, in order of match length, then recency; see `Predictor`."""
        index, common = self._rows[row.index]
        found: Iterable[tuple[int, int, Mapping[int, int]]] = ((-m.length, 0, m.counts) for m in index.after(path))
        if self.corpus is not None:
            backwards = _backwards(row.tokens, path)
            others = ((-m.length, 1, m.counts) for m in self.corpus.matches(backwards))
            found = merge(found, others, key=itemgetter(0, 1))
        shares: dict[int, float] = {}
        rest = 1.0
        voted: list[Mapping[int, int]] = [{}, {}]
        for depth, voters, counts in found:
            # An occurrence of the longer context is one of the shorter context too, and has voted already.
            before = voted[voters]
            votes: dict[int, int] = {}
            for token in islice(reversed(counts), self.max_occurrences):
                own = counts[token] - before.get(token, 0)
                # Below 0 where counts are partial.
                if own > 0:
                    votes[token] = own
            voted[voters] = counts
            if not votes:
                continue
            unseen = self.escape_weights[min(-depth, _LONGEST_ESCAPE)] * len(votes)
            scale = rest / (sum(votes.values()) + unseen)
            for token, own in votes.items():
                shares[token] = shares.get(token, 0.0) + scale * own
            rest = scale * unseen
        for token, share in common:
            if rest * share <= floor:
                break
            shares.setdefault(token, rest * share)
        return shares


def _backwards(tokens: Sequence[int], path: Sequence[int]) -> Iterable[int]:
    yield from reversed(path)
    yield from reversed(tokens)


class NgramDraft(TextDraft):
    """Draft source that needs no model: trees of what followed the same n-grams in prompt and text.

    Args:
        growth: one of `hf_treespec.tree.GROWTH_POLICIES`.
        max_match: longest context that is matched, in tokens.
        settings: see `ContextPredictor`.

    Raises:
        TreeConfigError: if an argument is out of range.
    """

    def __init__(self, *, growth: str = "best_first", max_match: int = 8, **settings: float) -> None:
        super().__init__([ngram_predictor(max_match=max_match, **settings)], growth=growth)


class SuffixDraft(TextDraft):
    """Draft source that needs no model: as `NgramDraft`, over contexts of any length, and a corpus if there is one.

    Args:
        growth: one of `hf_treespec.tree.GROWTH_POLICIES`.
        corpus: a corpus on disk, see `hf_treespec.draft.CorpusIndex`.
        settings: see `ContextPredictor`.

    Raises:
        TreeConfigError: if an argument is out of range.
    """

    def __init__(self, *, growth: str = "best_first", corpus: ContextSource | None = None, **settings: float) -> None:
        super().__init__([suffix_predictor(corpus=corpus, **settings)], growth=growth)


def ngram_predictor(*, max_match: int = 8, **settings: float) -> ContextPredictor:
    """The predictor of the source "ngram"."""
    if max_match < 1:
        raise TreeConfigError(f"max_match={max_match} must be at least 1")
    return ContextPredictor("ngram", lambda: NgramIndex(max_match), **settings)  # type: ignore[arg-type]


def suffix_predictor(*, corpus: ContextSource | None = None, **settings: float) -> ContextPredictor:
    """The predictor of the source "suffix"."""
    return ContextPredictor("suffix", SuffixIndex, corpus=corpus, **settings)  # type: ignore[arg-type]
