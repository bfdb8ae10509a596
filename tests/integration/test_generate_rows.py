"""Rows of a batch: each what it is alone, and padded as plain decoding pads; criteria of every class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from calls import BUSHES, CHAINS_OF_4, GREEDY, SAMPLED, distinct_prompt, twice
from hf_treespec import TreeConfig
from letters import letters
from tiny import FAMILIES, WIDTH, assert_same_text, draft, prompt, reference, stock, treed, vocabulary

families = pytest.mark.parametrize("family", FAMILIES)
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])
OFF = TreeConfig(fallback="off", seed=3)
ENDS = [5, 6, 7, 9, 14, 23, 31, 40, 52]
NEW = 18


def tree(family: str, ids: Tensor, mask: Tensor, **call: Any) -> Tensor:
    call = {"max_new_tokens": NEW, "do_sample": False, "tree_config": OFF, **call}
    return treed(family).generate(ids, attention_mask=mask, assistant_model=draft(family), **call)


def padded(row: Tensor, width: int, pad: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, width - len(row)), value=pad)


# --- independence --------------------------------------------------------------------------------------------------


@families
@samplings
@pytest.mark.parametrize("eos", [None, ENDS], ids=["no_eos", "eos"])
def test_row_is_what_it_is_alone(family: str, sampling: dict[str, Any], eos: Any) -> None:
    ids, mask = prompt(family, 3)
    together = tree(family, ids, mask, eos_token_id=eos, **sampling)
    for row in range(3):
        alone = tree(family, ids[row : row + 1], mask[row : row + 1], eos_token_id=eos, **sampling)[0]
        assert_same_text(padded(alone, together.shape[1], 0)[None], together[row : row + 1])
        # Without its padding, too: a row is its text, not its place in a rectangle.
        bare = ids[row][mask[row].bool()][None]
        short = tree(family, bare, torch.ones_like(bare), eos_token_id=eos, **sampling)[0, bare.shape[1] :]
        assert_same_text(padded(short, together.shape[1] - WIDTH, 0)[None], together[row : row + 1, WIDTH:], width=0)


@families
@samplings
def test_rows_may_change_places(family: str, sampling: dict[str, Any]) -> None:
    ids, mask = prompt(family, 3)
    straight = tree(family, ids, mask, eos_token_id=ENDS, **sampling)
    order = torch.tensor([2, 0, 1])
    assert_same_text(straight[order], tree(family, ids[order], mask[order], eos_token_id=ENDS, **sampling))


# --- padding of ended rows -----------------------------------------------------------------------------------------


@families
@samplings
@pytest.mark.parametrize("pad", [0, 33])
def test_ended_rows_are_padded(family: str, sampling: dict[str, Any], pad: int) -> None:
    ids, mask = prompt(family, 3)
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    pair = twice(
        ids, mask, family=family, max_new_tokens=NEW, eos_token_id=ENDS, pad_token_id=pad, **wanted, **sampling
    )
    text = pair.actual.sequences[:, WIDTH:]
    ends = torch.isin(text, torch.tensor(ENDS)).long()
    behind = ends.cumsum(1) - ends > 0
    assert bool(behind.any()) and bool((text[behind] == pad).all())
    for one, two in zip(pair.expected.scores, pair.actual.scores, strict=True):
        torch.testing.assert_close(two, one, atol=1e-3, rtol=1e-3)
    for one, two in zip(pair.expected.logits, pair.actual.logits, strict=True):
        torch.testing.assert_close(two, one, atol=1e-3, rtol=1e-3)


@samplings
@pytest.mark.parametrize("returned", [2, 3])
def test_several_sequences_end_apart(returned: int, sampling: dict[str, Any]) -> None:
    if not sampling["do_sample"]:
        pytest.skip("greedy decoding returns one sequence")
    ids, mask = prompt("llama", 3)
    pair = twice(
        ids, mask, config=BUSHES, num_return_sequences=returned, max_new_tokens=NEW, eos_token_id=ENDS, **sampling
    )
    lengths = {int((row[WIDTH:] != 0).sum()) for row in pair.actual}
    assert pair.actual.shape[0] == 3 * returned and len(lengths) > 1


# --- criteria of every class ---------------------------------------------------------------------------------------


class Shorter(MaxLengthCriteria):
    """A built-in class with another idea: it must be asked, not read."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return super().__call__(torch.cat([input_ids, input_ids[:, :3]], 1), scores, **kwargs)


class Later(EosTokenCriteria):
    """Ends at an end only behind some length."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return super().__call__(input_ids, scores, **kwargs) & (input_ids.shape[1] > WIDTH + 4)


class Twice(StopStringCriteria):
    """Ends at the second look that finds the string."""

    looks = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        found = super().__call__(input_ids, scores, **kwargs)
        self.looks += int(found.any())
        return found & (self.looks > 1)


class Numbered(StoppingCriteria):
    """Ends by how often it was asked."""

    asked = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.asked += 1
        return torch.full((len(input_ids),), self.asked >= 6)


def criteria(name: str, text: Tensor) -> Any:
    tokenizer = letters(vocabulary("llama"))
    return {
        "subclass_of_length": lambda: Shorter(WIDTH + 9),
        "subclass_of_eos": lambda: Later([int(text[0, WIDTH + n]) for n in (1, 6)]),
        "subclass_of_stop_strings": lambda: Twice(tokenizer, [tokenizer.decode(text[0, WIDTH + n]) for n in (2, 5)]),
        "counter": Numbered,
    }[name]()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("config", [CHAINS_OF_4, BUSHES], ids=["chains", "bushes"])
@pytest.mark.parametrize("name", ["subclass_of_length", "subclass_of_eos", "subclass_of_stop_strings", "counter"])
def test_criterion_of_any_class(name: str, config: TreeConfig, batch: int) -> None:
    ids, mask, text = distinct_prompt("llama", 9, batch)
    pair = twice(
        ids,
        mask,
        maker="chain",
        config=config,
        truth=text,
        fresh=lambda: {"stopping_criteria": StoppingCriteriaList([criteria(name, text)])},
        max_new_tokens=14,
    )
    assert batch == 3 or pair.actual.shape[1] < WIDTH + 14, "the criterion must end the text"
    assert not torch.equal(pair.actual, reference(stock("llama"), ids, mask, max_new_tokens=14)) or batch == 3
    assert pair.stats.accepted_tokens > 0


@pytest.mark.parametrize("in_step", [True, False])
def test_padding_outside_of_the_vocabulary_is_not_read_before_plain_decoding_reads_it(in_step: bool) -> None:
    ids, mask = prompt("llama", 3)
    free = reference(stock("llama"), ids, mask, max_new_tokens=8)[:, WIDTH:]
    # Two rows end one token before the third, whose last token ends the call.
    ends = [int(free[0, 4]), int(free[1, 4]), int(free[2, 5])]
    assert all(token not in free[:, :4].flatten().tolist() for token in ends[:2]) and ends[2] not in free[:, :5]
    call: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": ends, "pad_token_id": vocabulary("llama") + 3}
    if in_step:
        call["stopping_criteria"] = [lambda text, scores: torch.zeros(len(text), dtype=torch.bool)]
    # Chains of three: the round ends with those two rows, and the next one begins with padding.
    chains = OFF.replace(max_nodes=3, max_depth=3, max_children=1)
    pair = twice(ids, mask, config=chains, maker="chain", truth=torch.cat([ids, free], 1), **call)
    assert int(pair.actual[0, -1]) == vocabulary("llama") + 3
