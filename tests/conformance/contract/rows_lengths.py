"""Table 1.2: lengths and stops."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

from conformance.contract.core import TREE, Row, Side
from conformance.contract.observe import WANTED, Asked, everything, greedy, section, text, token, whole
from letters import letters
from tiny import WIDTH

MANY_ENDS = [5, 6, 7, 9, 14, 23, 31, 40, 52]


def budgets(side: Side) -> Any:
    return [side.generate(helper="twin", max_new_tokens=new) for new in range(1, TREE.max_depth + 3)]


def default_length(side: Side) -> Any:
    return side.generate(max_new_tokens=None)


def end_at(*indices: int) -> Callable[[Side], Any]:
    """The greedy text ends at its n-th token: as the target's own draft each is deep in a path."""

    def call(side: Side) -> Any:
        outs = []
        for index in indices:
            call = {**WANTED, "eos_token_id": token(index)}
            outs.append(whole(side.generate(helper="twin", **call), call))
        return outs

    return call


def eos(value: Any) -> Callable[[Side], Any]:
    def call(side: Side) -> Any:
        found = value() if callable(value) else value
        return side.generate(helper="twin", eos_token_id=found)

    return call


def stop_string(*indices: int, batch: int = 1, helper: str = "twin") -> Callable[[Side], Any]:
    """Two letters that straddle tokens n and n + 1 of the text."""

    def call(side: Side) -> Any:
        tokenizer, rows = letters(97), greedy("llama", batch)
        outs = []
        for index in indices:
            stops = []
            for row in rows:
                left, right = tokenizer.convert_ids_to_tokens(row[WIDTH + index : WIDTH + index + 2].tolist())
                stops.append(left[-1] + right[0])
            outs.append(side.generate(batch=batch, helper=helper, stop_strings=stops, tokenizer=tokenizer))
        return outs

    return call


def at_length(new: int) -> Callable[[Tensor], Tensor]:
    return lambda ids: torch.full((len(ids),), ids.shape[1] >= WIDTH + new)


def criterion(*stops: int, batch: int = 1, questions: bool = False, **call: Any) -> Callable[[Side], Any]:
    """Criteria that end the text at these lengths, in one call each."""

    def run(side: Side) -> Any:
        outs = []
        for new in stops:
            asked = Asked(at_length(new))
            criteria = StoppingCriteriaList([asked])
            out = side.generate(helper="twin", batch=batch, stopping_criteria=criteria, **call)
            ids = out if isinstance(out, Tensor) else out.sequences
            outs.append((ids, asked.asked if questions else None))
        return outs

    return run


def plain_function(side: Side) -> Any:
    def stop(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(ids),), ids.shape[1] >= WIDTH + 6)

    return side.generate(helper="twin", stopping_criteria=StoppingCriteriaList([stop]))


def replaced(side: Side) -> Any:
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=WIDTH + 5)])
    return side.generate(helper="twin", stopping_criteria=criteria)


def clock(side: Side) -> Any:
    outs = []
    for limit in (0.5, 1.5, 5.5):
        ticks = itertools.count()
        with mock.patch("transformers.generation.stopping_criteria.time.time", lambda ticks=ticks: float(next(ticks))):
            outs.append(side.generate(helper="twin", max_time=limit))
    return outs


def row_without_eos(side: Side) -> Any:
    asked = Asked(lambda ids: (torch.arange(len(ids)) == 0) & (ids.shape[1] >= WIDTH + 3))
    return side.generate(batch=3, helper="twin", stopping_criteria=StoppingCriteriaList([asked]))


def forced_bos(side: Side) -> Any:
    one = torch.tensor([[5]])
    return side.generate(one, torch.ones_like(one), forced_bos_token_id=17)


ROWS = section(
    "1.2",
    ("max_new_tokens from 1 to depth + 2", budgets),
    ("max_length", everything(max_length=WIDTH + 9, helper="twin")),
    ("no length: the default of 20 new tokens", default_length),
    ("min_length", text(max_length=WIDTH + 14, min_length=WIDTH + 9, eos_token_id=list(range(5, 60)))),
    ("min_new_tokens", text(min_new_tokens=9, eos_token_id=list(range(5, 60)))),
    ("eos_token_id: int", eos(lambda: token(6))),
    ("eos_token_id: list", eos(lambda: [token(8), token(6)])),
    ("eos_token_id: tensor", eos(lambda: torch.tensor([token(6)]))),
    ("eos_token_id=-1", eos(-1)),
    ("eos_token_id=None", eos(None)),
    (
        "eos at the root, inside, at the leaf and as the bonus token",
        end_at(0, 1, 2, 4, 5, 6),
        "text, scores, logits and cache",
    ),
    Row("1.2", "stop_strings that end in the middle of a path", stop_string(1, 2, 6), also="0.3 loud"),
    ("stop_strings that straddle two rounds", stop_string(0, 4, 5, 8)),
    ("stop_strings with prompt lookup", stop_string(2, 7, helper="lookup")),
    ("stop_strings of a batch", stop_string(3, batch=3)),
    Row("1.2", "a custom criterion that is met inside a block", criterion(1, 3, 4, 6, 8), also="0.3d"),
    ("a custom criterion that is a function", plain_function),
    ("what a custom criterion is asked: once a token, in order", criterion(9, questions=True)),
    ("the scores that a custom criterion is given", criterion(9, questions=True, **WANTED)),
    ("a custom criterion of a batch", criterion(6, batch=3, questions=True)),
    ("a criterion of a built-in class replaces it", replaced),
    ("max_time, by a clock that ticks once a look", clock),
    ("rows that end at different tokens, padded", everything(batch=3, eos_token_id=MANY_ENDS)),
    ("a row ended by a criterion, without an eos id: no padding", row_without_eos),
    ("forced_eos_token_id", text(forced_eos_token_id=9)),
    ("exponential_decay_length_penalty", text(exponential_decay_length_penalty=(3, 1.6), eos_token_id=[1, 68])),
    ("begin_suppress_tokens", lambda side: side.generate(begin_suppress_tokens=[token(0)])),
    ("forced_bos_token_id", forced_bos),
)
