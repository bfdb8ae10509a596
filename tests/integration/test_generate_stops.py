"""Stop strings, criteria, clocks and streamers: asked and fed exactly as plain decoding asks and feeds them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from calls import CHAINS_OF_4, GREEDY, SAMPLED, distinct_prompt, twice
from letters import letters
from tiny import FAMILIES, WIDTH, prompt, reference, stock, vocabulary

families = pytest.mark.parametrize("family", FAMILIES)
batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])


# --- stop strings --------------------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("index", range(8))
def test_stop_string_that_straddles_two_tokens(family: str, index: int) -> None:
    # Chains of four of the true text: pairs (0, 1), (4, 5) and (5, 6) straddle two rounds, the others lie in a path.
    ids, mask, text = distinct_prompt(family, 10)
    tokenizer = letters(vocabulary(family))
    left, right = (tokenizer.convert_ids_to_tokens(int(text[0, WIDTH + n])) for n in (index, index + 1))
    if "<" in left + right:
        pytest.skip("a special token is no text")
    call = {"stop_strings": [left[-1] + right[0], "never!"], "tokenizer": tokenizer, "max_new_tokens": 17}
    pair = twice(ids, mask, family=family, maker="chain", config=CHAINS_OF_4, truth=text, **call)
    # The last token of the prompt counts: a stop string may straddle the prompt and the text, too.
    written = [tokenizer.decode(pair.actual[0, WIDTH - 1 : end]) for end in (None, -1)]
    assert left[-1] + right[0] in written[0] and left[-1] + right[0] not in written[1][1:]
    assert pair.actual.shape[1] <= WIDTH + index + 2


@families
@samplings
@pytest.mark.parametrize("eos", [None, [5, 6, 7, 9, 14]])
def test_stop_strings_of_a_batch(family: str, sampling: dict[str, Any], eos: list[int] | None) -> None:
    ids, mask = prompt(family, 3)
    tokenizer = letters(vocabulary(family))
    text = reference(stock(family), ids, mask, seed=3, max_new_tokens=17, **sampling)
    stops = [tokenizer.decode(row[WIDTH + n : WIDTH + n + 2]) for row, n in zip(text, (2, 8, 5), strict=True)]
    call = {"stop_strings": stops, "tokenizer": tokenizer, "max_new_tokens": 17, "eos_token_id": eos}
    # Without an eos id plain decoding goes on writing text into rows that have ended.
    pair = twice(ids, mask, family=family, maker="half_right", **call, **sampling)
    assert not torch.equal(pair.actual, text)


# --- criteria ------------------------------------------------------------------------------------------------------


class Recorder(StoppingCriteria):
    """Keeps what it was asked, and ends rows by `rule`."""

    def __init__(self, rule: Callable[[Tensor], Tensor], as_bool: bool = False) -> None:
        self.rule, self.as_bool = rule, as_bool
        self.asked: list[tuple[Tensor, tuple[Tensor, ...] | None]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        assert not kwargs
        self.asked.append((input_ids.clone(), None if scores is None else tuple(s.clone() for s in scores)))
        ended = self.rule(input_ids)
        return bool(ended.all()) if self.as_bool else ended


def assert_same_questions(one: Recorder, two: Recorder) -> None:
    assert len(one.asked) == len(two.asked)
    for (ids1, scores1), (ids2, scores2) in zip(one.asked, two.asked, strict=True):
        assert torch.equal(ids1, ids2) and ids1.dtype == ids2.dtype
        assert (scores1 is None) == (scores2 is None)
        if scores1 is not None and scores2 is not None:
            assert len(scores1) == len(scores2) == ids1.shape[1] - WIDTH
            torch.testing.assert_close(scores2, scores1, atol=1e-4, rtol=1e-4)


RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "never": lambda ids: torch.zeros(len(ids), dtype=torch.bool),
    "length": lambda ids: torch.full((len(ids),), ids.shape[1] >= WIDTH + 7),
    "content": lambda ids: ids[:, -1] % 6 == 0,
    "one_row": lambda ids: (torch.arange(len(ids)) == 0) & (ids.shape[1] >= WIDTH + 3),
}


@families
@batches
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("eos", [None, [5, 6, 7, 9, 14]], ids=["no_eos", "eos"])
def test_criterion_is_asked_once_a_token_in_order(family: str, batch: int, rule: str, eos: Any) -> None:
    ids, mask = prompt(family, batch)
    pair = twice(
        ids,
        mask,
        family=family,
        fresh=lambda: {"stopping_criteria": StoppingCriteriaList([Recorder(RULES[rule])])},
        max_new_tokens=14,
        eos_token_id=eos,
    )
    one, two = (extra["stopping_criteria"][0] for extra in (pair.plain, pair.tree))
    assert_same_questions(one, two)
    assert len(two.asked) == pair.actual.shape[1] - WIDTH
    assert len(pair.source.rounds) < len(two.asked), "a round must ask more than once for this to test anything"


@batches
@samplings
@pytest.mark.parametrize("as_bool", [False, True], ids=["tensor", "bool"])
def test_criterion_sees_the_scores_so_far(batch: int, sampling: dict[str, Any], as_bool: bool) -> None:
    ids, mask = prompt("qwen3", batch)
    pair = twice(
        ids,
        mask,
        family="qwen3",
        fresh=lambda: {"stopping_criteria": StoppingCriteriaList([Recorder(RULES["length"], as_bool)])},
        return_dict_in_generate=True,
        output_scores=True,
        max_new_tokens=14,
        **sampling,
    )
    one, two = (extra["stopping_criteria"][0] for extra in (pair.plain, pair.tree))
    assert one.asked[-1][1] is not None
    assert_same_questions(one, two)
    assert pair.actual.sequences.shape[1] == WIDTH + 7


def test_max_time_is_looked_at_after_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = prompt("llama", 1)
    # A clock that ticks once a look: the call ends at a token of its choice, in the middle of a path.
    for limit in (0.5, 1.5, 4.5, 5.5, 8.5):
        ticks = itertools.count()
        monkeypatch.setattr(
            "transformers.generation.stopping_criteria.time.time", lambda ticks=ticks: float(next(ticks))
        )
        pair = twice(ids, mask, maker="half_right", max_new_tokens=14, max_time=limit)
        assert 1 <= pair.actual.shape[1] - WIDTH == int(limit) + 1


# --- streamers -----------------------------------------------------------------------------------------------------


class Log(BaseStreamer, LogitsProcessor, StoppingCriteria):
    """Streamer, processor or criterion that writes down who was called, when and with what."""

    def __init__(self, name: str, events: list[tuple[str, Any]]) -> None:
        self.name, self.events = name, events

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu" and value.dtype == torch.int64
        self.events.append((f"{self.name}.put", value.tolist()))

    def end(self) -> None:
        self.events.append((f"{self.name}.end", None))


class LogProcessor(Log):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.events.append((self.name, input_ids.tolist()))
        return scores


class LogCriterion(Log):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.events.append((self.name, input_ids.tolist()))
        return torch.full((len(input_ids),), input_ids.shape[1] >= WIDTH + 9)


@families
@batches
@samplings
@pytest.mark.parametrize("eos", [None, [5, 6, 7, 9, 14]], ids=["no_eos", "eos"])
def test_streamer_gets_what_plain_decoding_puts(family: str, batch: int, sampling: dict[str, Any], eos: Any) -> None:
    ids, mask = prompt(family, batch)
    call = {"max_new_tokens": 12, "eos_token_id": eos, **sampling}
    pair = twice(ids, mask, family=family, fresh=lambda: {"streamer": Log("streamer", [])}, **call)
    one, two = (extra["streamer"].events for extra in (pair.plain, pair.tree))
    assert two == one
    assert [name for name, _ in two].count("streamer.end") == 1 and two[-1][0] == "streamer.end"
    # More tokens than rounds, or nothing would show that tokens come one by one.
    assert eos is not None or len(pair.source.rounds) < pair.actual.shape[1] - WIDTH - 1


@families
@batches
def test_processor_streamer_and_criterion_are_called_in_plain_order(family: str, batch: int) -> None:
    def fresh() -> dict[str, Any]:
        events: list[tuple[str, Any]] = []
        return {
            "streamer": Log("streamer", events),
            "logits_processor": [LogProcessor("processor", events)],
            "stopping_criteria": [LogCriterion("criterion", events)],
        }

    ids, mask = prompt(family, batch)
    pair = twice(ids, mask, family=family, fresh=fresh, max_new_tokens=14)
    assert pair.tree["streamer"].events == pair.plain["streamer"].events
    assert pair.actual.shape[1] == WIDTH + 9


@pytest.mark.parametrize("iterator", [False, True], ids=["TextStreamer", "TextIteratorStreamer"])
def test_text_streamers(iterator: bool, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = letters(vocabulary("llama"))
    ids, mask = prompt("llama", 1)

    def fresh() -> dict[str, Any]:
        if iterator:
            return {"streamer": TextIteratorStreamer(tokenizer, skip_prompt=True)}
        return {"streamer": TextStreamer(tokenizer, skip_prompt=True)}

    pair = twice(ids, mask, fresh=fresh, max_new_tokens=14)
    written = tokenizer.decode(pair.actual[0, WIDTH:])
    if iterator:
        assert "".join(pair.tree["streamer"]) == "".join(pair.plain["streamer"]) == written
    else:
        assert capsys.readouterr().out == f"{written}\n" * 2
