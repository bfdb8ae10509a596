"""The growing text and the sorting of stopping criteria."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
)

from hf_treespec.engine.state import GrowingText, StopRules

PAD, EOS = 90, 91


class EndsOn(StoppingCriteria):
    """A row ends when the sum of its last two ids is `total`; keeps what it was called with."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.calls: list[tuple[list[list[int]], Any]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls.append((input_ids.tolist(), scores))
        return input_ids[:, -2:].sum(-1) == self.total


class NamesEos(EndsOn):
    """A criterion of someone else's that plain decoding takes for an end-of-text criterion."""

    eos_token_id = EOS


class LaterLength(MaxLengthCriteria):
    """A subclass may judge by anything."""


def rules_of(*criteria: Any) -> StopRules:
    return StopRules.of(criteria)


def text_of(
    rules: StopRules, prompt: list[list[int]] | None = None, *, in_step: bool = False, **options: Any
) -> GrowingText:
    rows = [[1, 2, 3], [0, 4, 5]] if prompt is None else prompt
    real = [[token for token in row if token] for row in rows]
    defaults: dict[str, Any] = {"real_tokens": [len(row) for row in real], "prompt_tokens": real, "pad": PAD}
    return GrowingText(torch.tensor(rows), rules=rules, in_step=in_step, **{**defaults, **options})


def say(text: GrowingText, *tokens: int | None, size: int = 1) -> set[int]:
    """Emit one token per row (None: the row takes no part), with scores and logits that name row and token."""
    given = {row: token for row, token in enumerate(tokens) if token is not None}
    scores = {row: torch.tensor([float(row), float(token)]) for row, token in given.items()}
    logits = {row: -x for row, x in scores.items()}
    return text.emit(given, scores, logits)


# -- rules --


def test_criteria_are_sorted_by_their_exact_class() -> None:
    other, clock, later = EndsOn(7), MaxTimeCriteria(1e9), LaterLength(5)
    eos = [EosTokenCriteria([EOS, 8]), EosTokenCriteria(9)]
    rules = rules_of(MaxLengthCriteria(30), other, eos[0], MaxLengthCriteria(20), clock, eos[1], later)
    assert rules == StopRules(
        max_length=20, eos=frozenset({EOS, 8, 9}), has_eos=True, others=(other, clock, later), rowwise=False
    )


def test_no_criteria_mean_no_limit() -> None:
    assert rules_of() == StopRules(max_length=None, eos=frozenset(), has_eos=False, others=(), rowwise=True)


@pytest.mark.parametrize(
    ("criterion", "rowwise", "has_eos"),
    [
        (MaxTimeCriteria(1e9), True, False),
        (EndsOn(1), False, False),
        (NamesEos(1), False, True),
        (EosTokenCriteria(3), True, True),
        (type("Mine", (MaxTimeCriteria,), {})(1e9), False, False),
    ],
)
def test_who_judges_rows_alone_and_who_names_an_eos(criterion: Any, rowwise: bool, has_eos: bool) -> None:
    rules = rules_of(MaxLengthCriteria(9), criterion)
    assert (rules.rowwise, rules.has_eos) == (rowwise, has_eos)


# -- text --


def test_lengths_positions_and_rows_count_padding_where_they_should() -> None:
    text = text_of(rules_of(), real_tokens=[10, 2])  # a passed-in cache holds seven more tokens of row 0
    say(text, 6, None)
    say(text, 7, 8)
    assert [text.length(row) for row in (0, 1)] == [5, 4]
    assert [text.position(row) for row in (0, 1)] == [12, 3]
    assert [row.tokens for row in text.draft_rows] == [[1, 2, 3, 6, 7], [4, 5, 8]]
    assert [row.offset for row in text.draft_rows] == [7, 0]
    assert [row.index for row in text.draft_rows] == [0, 1]
    assert text.new_lengths == [2, 1]


