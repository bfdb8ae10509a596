"""Children by rank and by draw, in ids of the target, whatever the ids of the draft are."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor, TemperatureLogitsWarper

from hf_treespec.draft import ChildSampler, Ranker
from hf_treespec.rules import rule_named
from hf_treespec.verify import GumbelNoise, RoundNoise

IDS = torch.tensor([7, 2, 11, 5])
LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0]])


def test_a_reduced_vocabulary_is_named_by_the_target() -> None:
    ranker = Ranker(13, ids_V=IDS)
    (best,) = ranker.rank(LOGITS, [None], 3)
    assert [one.token for one in best] == [2, 5, 11]
    assert torch.tensor([one.log_confidence for one in best]).allclose(LOGITS.log_softmax(-1)[0, [1, 3, 2]])
    # The noise of id 7 outweighs all.
    noise = torch.zeros(13)
    noise[7], noise[3] = 9.0, 50.0
    (best,) = ranker.rank(LOGITS, [noise], 4)
    assert [one.token for one in best] == [7, 2, 5, 11]


def test_processors_name_ids_of_the_target() -> None:
    shaping = LogitsProcessorList([SuppressTokensLogitsProcessor([2, 0]), TemperatureLogitsWarper(0.5)])
    (best,) = Ranker(13, processors=shaping, device=torch.device("cpu"), ids_V=IDS).rank(LOGITS, [None], 4)
    assert [one.token for one in best] == [5, 11, 7]
    expected = torch.tensor([4.0, 2.0, 0.0]).log_softmax(-1)
    assert torch.tensor([one.log_confidence for one in best]).allclose(expected)


def test_laws_are_over_all_ids_and_zero_where_the_draft_knows_none() -> None:
    sampler = ChildSampler(rule_named("rrs"), 1, RoundNoise(GumbelNoise(3, 13)))
    ranker = Ranker(13, sampler=sampler, ids_V=IDS)
    (drawn,) = ranker.sample(0, 4, [0], [4], LOGITS) or [[]]
    assert {one.token for one in drawn} <= set(IDS.tolist()) and all(one.sampled for one in drawn)
    laws = ranker.laws(1)
    assert laws is not None
    expected = torch.zeros(13).index_copy_(0, IDS, LOGITS[0].softmax(-1))
    assert laws.laws_RV[0].allclose(expected)


def test_a_law_of_more_ids_than_the_targets_is_not_cut_in_silence() -> None:
    sampler = ChildSampler(rule_named("rrs"), 1, RoundNoise(GumbelNoise(3, 13)))
    with pytest.raises(AssertionError, match="ids beyond the target's"):
        Ranker(LOGITS.shape[1] - 1, sampler=sampler).sample(0, 4, [0], [1], LOGITS)
