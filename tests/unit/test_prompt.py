"""What a prepared call says about its prompt: padding, positions, tokens of a passed-in cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from hf_treespec import UnsupportedCallError
from hf_treespec.engine.prompt import Prompt

IDS = torch.tensor([[7, 8, 9], [5, 6, 4]])


def cache_of(length: int) -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(2, 1, length, 4), torch.zeros(2, 1, length, 4), 0)
    return cache


def prompt_of(mask: list[list[int]] | None = None, past: int = 0, **kwargs: Any) -> Prompt:
    if mask is not None:
        kwargs["attention_mask"] = torch.tensor(mask)
    if past:
        kwargs["cache"] = cache_of(past)
    return Prompt.of(IDS, kwargs, GenerationConfig())


def test_nothing_padded_is_no_mask() -> None:
    for prompt in (prompt_of(), prompt_of([[1, 1, 1]] * 2), prompt_of([[2, 1, 1]] * 2)):
        assert prompt.mask_BP is None
        assert prompt.real_tokens == [3, 3] and prompt.known_tokens == IDS.tolist()
        assert prompt.last_positions.tolist() == [[2], [2]]


def test_padding_counts_nowhere_but_in_the_mask() -> None:
    prompt = prompt_of([[0, 0, 5], [0, 1, 1]])
    assert prompt.mask_BP is not None and prompt.mask_BP.tolist() == [[0, 0, 1], [0, 1, 1]]
    assert prompt.mask_BP.dtype == torch.int64
    assert prompt.real_tokens == [1, 2] and prompt.known_tokens == [[9], [6, 4]]
    assert prompt.last_positions.tolist() == [[0], [1]]


def test_ids_that_go_on_after_a_cache_are_only_part_of_the_text() -> None:
    prompt = prompt_of([[0, 1, 1, 1, 1], [1, 1, 0, 1, 1]], past=2)
    assert prompt.mask_BP is not None and prompt.mask_BP.shape == (2, 5)
    assert prompt.real_tokens == [4, 4] and prompt.known_tokens == [[7, 8, 9], [6, 4]]
    assert prompt.last_positions.tolist() == [[3], [3]]
    whole = prompt_of([[1] * 5] * 2, past=2)
    assert whole.mask_BP is None and whole.real_tokens == [5, 5] and whole.known_tokens == IDS.tolist()


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_mask_as_wide_as_the_ids_means_that_they_hold_the_whole_text(name: str) -> None:
    prompt = prompt_of([[1, 1, 1], [0, 1, 1]], **{name: cache_of(2)})
    assert prompt.real_tokens == [3, 2] and prompt.known_tokens == [[7, 8, 9], [6, 4]]
    with pytest.raises(UnsupportedCallError, match="the cache holds 3 tokens and .* describe 3: at least one token"):
        prompt_of([[1, 1, 1]] * 2, **{name: cache_of(3)})
    assert prompt_of(**{name: cache_of(2)}).real_tokens == [3, 3]


@pytest.mark.parametrize("width", [2, 4, 6])
def test_a_mask_of_another_width_is_refused(width: int) -> None:
    with pytest.raises(UnsupportedCallError, match=f"attention_mask is {width} wide: expected 3 .* or 5 "):
        prompt_of([[1] * width] * 2, past=2)


def test_a_dropped_mask_still_tells_its_width() -> None:
    """Transformers drops a mask of ones and keeps only how wide it was."""
    config = GenerationConfig()
    config._mask_length = 5
    assert Prompt.of(IDS, {"cache": cache_of(2)}, config).real_tokens == [5, 5]
    config._mask_length = 4
    with pytest.raises(UnsupportedCallError, match="attention_mask is 4 wide"):
        Prompt.of(IDS, {"cache": cache_of(2)}, config)


def test_a_row_without_a_token_is_named() -> None:
    with pytest.raises(UnsupportedCallError, match=r"masks every token of rows \[1\]"):
        prompt_of([[1, 1, 1], [0, 0, 0]])


def test_given_positions_are_taken_as_they_are() -> None:
    flat = torch.tensor([[4, 5, 9], [0, 1, 7]])
    assert prompt_of(position_ids=flat).last_positions.tolist() == [[9], [7]]
    one_for_all = prompt_of(position_ids=flat[:1]).last_positions
    assert one_for_all.tolist() == [[9], [9]]
    planes = torch.stack([flat, flat + 10, flat + 20])
    assert prompt_of(position_ids=planes).last_positions.tolist() == [[[9], [7]], [[19], [17]], [[29], [27]]]


def embedded(width: int, mask: list[list[int]] | None = None, *, ids: torch.Tensor | None = None) -> Prompt:
    kwargs: dict[str, Any] = {"inputs_embeds": torch.zeros(2, width, 4)}
    if mask is not None:
        kwargs["attention_mask"] = torch.tensor(mask)
    return Prompt.of(IDS[:, :0] if ids is None else ids, kwargs, GenerationConfig())


def test_embeddings_are_the_prompt_whatever_the_ids() -> None:
    alone = embedded(4, [[0, 1, 1, 1], [1, 1, 1, 1]])
    assert alone.real_tokens == [3, 4] and alone.known_tokens == [[], []]
    assert alone.last_positions.tolist() == [[2], [3]]
    beside = embedded(5, [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]], ids=IDS)
    assert beside.real_tokens == [2, 4] and beside.known_tokens == [[8, 9], [5, 6, 4]]
    assert embedded(5, ids=IDS).known_tokens == IDS.tolist()
    # More ids than embeddings: whatever they are, they count as text.
    assert embedded(2, [[0, 1], [1, 1]], ids=IDS).known_tokens == [[7, 9], [5, 6, 4]]


def test_embeddings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UnsupportedCallError, match="attention_mask is 3 wide and inputs_embeds hold 4 tokens"):
        embedded(4, [[1, 1, 1], [0, 1, 1]])
    for shape in ((1, 3, 4), (2, 0, 4), (2, 3)):
        with pytest.raises(UnsupportedCallError, match="inputs_embeds has shape .*: expected .2, prompt length"):
            Prompt.of(IDS, {"inputs_embeds": torch.zeros(shape)}, GenerationConfig())


@pytest.mark.parametrize("shape", [(3,), (2, 1, 3), (2, 1, 3, 3), (1, 3)])
def test_masks_that_are_not_of_rows_and_columns_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedCallError, match="attention_mask has shape .*: expected two axes"):
        Prompt.of(IDS, {"attention_mask": torch.zeros(shape)}, GenerationConfig())


@pytest.mark.parametrize("shape", [(3,), (3, 3), (3, 4, 3), (2, 0)])
def test_position_ids_of_other_rows_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedCallError, match="position_ids has shape .*: expected .2, prompt length"):
        prompt_of(position_ids=torch.zeros(shape, dtype=torch.long))
