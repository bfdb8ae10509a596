"""Node scores: what processors are called with, and that neither they nor the caller can see each other's tensors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as lp

from hf_treespec.verify import NodeScorer, are_length_free, are_pure

VOCAB = 12


class Buffer:
    """`text` of rows of unequal length, filled up with zeros."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows

    def text(self, length: int) -> Tensor:
        return torch.tensor([(row + [0] * length)[:length] for row in self.rows])


class Watcher(LogitsProcessor):
    """Writes in place, as processors may, and remembers its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append((input_ids.clone(), scores.clone()))
        scores[:, input_ids[0, -1]] = -7.0
        return scores


def logits_of(batch: int, dtype: torch.dtype = torch.float32) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    return {row: torch.randn(VOCAB, generator=generator).to(dtype) for row in range(batch)}


PROCESSORS: dict[str, list[Any]] = {
    "none": [],
    "length free": [lp.TemperatureLogitsWarper(0.7), lp.TopKLogitsWarper(5)],
    "any": [Watcher()],
}


@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scores_are_float32_copies_and_the_logits_stay(kind: str, dtype: torch.dtype) -> None:
    logits = logits_of(2, dtype)
    before = {row: x.clone() for row, x in logits.items()}
    scorer = NodeScorer(LogitsProcessorList(PROCESSORS[kind]), 2)
    scores = scorer.scores(logits, {0: 3, 1: 3}, Buffer([[1, 2, 3], [4, 5, 3]]))
    assert sorted(scores) == [0, 1]
    for row, row_scores in scores.items():
        assert row_scores.dtype == torch.float32
        row_scores.fill_(99.0)
        assert torch.equal(logits[row], before[row])


def test_plain_scores_are_the_logits_rounded_once() -> None:
    logits = logits_of(2, torch.bfloat16)
    scores = NodeScorer(LogitsProcessorList(), 2).scores(logits, {0: 1, 1: 1}, Buffer([[1], [2]]))
    assert all(torch.equal(scores[row], logits[row].float()) for row in logits)


@pytest.mark.parametrize("kind", ["none", "length free"])
def test_flat_scores_leave_the_logits_alone(kind: str) -> None:
    logits = torch.stack(list(logits_of(3).values()))
    before = logits.clone()
    flat = NodeScorer(LogitsProcessorList(PROCESSORS[kind]), 2).flat_scores(logits, Buffer([[1, 2], [3, 4]]))
    flat.fill_(99.0)
    assert torch.equal(logits, before)
    double = NodeScorer(LogitsProcessorList(PROCESSORS[kind]), 2).flat_scores(logits.double(), Buffer([[1], [3]]))
    assert double.dtype == torch.float32


def test_a_processor_sees_the_whole_batch_with_the_prefix_of_each_length() -> None:
    rows = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 2, 1], [3, 3, 3, 3, 2]]
    watcher = Watcher()
    logits = logits_of(4)
    scorer = NodeScorer(LogitsProcessorList([watcher]), 4)
    asked = {row: logits[row] for row in (0, 1, 2)}
    scores = scorer.scores(asked, {0: 3, 1: 5, 2: 3}, Buffer(rows))
    assert [ids.shape for ids, _ in watcher.calls] == [(4, 3), (4, 5)]
    for length, (ids, given) in zip((3, 5), watcher.calls, strict=True):
        assert given.shape == (4, VOCAB)
        for row in asked:
            if len(rows[row]) == length:
                assert ids[row].tolist() == rows[row]
                assert torch.equal(given[row], logits[row])
    # The one token that the processor pushed down is the last of row 0's text at that length.
    for row, token in ((0, 3), (1, (rows[0] + [0, 0])[4]), (2, 3)):
        assert scores[row][token] == -7.0
        assert (scores[row] == logits[row]).sum() == VOCAB - 1


def test_a_row_that_was_not_asked_for_gets_no_scores_and_lends_finite_logits() -> None:
    watcher = Watcher()
    logits = logits_of(3)
    scores = NodeScorer(LogitsProcessorList([watcher]), 3).scores({1: logits[1]}, {1: 2}, Buffer([[1], [2, 3], [4]]))
    assert list(scores) == [1]
    ids, given = watcher.calls[0]
    assert ids.shape == (3, 2) and ids[1].tolist() == [2, 3]
    assert torch.equal(given, logits[1].expand(3, VOCAB))


class Nothing(LogitsProcessor):
    """Of no known class, so the list that holds it takes the general way."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


