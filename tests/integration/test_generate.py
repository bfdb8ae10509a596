"""The calls of the README, seeds, lengths, and every place where an end can fall."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from calls import BUSHES, CHAINS_OF_4, GREEDY, SAMPLED, distinct_prompt, twice
from hf_treespec import TreeConfig, _compat
from tiny import (
    FAMILIES,
    WIDTH,
    assert_same_cache,
    assert_same_text,
    draft,
    first_block,
    prompt,
    real_texts,
    reference,
    stock,
    treed,
)

families = pytest.mark.parametrize("family", FAMILIES)
batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])
OFF = TreeConfig(fallback="off")


@families
@batches
def test_literal_call(family: str, batch: int) -> None:
    ids, mask = prompt(family, batch)
    model, inputs = treed(family), {"input_ids": ids, "attention_mask": mask}
    expected = stock(family).generate(**inputs, max_new_tokens=24)
    forwards = []
    hook = first_block(model).register_forward_hook(lambda *_: forwards.append(1))
    try:
        text = model.generate(**inputs, assistant_model=draft(family), tree_config=TreeConfig(), max_new_tokens=24)
        assert_same_text(expected, text)
        # Whether trees pay in so short a call goes by the clock: counted is where they are always whole.
        forwards.clear()
        whole = TreeConfig(fallback="off")
        text = model.generate(**inputs, assistant_model=draft(family), tree_config=whole, max_new_tokens=24)
    finally:
        hook.remove()
    assert_same_text(expected, text)
    stats = model.treespec_stats
    assert stats.draft == "model"
    assert stats.batch_size == batch and stats.new_tokens == 24 * batch
    assert stats.accepted_tokens > 0
    assert stats.rounds == len(forwards) - 1 < 23


@families
@batches
def test_ngram_without_assistant(family: str, batch: int) -> None:
    ids, mask = prompt(family, batch)
    expected = stock(family).generate(ids, attention_mask=mask, max_new_tokens=40)
    config = TreeConfig(draft="ngram", fallback="off")
    assert_same_text(expected, treed(family).generate(ids, attention_mask=mask, max_new_tokens=40, tree_config=config))
    assert treed(family).treespec_stats.draft == "ngram"
    assert treed(family).treespec_stats.drafted_nodes > 0


def test_ngram_trees_are_accepted_in_a_text_that_repeats() -> None:
    ids, mask = prompt("gpt2", 1)
    text = stock("gpt2").generate(ids, attention_mask=mask, max_new_tokens=80)
    # The fallback goes by the clock, and would hide the trees on a busy machine.
    config = TreeConfig(draft="ngram", fallback="off")
    out = treed("gpt2").generate(ids, attention_mask=mask, max_new_tokens=80, tree_config=config)
    assert_same_text(text, out)
    assert treed("gpt2").treespec_stats.accepted_tokens > 0


@families
@batches
@samplings
@pytest.mark.parametrize("eos", [None, [5, 6, 7, 9, 14, 23, 31, 40, 52]], ids=["no_eos", "eos"])
def test_sources_are_told_the_text_and_what_was_accepted(
    family: str, batch: int, sampling: dict[str, Any], eos: Any
) -> None:
    ids, mask = prompt(family, batch)
    pair = twice(ids, mask, family=family, max_new_tokens=20, eos_token_id=eos, **sampling)
    texts, trees, paths = pair.source.texts, pair.source.rounds, pair.source.paths
    whole = real_texts(pair.actual, mask)
    pads = [int(mask[row].sum()) + 1 for row in range(batch)]
    assert [len(text) for text in texts[0]] == pads if texts else batch == 1
    for number, told in enumerate(texts):
        for row, text in enumerate(told):
            # No padding, and the last token is the root of the tree that is asked for.
            assert text == whole[row][: len(text)] and trees[number][row].tokens[0] == text[-1]
            if number + 1 < len(texts) and paths[number][row] and trees[number][row].drafted:
                path = [trees[number][row].tokens[node] for node in paths[number][row]]
                assert texts[number + 1][row][len(text) - 1 :][: len(path)] == path
                assert len(texts[number + 1][row]) == len(text) + len(path)


# Configurations that must all give the text of the seed.
SAME_TEXT: dict[str, dict[str, Any]] = {
    "no_tree": {"tree_config": TreeConfig(max_nodes=0)},
    "model": {"tree_config": OFF, "assistant_model": draft},
    "static": {"tree_config": OFF.replace(growth="static"), "assistant_model": draft},
    "dynamic": {"tree_config": OFF.replace(growth="dynamic"), "assistant_model": draft},
    "shallow": {"tree_config": OFF.replace(max_depth=1, max_nodes=3), "assistant_model": draft},
    "large": {"tree_config": OFF.replace(max_depth=12, max_nodes=60, max_children=9), "assistant_model": draft},
    "ngram": {"tree_config": OFF.replace(draft="ngram")},
    "suffix": {"tree_config": OFF.replace(draft="suffix")},
    "recycle": {"tree_config": OFF.replace(draft="recycle")},
    "lookahead": {"tree_config": OFF.replace(draft="lookahead")},
    "ngram+recycle": {"tree_config": OFF.replace(draft=("ngram", "recycle"))},
    "fallback": {"tree_config": TreeConfig(), "assistant_model": draft},
}


def seeded(family: str, name: str, seed: int, *, batch: int = 3, config_seed: int | None = None) -> torch.Tensor:
    call = dict(SAME_TEXT[name])
    call["tree_config"] = call["tree_config"].replace(seed=config_seed)
    if "assistant_model" in call:
        call["assistant_model"] = draft(family)
    ids, mask = prompt(family, batch)
    torch.manual_seed(seed)
    return treed(family).generate(ids, attention_mask=mask, max_new_tokens=20, **SAMPLED, **call)


@families
@pytest.mark.parametrize("name", list(SAME_TEXT))
def test_text_is_a_function_of_target_and_seed(family: str, name: str) -> None:
    expected = seeded(family, "no_tree", 11)
    state = torch.get_rng_state()
    assert_same_text(expected, seeded(family, name, 11))
    # The call takes the same from the global generator whatever it drafts, so later draws agree too.
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(expected, seeded(family, name, 12))


def test_seed_of_the_config_overrides_the_global_one() -> None:
    one = seeded("llama", "model", 11, config_seed=5)
    assert_same_text(one, seeded("llama", "ngram", 12, config_seed=5))
    assert not torch.equal(one, seeded("llama", "model", 11, config_seed=6))
    assert not torch.equal(one, seeded("llama", "model", 11))


# Where an end may fall. Chains of four of the true text: a round reads root, c1..c4 and emits c1..c4 and a bonus
# token, so new token 0 comes from the prefill, 1 is a child of the root,
# 2 and 3 are deeper, 4 is the leaf, 5 the bonus, 6 a child of the next root.
PLACES = {0: "prefill", 1: "first", 2: "inner", 4: "leaf", 5: "bonus", 6: "first", 7: "inner", 9: "leaf", 10: "bonus"}


def place_of_end(pair: Any, eos: int) -> str:
    """Where in the last round the ending token was drafted and chosen."""
    if not pair.source.rounds:
        return "prefill"
    tree, path = pair.source.rounds[-1][0], pair.source.paths[-1][0]
    drafted = tree.child(path[-1], eos)
    if drafted is None:
        return "bonus" if tree.drafted and path[-1] else "root"
    if not tree.children(drafted):
        return "leaf"
    return "inner" if tree.parents[drafted] else "first"


@families
@pytest.mark.parametrize("index", sorted(PLACES))
def test_end_of_text_at_every_place_of_a_path(family: str, index: int) -> None:
    ids, mask, text = distinct_prompt(family, 11)
    eos = int(text[0, WIDTH + index])
    wanted: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    pair = twice(
        ids, mask, family=family, maker="chain", config=CHAINS_OF_4, truth=text, max_new_tokens=17, eos_token_id=eos,
        **wanted,
    )  # fmt: skip
    assert pair.actual.sequences.shape[1] == WIDTH + index + 1 and int(pair.actual.sequences[0, -1]) == eos
    assert place_of_end(pair, eos) == PLACES[index]
    assert len(pair.actual.scores) == index + 1
    one, two = (_compat.cache_from_outputs(out) for out in (pair.expected, pair.actual))
    assert_same_cache(one, two, mask)
    assert pair.stats.new_tokens == index + 1


@families
@pytest.mark.parametrize("index", [1, 3])
def test_end_of_text_chosen_at_a_root_without_a_right_child(family: str, index: int) -> None:
    ids, mask, text = distinct_prompt(family, 11)
    eos = int(text[0, WIDTH + index])
    pair = twice(
        ids, mask, family=family, maker="wrong_chain", truth=text, max_new_tokens=17, eos_token_id=eos
    )  # fmt: skip
    assert place_of_end(pair, eos) == "root"
    assert pair.actual.shape[1] == WIDTH + index + 1


@families
@pytest.mark.parametrize("maker", ["chain", "half_right", "wide"])
def test_rows_end_at_places_of_their_own(family: str, maker: str) -> None:
    ids, mask, text = distinct_prompt(family, 9, batch=3)
    ends = [int(text[row, WIDTH + index]) for row, index in ((0, 2), (1, 7), (2, 4))]
    pair = twice(ids, mask, family=family, maker=maker, truth=text, max_new_tokens=17, eos_token_id=ends)
    lengths = [int((row[WIDTH:] != 0).sum()) for row in pair.actual]
    assert len(set(lengths)) > 1, "rows must end apart for this to test anything"
    assert pair.stats.new_tokens == sum(lengths)


@batches
@samplings
@pytest.mark.parametrize("eos", ["int", "list", "tensor", -1, None])
def test_forms_of_eos_token_id(batch: int, sampling: dict[str, Any], eos: Any) -> None:
    ids, mask = prompt("llama", batch)
    text = reference(stock("llama"), ids, mask, seed=3, max_new_tokens=17, **sampling)
    some = sorted({int(row[WIDTH + 6]) for row in text})
    value = {"int": some[0], "list": some, "tensor": torch.tensor(some)}.get(eos, eos)
    pair = twice(ids, mask, max_new_tokens=17, eos_token_id=value, **sampling)
    assert torch.equal(pair.actual, text) == (not isinstance(eos, str))


@families
@batches
@pytest.mark.parametrize("new", range(1, CHAINS_OF_4.max_depth + 3))
def test_every_budget_around_a_path(family: str, batch: int, new: int) -> None:
    ids, mask = prompt(family, batch)
    longer = reference(stock(family), ids, mask, max_new_tokens=20)
    wanted: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
    pair = twice(
        ids, mask, family=family, maker="chain", config=CHAINS_OF_4, truth=longer, max_new_tokens=new, **wanted
    )
    assert pair.actual.sequences.shape[1] == WIDTH + new
    assert len(pair.actual.logits) == new
    one, two = (_compat.cache_from_outputs(out) for out in (pair.expected, pair.actual))
    assert_same_cache(one, two, mask)
    # Nothing is drafted that the budget could not hold.
    assert all(tree.max_depth < new - 5 * k for k, round_ in enumerate(pair.source.rounds) for tree in round_)


@batches
@samplings
@pytest.mark.parametrize(
    "lengths",
    [
        {"max_length": WIDTH + 7},
        {},  # transformers' default length
        {"max_new_tokens": 14, "min_new_tokens": 9, "eos_token_id": list(range(5, 60))},
        {"max_length": WIDTH + 14, "min_length": WIDTH + 9, "eos_token_id": list(range(5, 60))},
    ],
    ids=["max_length", "default", "min_new_tokens", "min_length"],
)
def test_lengths(batch: int, sampling: dict[str, Any], lengths: dict[str, Any]) -> None:
    ids, mask = prompt("llama", batch)
    pair = twice(ids, mask, **lengths, **sampling)
    if "eos_token_id" in lengths:
        first = pair.actual[:, WIDTH : WIDTH + 9]
        assert first.shape[1] == 9 and not bool(torch.isin(first, torch.tensor(lengths["eos_token_id"])).any())
        assert bool(torch.isin(pair.actual[:, -1], torch.tensor([0, *lengths["eos_token_id"]])).any())


@families
def test_rows_of_num_return_sequences_differ_and_are_those_without_trees(family: str) -> None:
    ids, mask = prompt(family, 3)
    pair = twice(ids, mask, family=family, config=BUSHES, num_return_sequences=3, max_new_tokens=16, **SAMPLED)
    assert pair.actual.shape[0] == 9
    assert len({tuple(row) for row in pair.actual.tolist()}) == 9


@families
def test_sampled_rows_know_neither_their_place_nor_their_neighbours(family: str) -> None:
    ids, mask = prompt(family, 3)
    call = {"do_sample": True, "max_new_tokens": 16, "tree_config": TreeConfig(seed=9), "temperature": 1.2}
    model = treed(family)
    whole = model.generate(ids, attention_mask=mask, **call)[:, WIDTH:]
    turned = model.generate(ids.flip(0), attention_mask=mask.flip(0), **call)[:, WIDTH:]
    assert_same_text(whole, turned.flip(0), width=0)
    for row in range(3):
        real = mask[row].bool()
        alone = model.generate(ids[row : row + 1, real], **call)[:, int(real.sum()) :]
        assert_same_text(whole[row : row + 1], alone, width=0)
    copies = model.generate(ids[1:2], num_return_sequences=3, **call)[:, WIDTH:]
    assert len({tuple(copy) for copy in copies.tolist()}) == 3
    assert_same_text(whole[1:2], copies[:1], width=0)
