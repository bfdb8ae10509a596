"""Grammar-like processors, Whisper's timestamps: called as in plain decoding, or refused if the config says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    WhisperTimeStampLogitsProcessor,
)

from calls import BUSHES, GREEDY, SAMPLED, twice
from hf_treespec import TreeConfig, UnsupportedCallError
from tiny import WIDTH, assert_same_text, draft, prompt, reference, stock, treed, vocabulary

batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])
NEW = 16
EOS = [5, 6, 7, 9, 14, 23, 31, 40, 52]
SYNTHID = SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=3)


class Grammar(LogitsProcessor):
    """One automaton per row, moved on by the last token of each call; the automaton says what may follow.

    It cannot be asked twice about one place, nor about one that is not the next: it raises, as grammar libraries do.
    """

    def __init__(self) -> None:
        self.states: list[int] = []
        self.seen: Tensor | None = None
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.seen is None:
            self.states = [0] * len(input_ids)
        else:
            if input_ids.shape[1] != self.seen.shape[1] + 1 or not torch.equal(input_ids[:, :-1], self.seen):
                raise RuntimeError("the text was not extended by one token")
            for row, token in enumerate(input_ids[:, -1].tolist()):
                self.states[row] = (5 * self.states[row] + token + row) % 7
        self.seen = input_ids.clone()
        self.calls += 1
        vocabulary_V = torch.arange(scores.shape[1])
        wrong = torch.stack([(vocabulary_V + state) % 3 == 0 for state in self.states])
        return scores.masked_fill(wrong, -float("inf"))


def with_grammar() -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList([Grammar()])}


@batches
@samplings
@pytest.mark.parametrize("maker", ["random_tree", "half_right", "deep", "wide", "chain", "wrong_chain"])
def test_grammar_walks_with_the_text(maker: str, batch: int, sampling: dict[str, Any]) -> None:
    ids, mask = prompt("llama", batch)
    pair = twice(ids, mask, maker=maker, fresh=with_grammar, max_new_tokens=NEW, eos_token_id=EOS[3:6], **sampling)
    one, two = (extra["logits_processor"][0] for extra in (pair.plain, pair.tree))
    assert two.calls == one.calls == pair.actual.shape[1] - WIDTH
    assert two.states == one.states
    without = reference(stock("llama"), ids, mask, seed=3, max_new_tokens=NEW, eos_token_id=EOS[3:6], **sampling)
    assert not torch.equal(pair.actual, without), "the grammar must matter for this to test anything"
    if maker in ("half_right", "chain"):
        assert pair.stats.accepted_tokens > 0


@batches
@samplings
@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_drafts_do_not_ask_the_grammar(kind: str, batch: int, sampling: dict[str, Any]) -> None:
    ids, mask = prompt("llama", batch)
    mine, theirs = with_grammar(), with_grammar()
    expected = reference(stock("llama"), ids, mask, seed=3, max_new_tokens=NEW, **sampling, **mine)
    call = {"max_new_tokens": NEW, **sampling, **theirs}
    if kind == "model":
        call["assistant_model"] = draft("llama")
    actual = treed("llama").generate(ids, attention_mask=mask, tree_config=BUSHES, **call)
    assert_same_text(expected, actual)
    assert theirs["logits_processor"][0].calls == mine["logits_processor"][0].calls == NEW
    assert treed("llama").treespec_stats.drafted_nodes > 0


def test_grammar_gets_the_returned_sequences_as_rows() -> None:
    ids, mask = prompt("llama", 3)
    pair = twice(ids, mask, fresh=with_grammar, num_return_sequences=2, max_new_tokens=NEW, **SAMPLED)
    one, two = (extra["logits_processor"][0] for extra in (pair.plain, pair.tree))
    assert len(two.states) == 6 and two.states == one.states


def timestamps() -> dict[str, Any]:
    """Whisper's rules over the upper half of the vocabulary: pairs of timestamps that never fall."""
    config = GenerationConfig(eos_token_id=2, bos_token_id=1)
    config.no_timestamps_token_id = vocabulary("llama") // 2
    config.max_initial_timestamp_index = 9
    return {"logits_processor": LogitsProcessorList([WhisperTimeStampLogitsProcessor(config, begin_index=WIDTH)])}


@batches
@samplings
def test_whisper_timestamps_are_plain(batch: int, sampling: dict[str, Any]) -> None:
    ids, mask = prompt("llama", batch)
    pair = twice(ids, mask, fresh=timestamps, max_new_tokens=NEW, **sampling)
    first = vocabulary("llama") // 2 + 1
    stamps = [[t for t in row if t >= first] for row in pair.actual[:, WIDTH:].tolist()]
    assert all(row and row == sorted(row) for row in stamps)
    assert pair.stats.accepted_tokens > 0


# --- TreeConfig(on_stateful_processor="error") -----------------------------------------------------------------------

STATEFUL: dict[str, tuple[Any, str]] = {
    "grammar": (with_grammar, "Grammar"),
    "whisper": (timestamps, "WhisperTimeStampLogitsProcessor"),
    "synthid": (lambda: {"watermarking_config": SYNTHID}, "SynthIDTextWatermarkLogitsProcessor"),
    "prefix": (
        lambda: {"prefix_allowed_tokens_fn": lambda batch_id, ids: [3, 4]},
        "PrefixConstrainedLogitsProcessor",
    ),
}


@pytest.mark.parametrize("guidance", [{}, {"guidance_scale": 1.5}], ids=["", "guided"])
@batches
@pytest.mark.parametrize("name", list(STATEFUL))
def test_processors_that_may_have_a_state_are_refused_on_request(
    name: str, batch: int, guidance: dict[str, float]
) -> None:
    make, named = STATEFUL[name]
    ids, mask = prompt("llama", batch)
    model = treed("llama")
    forwards: list[int] = []
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    config = BUSHES.replace(on_stateful_processor="error")
    try:
        with pytest.raises(UnsupportedCallError, match=f"on_stateful_processor='error'.*{named}.*in_step"):
            model.generate(ids, attention_mask=mask, max_new_tokens=4, tree_config=config, **make(), **guidance)
    finally:
        hook.remove()
    assert forwards == []


@samplings
def test_pure_processors_pass_where_stateful_ones_are_refused(sampling: dict[str, Any]) -> None:
    ids, mask = prompt("llama", 3)
    config: TreeConfig = BUSHES.replace(on_stateful_processor="error")
    # Guidance has a state in plain decoding; with trees it is a second stream.
    call = {
        "guidance_scale": 1.5,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 5,
        "eos_token_id": EOS,
    }
    pair = twice(ids, mask, config=config, max_new_tokens=NEW, **call, **sampling)
    assert pair.stats.accepted_tokens > 0