@pytest.mark.parametrize("ask_every", [1, 7, 400])
def test_text_of_ragged_rows_at_any_length_while_it_grows(ask_every: int) -> None:
    text = text_of(rules_of())
    rows = [[1, 2, 3], [0, 4, 5]]
    for step in range(400):
        tokens = [step, None if step % 3 else 1000 + step]
        say(text, *tokens)
        for row, token in zip(rows, tokens, strict=True):
            row.extend([] if token is None else [token])
        if step % ask_every == 0 or step == 399:
            for length in (1, 3, len(rows[1]), len(rows[0]) - 1, len(rows[0])):
                found = text.text(length)
                assert found.shape == (2, length) and found.dtype == torch.int64
                for row, mine in enumerate(rows):
                    known = min(length, len(mine))
                    assert found[row, :known].tolist() == mine[:known]
                    assert found[row, known:].tolist() == [PAD] * (length - known)
    assert text.sequences().tolist() == [rows[0], rows[1] + [PAD] * (len(rows[0]) - len(rows[1]))]


def test_a_growing_text_moves_a_logarithmic_number_of_times() -> None:
    text = text_of(rules_of(), [[1, 2, 3]])
    sizes = []
    for step in range(2000):
        say(text, step)
        # One row is a view of the buffer, however long it is asked for.
        sizes.append(text.text(3 + step + 1).untyped_storage().nbytes() // 8)
    assert len(set(sizes)) <= 7 and sizes == sorted(sizes) and max(sizes) <= 2 * 2003 + 64


def test_sequences_are_the_callers_own_and_the_prompt_is_never_written_to() -> None:
    prompt = torch.tensor([[1, 2, 3]])
    text = GrowingText(prompt, real_tokens=[3], prompt_tokens=[[1, 2, 3]], rules=rules_of(), pad=PAD, in_step=True)
    say(text, 4)
    sequences = text.sequences()
    sequences.fill_(77)
    assert prompt.tolist() == [[1, 2, 3]] and text.sequences().tolist() == [[1, 2, 3, 4]]


def test_the_draft_does_not_share_the_prompt_list() -> None:
    known = [[1, 2, 3]]
    text = text_of(rules_of(), known, prompt_tokens=known, real_tokens=[3])
    say(text, 4)
    assert known == [[1, 2, 3]]


def test_without_a_pad_id_short_rows_are_filled_with_zero() -> None:
    text = text_of(rules_of(), pad=None)
    say(text, 6, None)
    assert text.sequences().tolist() == [[1, 2, 3, 6], [0, 4, 5, 0]]


def test_room_is_what_the_length_limit_leaves() -> None:
    text = text_of(rules_of(MaxLengthCriteria(6)))
    say(text, 6, None)
    assert [text.room(row) for row in (0, 1)] == [2, 3]
    assert text_of(rules_of()).room(0) is None


# -- stops --


def test_rows_apart_end_by_eos_and_by_length_and_then_want_padding() -> None:
    text = text_of(rules_of(MaxLengthCriteria(5), EosTokenCriteria([EOS, 8])))
    assert [text.forced_token(row) for row in (0, 1)] == [None, None]
    assert say(text, 6, 8) == {0}
    assert text.finished == [False, True]
    assert [text.forced_token(row) for row in (0, 1)] == [None, PAD]
    assert say(text, 7, None) == set()
    assert text.finished == [True, True]
    assert say(text, None, PAD) == {1}  # padding goes on for as long as it is wanted


def test_without_an_eos_criterion_nothing_is_forced() -> None:
    text = text_of(rules_of(MaxLengthCriteria(4)))
    assert say(text, 6, None) == set()
    assert text.finished == [True, False] and text.forced_token(0) is None


def test_rows_in_step_go_on_until_all_have_ended() -> None:
    text = text_of(rules_of(MaxLengthCriteria(6), EosTokenCriteria(EOS)), in_step=True)
    assert say(text, EOS, 4) == {0, 1}
    assert text.finished == [True, False]
    assert say(text, PAD, EOS) == set()
    assert text.finished == [True, True]


def test_criteria_in_step_see_the_whole_text_and_the_steps_so_far_once_a_token() -> None:
    first, second = EndsOn(9), EndsOn(13)
    text = text_of(rules_of(first, second), in_step=True, keep_scores=True)
    assert say(text, 6, 5) == {0, 1}  # 3 + 6: row 0 ends by the first
    assert say(text, 1, 8) == set()  # 5 + 8: row 1 ends by the second
    assert text.finished == [True, True]
    for criterion in (first, second):
        (text_1, steps_1), (text_2, steps_2) = criterion.calls
        assert text_1 == [[1, 2, 3, 6], [0, 4, 5, 5]] and text_2 == [[1, 2, 3, 6, 1], [0, 4, 5, 5, 8]]
        assert [step.tolist() for step in steps_1] == [[[0, 6], [1, 5]]]
        assert [step.tolist() for step in steps_2] == [[[0, 6], [1, 5]], [[0, 1], [1, 8]]]


def test_criteria_in_step_get_no_scores_that_are_not_kept() -> None:
    criterion = EndsOn(0)
    say(text_of(rules_of(criterion), in_step=True), 6, 5)
    assert criterion.calls[0][1] is None


class Says(StoppingCriteria):
    def __init__(self, verdict: bool) -> None:
        self.verdict = verdict

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:  # type: ignore[override]
        return self.verdict


@pytest.mark.parametrize("verdict", [False, True])
def test_a_verdict_that_is_one_bool_is_for_every_row(verdict: bool) -> None:
    text = text_of(rules_of(Says(verdict)), in_step=True)
    say(text, 6, 5)
    assert text.finished == [verdict, verdict]


def test_criteria_of_rows_apart_see_one_row_at_its_own_length() -> None:
    criterion = EndsOn(9)
    rules = StopRules(max_length=None, eos=frozenset(), has_eos=True, others=(criterion,), rowwise=True)
    text = text_of(rules)
    assert say(text, 4, None) == {0}
    assert say(text, 5, None) == set()  # 4 + 5: row 0 ends, two tokens ahead of row 1
    assert say(text, None, 6) == {1}
    assert say(text, 9, 3) == {0}  # row 0 had ended: it is not asked again, and what follows is padding
    assert [ids for ids, _ in criterion.calls] == [
        [[1, 2, 3, 4]], [[1, 2, 3, 4, 5]], [[0, 4, 5, 6]], [[0, 4, 5, 6, 3]],
    ]  # fmt: skip


def test_every_criterion_is_asked_even_when_one_has_ended_the_row() -> None:
    criteria = [EndsOn(9), EndsOn(1)]
    rules = StopRules(max_length=None, eos=frozenset(), has_eos=True, others=tuple(criteria), rowwise=True)
    say(text_of(rules), 6, None)
    assert [len(criterion.calls) for criterion in criteria] == [1, 1]


# -- outputs --


class Streamer:
    def __init__(self) -> None:
        self.put_so_far: list[list[int]] = []

    def put(self, value: Tensor) -> None:
        self.put_so_far.append(value.tolist())

    def end(self) -> None:
        raise AssertionError("the text does not end the stream")


def test_the_streamer_gets_one_token_per_row_and_step() -> None:
    streamer = Streamer()
    text = text_of(rules_of(), in_step=True, streamer=streamer)
    say(text, 6, 5)
    say(text, 7, 4)
    assert streamer.put_so_far == [[6, 5], [7, 4]]


def test_steps_are_stacked_over_rows_and_are_not_made_unless_kept() -> None:
    text = text_of(rules_of(), keep_scores=True, keep_logits=True)
    say(text, 6, None)
    say(text, 7, 5)
    say(text, None, 4)
    scores, logits = text.steps("scores"), text.steps("logits")
    assert scores is not None and logits is not None
    assert [step.tolist() for step in scores] == [[[0, 6], [1, 5]], [[0, 7], [1, 4]]]
    assert [step.tolist() for step in logits] == [[[0, -6], [-1, -5]], [[0, -7], [-1, -4]]]
    none = text_of(rules_of())
    say(none, 6, 5)
    assert none.steps("scores") is None and none.steps("logits") is None


def test_kept_logits_are_float32_copies() -> None:
    text = text_of(rules_of(), [[1, 2]], keep_logits=True)
    raw = torch.tensor([1.0, 2.0], dtype=torch.float64)
    text.emit({0: 3}, {0: raw}, {0: raw})
    raw.zero_()
    steps = text.steps("logits")
    assert steps is not None and steps[0].dtype == torch.float32 and steps[0].tolist() == [[1, 2]]
