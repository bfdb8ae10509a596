"""The walk against plain decoding of a synthetic model whose logits depend on the whole prefix."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from hf_treespec.tree import TokenTree
from hf_treespec.verify import Decider, GumbelNoise, NodeScorer, walk_trees

VOCAB = 6
PAD, EOS = 0, 5


def logits_after(row: int, text: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(hash((row, text)) % 2**31)
    return torch.randn(VOCAB, generator=generator)


@dataclass
class Text:
    """A `TextState` of lists. Rows end at `EOS` or `longest`; ended rows are padded if `pads`."""

    rows: list[list[int]]
    in_step: bool
    longest: int = 100
    pads: bool = True
    padding: int = 2
    finished: list[bool] = field(init=False)
    emitted: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.finished = [False] * len(self.rows)
        self.emitted = [[] for _ in self.rows]

    def length(self, row: int) -> int:
        return len(self.rows[row])

    def position(self, row: int) -> int:
        return len(self.rows[row]) - self.padding * (row == 1)

    def text(self, length: int) -> Tensor:
        return torch.tensor([(row + [PAD] * length)[:length] for row in self.rows])

    def forced_token(self, row: int) -> int | None:
        return PAD if self.finished[row] and self.pads else None

    def emit(self, tokens: dict[int, int], scores: dict[int, Tensor], logits: dict[int, Tensor]) -> set[int]:
        for row, token in tokens.items():
            self.rows[row].append(token)
            self.emitted[row].append(token)
            self.finished[row] |= token == EOS or self.length(row) >= self.longest
        if self.in_step:
            return set() if all(self.finished) else set(tokens)
        return {row for row in tokens if not self.finished[row]}


def plain(state: Text, noise: GumbelNoise | None, steps: int) -> list[list[int]]:
    """What every row would emit, one token at a time, never mind the others."""
    out = []
    for row, start in enumerate(state.rows):
        text, offset, finished, mine = list(start), len(start) - state.position(row), state.finished[row], []
        while len(mine) < steps and (state.in_step or not finished):
            scores = logits_after(row, tuple(text))
            if noise is not None:
                scores = scores + noise.at(row, len(text) - offset)
            token = PAD if finished and state.pads else int(scores.argmax())
            text.append(token)
            mine.append(token)
            finished |= token == EOS or len(text) >= state.longest
        out.append(mine)
    return out


def random_tree(rng: random.Random, root: int, likely: list[int]) -> TokenTree:
    """A bushy tree that mostly follows `likely`."""
    tokens, parents, spine = [root], [-1], [0]
    for token in likely[: rng.randrange(len(likely) + 1)]:
        tokens.append(token)
        parents.append(spine[-1])
        spine.append(len(tokens) - 1)
    for _ in range(rng.randrange(8)):
        parent, token = rng.randrange(len(tokens)), rng.randrange(VOCAB)
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return TokenTree(tuple(tokens), tuple(parents))


def reading(state: Text, trees: list[TokenTree]) -> Callable[[int, int], Tensor]:
    """Raw logits of nodes, from the text before the walk and the path of the node."""
    before = [tuple(row) for row in state.rows]
    return lambda row, node: logits_after(row, before[row] + tuple(trees[row].path_tokens(node)[1:]))


def greedy(noise: GumbelNoise | None, batch: int) -> Decider:
    return Decider(NodeScorer(LogitsProcessorList(), batch), noise)


def longest_path(tree: TokenTree, tokens: list[int]) -> list[int]:
    """Nodes of the tree along the tokens, root first."""
    path = [0]
    for token in tokens:
        below = [n for n in range(len(tree)) if tree.parents[n] == path[-1] and tree.tokens[n] == token]
        if not below:
            break
        path += below
    return path


CASES = given(
    seed=st.integers(0, 2**32), batch=st.integers(1, 3), sampled=st.booleans(), longest=st.sampled_from((100, 7))
)


def setting(
    seed: int, batch: int, sampled: bool, longest: int, in_step: bool
) -> tuple[Text, list[TokenTree], Decider]:
    rng = random.Random(seed)
    same = rng.randrange(3, 6)
    lengths = [same if in_step else rng.randrange(3, 6) for _ in range(batch)]
    state = Text([[rng.randrange(1, 5) for _ in range(n)] for n in lengths], in_step, longest)
    if in_step and batch > 1 and rng.random() < 0.3:
        state.finished[rng.randrange(batch)] = True
    noise = GumbelNoise(seed % 1000, VOCAB) if sampled else None
    likely = plain(state, noise, 6)
    trees = [random_tree(rng, row[-1], guess) for row, guess in zip(state.rows, likely, strict=True)]
    return state, trees, greedy(noise, batch)


@settings(max_examples=150, deadline=None)
@CASES
def test_rows_apart_emit_plain_text_as_far_as_their_tree_goes(
    seed: int, batch: int, sampled: bool, longest: int
) -> None:
    state, trees, decider = setting(seed, batch, sampled, longest, in_step=False)
    noise = GumbelNoise(seed % 1000, VOCAB) if sampled else None
    wanted = plain(state, noise, 20)
    takes_part = [row for row in range(batch) if (seed >> row) % 4]
    paths = walk_trees(state, trees, reading(state, trees), decider, takes_part, in_step=False)
    for row, tree in enumerate(trees):
        if row not in takes_part:
            assert paths[row] == state.emitted[row] == []
            continue
        # One token more than accepted nodes, unless the text ended inside the tree.
        path = longest_path(tree, wanted[row])
        path = path[: len(wanted[row])]
        assert paths[row] == path
        assert state.emitted[row] == wanted[row][: len(path)]


@settings(max_examples=150, deadline=None)
@CASES
def test_rows_in_step_stop_together_at_the_first_that_stops(
    seed: int, batch: int, sampled: bool, longest: int
) -> None:
    state, trees, decider = setting(seed, batch, sampled, longest, in_step=True)
    noise = GumbelNoise(seed % 1000, VOCAB) if sampled else None
    wanted = plain(state, noise, 20)
    was_finished, length = list(state.finished), state.length(0)
    paths = walk_trees(state, trees, reading(state, trees), decider, range(batch), in_step=True)
    own = [longest_path(tree, tokens) for tree, tokens in zip(trees, wanted, strict=True)]
    ends = [
        next(
            (n for n, token in enumerate(tokens, 1) if done or token == EOS or length + n >= longest),
            100,
        )
        for tokens, done in zip(wanted, was_finished, strict=True)
    ]
    common = min(*map(len, own), max(ends))
    for row in range(batch):
        assert state.emitted[row] == wanted[row][:common]
        assert paths[row] == own[row][:common]


def test_a_forced_row_emits_its_padding_and_follows_a_chain_of_it() -> None:
    state = Text([[1, 2], [3, EOS]], in_step=True)
    state.finished[1] = True
    row_0 = plain(state, None, 3)[0]
    trees = [TokenTree.chain([2, *row_0[:2]]), TokenTree.chain([EOS, PAD, PAD])]
    asked: list[tuple[int, int]] = []
    logits = reading(state, trees)

    def logits_at(row: int, node: int) -> Tensor:
        asked.append((row, node))
        # What the target says of padding must not matter: here it wants token 4.
        return logits(row, node) if row == 0 else torch.eye(VOCAB)[4]

    paths = walk_trees(state, trees, logits_at, greedy(None, 2), [0, 1], in_step=True)
    assert state.emitted == [row_0, [PAD] * 3]
    assert paths == [[0, 1, 2]] * 2
    assert asked == [(row, node) for node in range(3) for row in range(2)]


def test_forced_rows_are_scored_like_the_others() -> None:
    state = Text([[1, 2], [3, EOS]], in_step=True)
    state.finished[1] = True
    logits = {row: logits_after(row, tuple(state.rows[row])) for row in range(2)}
    scorer = NodeScorer(LogitsProcessorList([TemperatureLogitsWarper(0.5)]), 2)
    tokens, scores = Decider(scorer, None).choose(state, logits)
    assert tokens == {0: int(logits[0].argmax()), 1: PAD}
    assert sorted(scores) == [0, 1]
    assert all(torch.equal(scores[row], logits[row] / 0.5) for row in scores)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_choosing_at_all_nodes_at_once_is_choosing_node_by_node(seed: int, sampled: bool) -> None:
    rng = random.Random(seed)
    noise = GumbelNoise(seed % 1000, VOCAB) if sampled else None
    scorer = NodeScorer(LogitsProcessorList([TemperatureLogitsWarper(1.5), TopKLogitsWarper(4)]), 2)
    decider = Decider(scorer, noise)
    rows = [[rng.randrange(1, 5) for _ in range(rng.randrange(3, 7))] for _ in range(2)]
    trees = [random_tree(rng, row[-1], [rng.randrange(VOCAB) for _ in range(6)]) for row in rows]
    logits = reading(Text(rows, in_step=False), trees)
    width = max(map(len, trees)) + 1
    padded = torch.full((2, width, VOCAB), float("nan"))
    for row, tree in enumerate(trees):
        for node in range(len(tree)):
            padded[row, node] = logits(row, node)
    padded = padded.nan_to_num(1.0)
    together = decider.choose_all(Text(rows, in_step=False), padded, trees)
    for row, tree in enumerate(trees):
        for node in range(len(tree)):
            at_node = Text([[*text, *tree.path_tokens(node)[1:]] for text in rows], in_step=False)
            tokens, _ = decider.choose(at_node, {row: logits(row, node)})
            assert together[row][node] == tokens[row]

    walked = Text([list(row) for row in rows], in_step=False)
    known = Text([list(row) for row in rows], in_step=False)
    by_node = walk_trees(walked, trees, logits, decider, [0, 1], in_step=False)
    at_once = walk_trees(known, trees, logits, decider, [0, 1], in_step=False, choices=together)
    assert at_once == by_node and known.emitted == walked.emitted


def test_tokens_that_are_known_are_not_chosen_again() -> None:
    state = Text([[1, 2]], in_step=False)
    trees = [TokenTree((2, 4, 3), (-1, 0, 1))]
    nobody: Decider = None  # type: ignore[assignment]
    assert walk_trees(state, trees, reading(state, trees), nobody, [0], in_step=False, choices=[[4, 3, 1]]) == [
        [0, 1, 2]
    ]
    assert state.emitted == [[4, 3, 1]]


class Reader(LogitsProcessor):
    """Keeps the texts that it is called with."""

    def __init__(self) -> None:
        self.texts: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.texts.append(input_ids.tolist())
        return scores


def test_processors_read_the_text_up_to_each_node_once_a_token() -> None:
    state = Text([[1, 2], [3, 4]], in_step=True)
    likely = plain(state, None, 3)
    trees = [TokenTree.chain([text[-1], *tokens[:2]]) for text, tokens in zip(state.rows, likely, strict=True)]
    reader = Reader()
    decider = Decider(NodeScorer(LogitsProcessorList([reader]), 2), None)
    walk_trees(state, trees, reading(state, trees), decider, [0, 1], in_step=True)
    assert reader.texts == [[[1, 2, *likely[0][:n]], [3, 4, *likely[1][:n]]] for n in range(3)]


def test_noise_can_overrule_the_scores_and_is_read_at_the_position_without_padding() -> None:
    noise = GumbelNoise(3, VOCAB)
    # Row 1 holds two tokens of padding: its next position is 4, not 6.
    state = Text([[1] * 6, [1] * 6], in_step=False)
    flat = {row: torch.zeros(VOCAB) for row in range(2)}
    tokens, scores = Decider(NodeScorer(LogitsProcessorList(), 2), noise).choose(state, flat)
    assert tokens == {0: int(noise.at(0, 6).argmax()), 1: int(noise.at(1, 4).argmax())}
    assert torch.equal(scores[0], flat[0])


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_sampling_from_no_law_fails_as_it_does_in_plain_decoding(bad: str) -> None:
    """An arg-max over NaN would choose a token without a word."""
    scores = torch.zeros(VOCAB)
    scores[2] = float(bad)
    if bad == "-inf":
        scores[:] = float(bad)
    good, tree = torch.zeros(VOCAB), TokenTree.chain([1, 2])
    scorer = NodeScorer(LogitsProcessorList(), 1)
    sampling = Decider(scorer, GumbelNoise(0, VOCAB))
    state = Text([[1]], in_step=False)
    with pytest.raises(RuntimeError, match="the best score of a token is"):
        sampling.choose(state, {0: scores})
    # Chosen at all nodes at once, only the walk that comes to such a node may complain.
    for nodes, bad_node in (([scores, good], 0), ([good, scores], 1)):
        (chosen,) = sampling.choose_all(state, torch.stack(nodes)[None], [tree])
        assert [token < 0 for token in chosen] == [node == bad_node for node in range(2)]
        path, text = [2 if bad_node else chosen[0], chosen[1]], Text([[1]], in_step=False)
        with pytest.raises(RuntimeError, match="the best score of a token is"):
            walk_trees(text, [tree], reading(text, [tree]), sampling, [0], in_step=False, choices=[path])
    text = Text([[1]], in_step=False)
    assert walk_trees(text, [tree], reading(text, [tree]), sampling, [0], in_step=False, choices=[[3, -1]]) == [[0]]
    # Greedy decoding takes what arg-max gives, as stock does.
    assert Decider(scorer, None).choose(state, {0: scores})[0] == {0: int(scores.argmax())}
    assert Decider(scorer, None).choose_all(state, scores[None, None], [tree]) == [[int(scores.argmax())]]


def test_a_single_possible_token_is_a_law() -> None:
    scores = torch.full((VOCAB,), float("-inf"))
    scores[3] = -1e30
    decider = Decider(NodeScorer(LogitsProcessorList(), 1), GumbelNoise(0, VOCAB))
    assert decider.choose(Text([[1]], in_step=False), {0: scores})[0] == {0: 3}


class Listening(Text):
    """Keeps what `emit` is given."""

    def emit(self, tokens: dict[int, int], scores: dict[int, Tensor], logits: dict[int, Tensor]) -> set[int]:
        self.given = scores, logits
        return super().emit(tokens, scores, logits)


def test_the_text_gets_raw_logits_and_scores_without_noise() -> None:
    state = Listening([[1, 2]], in_step=False)
    raw = torch.arange(VOCAB, dtype=torch.bfloat16)
    scorer = NodeScorer(LogitsProcessorList([TemperatureLogitsWarper(0.5)]), 1)
    decider = Decider(scorer, GumbelNoise(0, VOCAB))
    walk_trees(state, [TokenTree.root_only(2)], lambda row, node: raw, decider, [0], in_step=False)
    scores, logits = state.given
    assert torch.equal(scores[0], raw.float() / 0.5) and torch.equal(logits[0], raw)