FREE: list[list[Any]] = [
    [lp.TemperatureLogitsWarper(0.6), lp.TopPLogitsWarper(0.8)],
    [lp.MinPLogitsWarper(0.1), lp.LogitNormalization()],
    [lp.TypicalLogitsWarper(0.7), lp.EpsilonLogitsWarper(0.02), lp.EtaLogitsWarper(0.05)],
    [lp.SuppressTokensLogitsProcessor([3, 5]), lp.InfNanRemoveLogitsProcessor(), lp.TopKLogitsWarper(4)],
    [lp.TopHLogitsWarper(0.5)],
]


@pytest.mark.parametrize("processors", FREE, ids=lambda ps: "-".join(type(p).__name__ for p in ps))
def test_the_length_free_way_equals_the_general_one(processors: list[Any]) -> None:
    logits = logits_of(4)
    lengths = dict.fromkeys(logits, 2) | {2: 3}
    buffer = Buffer([[1, 2], [3, 4], [5, 6, 7], [8, 9]])
    fast = NodeScorer(LogitsProcessorList(processors), 4)
    slow = NodeScorer(LogitsProcessorList([*processors, Nothing()]), 4)
    wanted = slow.scores(logits, lengths, buffer)
    found = fast.scores(logits, lengths, buffer)
    flat = fast.flat_scores(torch.stack(list(logits.values())), buffer)
    for row in logits:
        assert not torch.equal(wanted[row], logits[row])
        assert torch.equal(found[row], wanted[row]) and torch.equal(flat[row], wanted[row])


def test_the_lists_hold_what_they_say() -> None:
    """Each processor that is called length-free or pure, run on changed text, repeatedly, and on a row alone."""
    pure: dict[str, Any] = {
        "RepetitionPenaltyLogitsProcessor": lp.RepetitionPenaltyLogitsProcessor(1.3),
        "EncoderRepetitionPenaltyLogitsProcessor": lp.EncoderRepetitionPenaltyLogitsProcessor(
            1.3, torch.tensor([[2]])
        ),
        "NoRepeatNGramLogitsProcessor": lp.NoRepeatNGramLogitsProcessor(2),
        "EncoderNoRepeatNGramLogitsProcessor": lp.EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor([[5, 1, 5, 2]])),
        "SequenceBiasLogitsProcessor": lp.SequenceBiasLogitsProcessor({(5, 1): -3.0, (2,): 1.0}),
        "NoBadWordsLogitsProcessor": lp.NoBadWordsLogitsProcessor([[5, 1], [7]], eos_token_id=11),
        "MinLengthLogitsProcessor": lp.MinLengthLogitsProcessor(4, 2),
        "MinNewTokensLengthLogitsProcessor": lp.MinNewTokensLengthLogitsProcessor(1, 3, 2),
        "ForcedBOSTokenLogitsProcessor": lp.ForcedBOSTokenLogitsProcessor(4),
        "ForcedEOSTokenLogitsProcessor": lp.ForcedEOSTokenLogitsProcessor(4, 3),
        "ExponentialDecayLengthPenalty": lp.ExponentialDecayLengthPenalty((1, 1.2), 3, 1),
        "SuppressTokensAtBeginLogitsProcessor": lp.SuppressTokensAtBeginLogitsProcessor([1, 2], 3),
    }
    free = {type(p).__name__: p for group in FREE for p in group}
    rng = random.Random(0)
    for name, processor in {**pure, **free}.items():
        assert are_pure([processor]) and are_length_free([processor]) == (name in free), name
        for length in (1, 3, 5):
            ids = torch.tensor([[rng.choice((1, 2, 5)) for _ in range(length)]])
            logits = torch.randn(1, VOCAB)
            once = processor(ids, logits.clone())
            processor(torch.tensor([[2, 5, 1, 5, 5, 1]]), torch.randn(1, VOCAB))
            assert torch.equal(processor(ids, logits.clone()), once), name
            if name in free:
                assert torch.equal(processor(ids[:, :1] * 0, logits.clone()), once), name


@pytest.mark.parametrize(
    "stateful",
    [
        Nothing(),
        lp.PrefixConstrainedLogitsProcessor(lambda batch, ids: [1], 1),
        lp.LogitsProcessor(),
        type("Mine", (lp.TemperatureLogitsWarper,), {})(0.5),
    ],
)
def test_what_is_not_known_is_neither(stateful: Any) -> None:
    known = lp.TemperatureLogitsWarper(0.5)
    assert are_length_free([known]) and are_pure([known])
    assert not are_length_free([known, stateful]) and not are_pure([stateful, known])
