"""Lookahead decoding: n-grams that the target makes up itself, by guessing ahead in the forward that verifies.

After Fu, Bailis, Stoica and Zhang 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding"
(arXiv 2402.02057). Solving for the next tokens all at once by Jacobi iteration means to guess them, to read all
guesses in one forward, and to put in the place of each guess what the target says after the guesses before it. The
iterates themselves converge slowly; but the tokens that follow each other over the iterations are n-grams in the
target's own voice, and later text is found in a pool of them.

The window has W columns. Column i holds its last N - 1 tokens, of one iteration each: the token of iteration j stands
at position root + 1 + i + j. To make its next token column i reads the text, the oldest tokens of columns 0 to i, and
its own others: with them the n-gram is complete, and the column moves on by one. What it reads is a path of a tree:
the oldest tokens of all columns are a chain below the root, and the rest of column i hangs from that chain's node i.
So the mask of the paper's window is that of a tree, and the window is laid out here as it stands there, in at most
W (N - 1) nodes. What differs:

- A token that two paths of the tree share is read once: the second token of column i is often the oldest of the next,
  and a guess may be a candidate too. Guesses that turn out right are accepted as any node is.
- The pool is asked at every node of the tree, not at the root alone, and n-grams are matched by as many tokens as fit,
  up to N - 1. How often a continuation of each kind (tokens matched, rank, in a text or only guessed) turns out right
  is counted, and is the probability by which the tree of candidates grows.
- The n-grams of prompt and text are in the pool from the start, as in the authors' code.
- A window takes what the size of the tree allows: whole columns, at most half of the nodes, and none where nodes may
  have one child only. Where trees are cut by cost, its nodes count for the tokens that they bring later: accepted ones
  that only guessed n-grams foretold, for each node of the window that was read.

Guesses are the target's most probable tokens, under sampling too: n-grams serve at other positions than those where
they were made, so a guess under the noise of its position would only be less probable elsewhere. So nothing here sees
the noise, and what is learnt of a row depends on its text and on the target alone, never on the coins that judge the
next tree: it serves verification by independent draws too.

Shapes: B rows, N nodes, V vocabulary, R places that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from torch import Tensor

from hf_treespec.draft.base import DraftRow
from hf_treespec.draft.ngram_pool import Continuation, NgramPool
from hf_treespec.draft.text import Predictor
from hf_treespec.tree import TokenTree, TreeLimits

__all__ = ["JacobiWindow", "LookaheadPredictor"]

# Of the nodes of a tree, what a window may take.
_SHARE = 0.5
# Tokens of the text that first guesses are taken from.
_RECENT = 512
# Continuations of this rank and of higher ones are of one kind.
_LAST_RANK = 3
# How often a kind is right before anything is known of it, after texts of SmolLM2: of rank 0 by tokens matched (more
# are as good as 3), a rank further, and if it is only guessed; the weight of that in judgements, and that of the past.
_RIGHT = (0.13, 0.5, 0.75)
_PER_RANK, _GUESSED = 0.45, 0.75
_PRIOR, _DECAY = 6.0, 0.98
# Tokens gained by nodes read that the worth of a window starts from, the weight of the past, and a step that lets the
# first columns outlast the others.
_GAINED, _READ, _ROUNDS, _STEP = 2.0, 20.0, 0.97, 1e-3


class JacobiWindow:
    """The latest tokens of W Jacobi trajectories.

    Args:
        width: W.
        ngram: N; columns grow from one token to N - 1, and then move on.
    """

    def __init__(self, width: int, ngram: int) -> None:
        self.width = width
        self.ngram = ngram
        self.columns: list[list[int]] = []

    def fill(self, guess: Callable[[], int]) -> None:
        """Start the columns that are missing with a guess each."""
        while len(self.columns) < self.width:
            self.columns.append([guess()])

    def paths(self, nodes: int, depth: int) -> list[tuple[int, ...]]:
        """What the columns are to read below the root, the first one first, as many as there is room for.

        Args:
            nodes: of all paths together.
            depth: tokens of a path.
        """
        out: list[tuple[int, ...]] = []
        taken: set[tuple[int, ...]] = set()
        chain: tuple[int, ...] = ()
        for column in self.columns:
            path = (*chain, *column)
            taken |= {path[: end + 1] for end in range(len(path))}
            if len(path) > depth or len(taken) > nodes:
                break
            out.append(path)
            chain = (*chain, column[0])
        return out

    def advance(self, column: int, token: int) -> tuple[int, ...] | None:
        """Append what the target said at the end of a column's path.

        Returns:
            The n-gram, once there are N tokens.
        """
        gram = (*self.columns[column], token)
        whole = len(gram) == self.ngram
        self.columns[column] = list(gram[1:] if whole else gram)
        return gram if whole else None


@dataclass(slots=True)
class _Row:
    """What is known of a row."""

    pool: NgramPool
    window: JacobiWindow
    random: Random = field(default_factory=lambda: Random(0))
    length: int = 0  # tokens of the text so far
    told: dict[tuple[int, ...], list[Continuation]] = field(default_factory=dict)  # of the latest tree, by path
    paths: list[tuple[int, ...]] = field(default_factory=list)  # of the window in the latest tree
    kinds: dict[tuple[int, int, bool], list[float]] = field(default_factory=dict)  # decayed: right, judged
    gained: float = _GAINED
    read: float = _READ

    def sums(self, one: Continuation) -> list[float]:
        """How many continuations of this kind were right, and how many were judged."""
        kind = one.matched, min(one.rank, _LAST_RANK), one.guessed
        known = self.kinds.get(kind)
        if known is None:
            prior = _RIGHT[min(one.matched, len(_RIGHT)) - 1] * _PER_RANK ** kind[1]
            known = self.kinds[kind] = [prior * (_GUESSED if one.guessed else 1.0) * _PRIOR, _PRIOR]
        return known

    def judge(self, tokens: Sequence[int]) -> None:
        """Compare what was told of the latest tree with what came."""
        path: tuple[int, ...] = ()
        for token in tokens:
            if path not in self.told:
                return
            for one in self.told[path]:
                sums = self.sums(one)
                sums[0] = _DECAY * sums[0] + (one.token == token)
                sums[1] = _DECAY * sums[1] + 1.0
                self.gained += one.guessed and one.token == token
            path = (*path, token)


class LookaheadPredictor(Predictor):
    """Draft source over a pool of n-grams that a Jacobi window fills; each row has its own, for one call.

    Args:
        window: W, columns.
        ngram: N, tokens of an n-gram.
        candidates: G, n-grams kept of each first token.
        readable: token ids that the target can read and say; no others are guessed.
    """

    name = "lookahead"
    learns = True
    asks = True

    def __init__(self, *, window: int, ngram: int, candidates: int, readable: int) -> None:
        self._window, self._ngram, self._candidates = window, ngram, candidates
        self._readable = readable
        self._rows: dict[int, _Row] = {}

    def begin(self, row: DraftRow) -> None:
        """Put the n-grams of the new text into the pool; see `Predictor.begin`."""
        state = self._rows.get(row.index)
        if state is None:
            pool, window = NgramPool(self._ngram, self._candidates), JacobiWindow(self._window, self._ngram)
            state = self._rows[row.index] = _Row(pool, window)
        tokens = row.tokens
        state.judge(tokens[state.length :])
        for end in range(max(state.length, 1), len(tokens)):
            state.pool.add(tokens[max(end - self._ngram + 1, 0) : end + 1], guessed=False)
        state.length, state.told = len(tokens), {}
        usable = [token for token in tokens[-_RECENT:] if token < self._readable]
        if usable:
            state.window.fill(lambda: state.random.choice(usable))

    def asked(self, row: DraftRow, limits: TreeLimits) -> list[tuple[Sequence[int], float]]:
        """The window, each node at what such nodes have brought so far; see `Predictor.asked`."""
        state = self._rows[row.index]
        # All paths have one first token: the root's other children are candidates.
        fits = limits.max_children > 1
        state.paths = state.window.paths(int(_SHARE * limits.max_nodes), limits.max_depth) if fits else []
        worth = min(state.gained / state.read, 1.0)
        return [(path, worth * (1.0 - _STEP * column)) for column, path in enumerate(state.paths)]

    def shares(self, row: DraftRow, path: Sequence[int], floor: float) -> dict[int, float]:
        """How often continuations like those in the pool were right, the longest match first; see `Predictor`."""
        state, span = self._rows[row.index], self._ngram - 1
        found = state.pool.after([*row.tokens[-span:], *path][-span:])
        state.told[tuple(path)] = found
        shares, rest = {}, 1.0
        for one in found:
            right, judged = state.sums(one)
            shares[one.token] = min(right / judged, 0.9 * rest)
            rest -= shares[one.token]
        return shares

    def observe(self, trees: Sequence[TokenTree], logits_BNV: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Move the columns on whose paths were read; one transfer to the host."""
        ends: list[tuple[int, int]] = []
        owners: list[tuple[_Row, int]] = []
        for index, (tree, path) in enumerate(zip(trees, paths, strict=True)):
            state = self._rows.get(index)
            if state is None or not path:
                continue
            read: set[int] = set()
            for column, wanted in enumerate(state.paths):
                nodes = _nodes_of(tree, wanted)
                read.update(nodes)
                if len(nodes) == len(wanted):
                    ends.append((index, nodes[-1]))
                    owners.append((state, column))
            if read:
                state.gained, state.read = _ROUNDS * state.gained, _ROUNDS * state.read + len(read)
            state.paths = []
        if not ends:
            return
        rows, nodes = map(list, zip(*ends, strict=True))
        said = logits_BNV.detach()[rows, nodes].argmax(-1).tolist()
        for (state, column), token in zip(owners, said, strict=True):
            gram = state.window.advance(column, token) if token < self._readable else None
            if gram is not None:
                state.pool.add(gram, guessed=True)


def _nodes_of(tree: TokenTree, path: Sequence[int]) -> list[int]:
    """Nodes of a path below the root, as far as the tree goes."""
    nodes: list[int] = []
    for token in path:
        child = tree.child(nodes[-1] if nodes else 0, token)
        if child is None:
            break
        nodes.append(child)
    return nodes
