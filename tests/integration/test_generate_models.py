"""Other targets and drafts: vocabularies, types, attention, position tables, masks, prefill, pipelines."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from calls import BUSHES, GREEDY, SAMPLED, twice
from hf_treespec import TreeConfig, _compat, enable
from tiny import (
    FAMILIES,
    WIDTH,
    assert_same_text,
    build,
    cache_argument,
    draft,
    fingerprint,
    new_cache,
    perturbed,
    prompt,
    reference,
    stock,
    treed,
    vocabulary,
)

families = pytest.mark.parametrize("family", FAMILIES)
batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])
OFF = TreeConfig(fallback="off", seed=3)


def assisted(
    model: PreTrainedModel, helper: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, **call: Any
) -> torch.Tensor:
    call = {"do_sample": False, "tree_config": OFF, "max_new_tokens": 20, **call}
    return model.generate(ids, attention_mask=mask, assistant_model=helper, **call)


@families
@batches
@samplings
def test_draft_may_be_the_target(family: str, batch: int, sampling: dict[str, Any]) -> None:
    ids, mask = prompt(family, batch)
    expected = reference(stock(family), ids, mask, seed=3, max_new_tokens=20, **sampling)
    assert_same_text(expected, assisted(treed(family), treed(family), ids, mask, **sampling))
    # A draft that is the target can only be wrong about processors, and here there are none that it lacks.
    stats = treed(family).treespec_stats
    assert stats.accepted_by_depth[0] == stats.row_rounds - stats.plain_rounds * batch or batch > 1
    assert stats.tokens_per_round > 2.5


def resized(family: str, size: int) -> PreTrainedModel:
    """The draft of a family with more or fewer ids, the common ones as they were."""
    helper = copy.deepcopy(draft(family))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        helper.resize_token_embeddings(size, mean_resizing=False)
    return helper


@batches
@samplings
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("change", [-30, -1, 3, 64])
def test_draft_with_another_vocabulary_size(family: str, change: int, batch: int, sampling: dict[str, Any]) -> None:
    helper = resized(family, vocabulary(family) + change)
    ids, mask = prompt(family, batch)
    ids[0, -1] = vocabulary(family) - 1  # an id that the smaller drafts cannot read
    expected = reference(stock(family), ids, mask, seed=3, max_new_tokens=20, **sampling)
    assert_same_text(expected, assisted(treed(family), helper, ids, mask, **sampling))
    assert treed(family).treespec_stats.accepted_tokens > 0


@families
@samplings
def test_inference_mode(family: str, sampling: dict[str, Any]) -> None:
    ids, mask = prompt(family, 3)
    expected = reference(stock(family), ids, mask, seed=3, max_new_tokens=20, **sampling)
    with torch.inference_mode():
        out = assisted(treed(family), draft(family), ids, mask, **sampling)
        again = assisted(treed(family), draft(family), ids, mask, **cache_argument(new_cache(stock(family))))
    assert_same_text(expected, out)
    assert again.shape == expected.shape


@families
@batches
def test_bfloat16_parts_from_plain_only_where_two_tokens_are_close(family: str, batch: int) -> None:
    model = enable(build(family).to(torch.bfloat16))
    plain = build(family).to(torch.bfloat16)
    ids, mask = prompt(family, batch)
    call = {"max_new_tokens": 20, "return_dict_in_generate": True, "output_scores": True}
    expected = reference(plain, ids, mask, **call)
    actual = assisted(model, perturbed(plain), ids, mask, **call)
    assert actual.sequences.shape == expected.sequences.shape
    assert actual.scores[0].dtype == torch.float32
    for row in range(batch):
        part = (expected.sequences[row] != actual.sequences[row]).nonzero().flatten().tolist()
        if part:
            best = expected.scores[part[0] - WIDTH][row].topk(2).values
            margin = float(best[0] - best[1])
            print(f"{family}, row {row}: parted at new token {part[0] - WIDTH}, margin {margin:.3g}")
            # bfloat16 resolves one part in 256.
            assert margin <= float(best[0].abs()) / 32


@families
@batches
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_of_the_model(family: str, batch: int, attention: str) -> None:
    if (family, attention) == ("gemma2", "sdpa"):
        pytest.skip("only eager attention knows Gemma-2's softcap")
    ids, mask = prompt(family, batch)
    models = build(family, attention=attention), enable(build(family, attention=attention))
    pair = twice(ids, mask, models=models, max_new_tokens=20)
    assert pair.stats.accepted_tokens > 0


@pytest.mark.parametrize("own", ["sdpa", "eager"])
@pytest.mark.parametrize("wanted", ["sdpa", "eager"])
def test_attention_is_switched_for_the_call_and_restored(own: str, wanted: str) -> None:
    model, helper = enable(build("llama", attention=own)), perturbed(build("llama", attention=own))
    seen: set[str] = set()
    hook = model.model.layers[0].register_forward_hook(lambda *_: seen.add(_compat.attention_implementation(model)))
    before = fingerprint(model), fingerprint(helper)
    ids, mask = prompt("llama", 3)
    expected = reference(stock("llama"), ids, mask, max_new_tokens=20)
    out = assisted(model, helper, ids, mask, tree_config=OFF.replace(attention=wanted))
    assert_same_text(expected, out)
    assert seen == {wanted}
    assert (fingerprint(model), fingerprint(helper)) == before
    hook.remove()


# --- position tables -----------------------------------------------------------------------------------------------


@batches
@pytest.mark.parametrize("short", [0, 1, 2, 5])
@pytest.mark.parametrize("maker", ["chain", "wide", "half_right"])
def test_gpt2_up_to_the_end_of_its_positions(batch: int, short: int, maker: str) -> None:
    limit = stock("gpt2").config.n_positions
    ids, mask = prompt("gpt2", batch, width=limit - 20)
    # The last token is never read, so a text may be one longer than the table.
    text = reference(stock("gpt2"), ids, mask, max_new_tokens=21)
    pair = twice(
        ids, mask, family="gpt2", maker=maker, config=BUSHES, truth=text, max_new_tokens=21 - short
    )  # fmt: skip
    assert pair.actual.shape[1] == limit + 1 - short


@batches
@pytest.mark.parametrize("maker", ["half_right", "wide"])
def test_gpt2_trees_end_where_its_positions_do(batch: int, maker: str) -> None:
    # The budget allows more than the table: a criterion ends the text, and no node may look past it.
    limit = stock("gpt2").config.n_positions
    ids, mask = prompt("gpt2", batch, width=limit - 20)
    end = {"stopping_criteria": [lambda text, scores: torch.full((batch,), text.shape[1] > limit)]}
    pair = twice(ids, mask, family="gpt2", maker=maker, max_new_tokens=60, **end)
    assert pair.actual.shape[1] == limit + 1


@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_gpt2_drafts_stop_at_their_own_positions(kind: str) -> None:
    # The draft has a shorter table than the target: it falls silent, the target goes on.
    helper = build("gpt2", n_positions=40)
    ids, mask = prompt("gpt2", 1, width=30)
    expected = reference(stock("gpt2"), ids, mask, max_new_tokens=30)
    call = {"tree_config": OFF, "max_new_tokens": 30}
    if kind == "model":
        out = assisted(treed("gpt2"), helper, ids, mask, **call)
    else:
        out = treed("gpt2").generate(ids, attention_mask=mask, do_sample=False, **call)
    assert_same_text(expected, out, width=30)


@pytest.mark.parametrize("maker", ["chain", "wrong_chain"])
def test_gpt2_row_that_has_ended_needs_no_positions_of_its_own(maker: str) -> None:
    # Row 1 has no padding, so it is nearest the end of the table. It ends early and is padded from then on; the other
    # rows draft on, and end before plain decoding would read a position that is not there.
    limit = stock("gpt2").config.n_positions
    ids, mask = prompt("gpt2", 3, width=limit - 8)
    mask[0], mask[2] = 1, 1
    mask[0, :30], mask[2, :30] = 0, 0
    ids = ids * mask

    def ended(text: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        done = text.shape[1] >= limit - 1
        return torch.tensor([done, text.shape[1] >= limit - 6 or done, done])

    call = {"max_new_tokens": 60, "eos_token_id": 2, "stopping_criteria": [ended]}
    text = reference(stock("gpt2"), ids, mask, **call)
    assert text.shape[1] == limit - 1
    longer = torch.cat([text, torch.full((3, 30), 5)], 1)
    pair = twice(ids, mask, family="gpt2", maker=maker, truth=longer, **call)
    assert pair.actual.shape[1] == limit - 1


# --- inputs --------------------------------------------------------------------------------------------------------


@families
@samplings
@pytest.mark.parametrize("form", ["holes", "right", "one_token", "inferred", "missing"])
def test_masks(family: str, form: str, sampling: dict[str, Any]) -> None:
    ids, mask = prompt(family, 3)
    if form == "holes":
        mask[1, 4:6] = 0
    elif form == "right":
        mask[1, -2:] = 0
    elif form == "one_token":
        mask[0, :-1] = 0
    elif form == "missing":
        ids, mask = ids[1:2], mask[1:2]
    ids = ids * mask
    call = {"max_new_tokens": 20, **sampling}
    expected = reference(stock(family), ids, mask, seed=3, **call)
    given = {} if form in ("inferred", "missing") else {"attention_mask": mask}
    out = treed(family).generate(ids, assistant_model=draft(family), tree_config=OFF, **given, **call)
    assert_same_text(expected, out)


@families
def test_position_ids_of_the_caller(family: str) -> None:
    ids, mask = prompt(family, 3)
    positions = (mask.cumsum(-1) - 1).clamp(min=0) + 7
    pair = twice(ids, mask, family=family, position_ids=positions, max_new_tokens=20)
    if family == "gpt2":
        # Rotary positions only count relatively; learned ones show that the offset has reached the model.
        assert not torch.equal(pair.actual, reference(stock(family), ids, mask, max_new_tokens=20))


@families
@batches
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunked_prefill(family: str, batch: int, chunk: int) -> None:
    ids, mask = prompt(family, batch)
    widths: list[int] = []
    hook = treed(family).get_input_embeddings().register_forward_hook(lambda _, args, out: widths.append(out.shape[1]))
    try:
        pair = twice(ids, mask, family=family, prefill_chunk_size=chunk, max_new_tokens=20)
    finally:
        hook.remove()
    chunks = [min(chunk, WIDTH - start) for start in range(0, WIDTH, chunk)]
    assert widths[: len(chunks)] == chunks and len(widths) == len(chunks) + pair.stats.rounds
    assert pair.stats.accepted_tokens > 0
