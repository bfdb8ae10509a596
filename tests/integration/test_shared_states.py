"""Assistants that read keys and values of their target: the text of plain decoding, whatever they guess."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

import gemma
import heads
import tiny
from calls import BUSHES, GREEDY, SAMPLED
from hf_treespec import TreeConfig, UnsupportedCallError, UnsupportedModelError, _compat, enable
from hf_treespec.api import heads as api_heads
from hf_treespec.api.shared_states import lent_layers
from hf_treespec.api.support import Support
from hf_treespec.cache import CacheTransaction, check_readable
from hf_treespec.draft.heads import shared_states
from hf_treespec.routes import Route
from hf_treespec.tree import TreeBuilder
from tiny import WIDTH, assert_same_text, cache_argument, new_cache

batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])
NEW = 12
WIDE = TreeConfig(max_nodes=48, max_depth=4, max_children=16, growth="static", fallback="off", seed=3)
UNSHARED = {"num_kv_shared_layers": 0}


def prompt(batch: int, width: int = WIDTH) -> dict[str, Tensor]:
    ids = torch.randint(3, gemma.VOCAB, (batch, width), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :4] = 0
        mask[2, :1] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "pad_token_id": 0}


# -- the text --


@pytest.mark.parametrize("changes", [{}, UNSHARED], ids=["shared", "unshared"])
@batches
@samplings
def test_any_assistant_equals_no_tree(changes: dict[str, Any], batch: int, sampling: dict[str, Any]) -> None:
    stock, model = gemma.stock(**changes), gemma.treed(**changes)
    call = {**prompt(batch), "max_new_tokens": NEW, **sampling}
    expected = model.generate(tree_config=WIDE.replace(max_nodes=0), **call)
    if not sampling["do_sample"]:
        assert_same_text(stock.generate(**call), expected)
    for helper in (gemma.assistant(), gemma.assistant(ordered=True, vocab_size=gemma.VOCAB)):
        assert_same_text(expected, model.generate(assistant_model=helper, tree_config=WIDE, **call))
        stats = model.treespec_stats
        assert stats.draft == "gemma4_assistant" and stats.drafted_nodes > NEW and stats.draft_forward_seconds > 0
        assert all(stats.drafted_by_depth[:3])
        assert stats.accepted_tokens > 0 or not sampling["do_sample"]


@pytest.mark.parametrize("growth", ["best_first", "dynamic"])
def test_ends_caches_and_the_fallback(growth: str) -> None:
    """Rows that end early, a cache that goes on, and rounds without trees in between."""
    model, helper = gemma.treed(), gemma.assistant()
    config = WIDE.replace(growth=growth, max_children=12, fallback="auto")
    call = {**prompt(3), "max_new_tokens": NEW, "do_sample": True, "eos_token_id": [5, 6, 7, 9, 14, 23]}
    plain = model.generate(**call, tree_config=config.replace(max_nodes=0))
    assert_same_text(plain, model.generate(**call, assistant_model=helper, tree_config=config))
    first, more = prompt(3), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ids, mask = first["input_ids"], first["attention_mask"]
    config, cache = config.replace(fallback="off"), new_cache(model)
    more["assistant_model"] = helper
    text = model.generate(ids, attention_mask=mask, tree_config=config, **cache_argument(cache), **more)
    whole = torch.cat([mask, mask.new_ones(3, 8)], 1)
    again = model.generate(text, attention_mask=whole, tree_config=config, **cache_argument(cache), **more)
    del more["assistant_model"]
    plain = model.generate(text, attention_mask=whole, tree_config=config.replace(max_nodes=0), **more)
    assert_same_text(plain, again, width=text.shape[1])


@pytest.mark.parametrize("kind", ["static", "unknown", "chunks", "no ids", "one token"])
def test_other_caches_and_prompts(kind: str) -> None:
    changes = {**UNSHARED, "sliding_window": 64} if kind == "static" else {}
    model, helper = gemma.treed(**changes), gemma.assistant(sliding_window=changes.get("sliding_window", 7))
    call: dict[str, Any] = {**prompt(1 if kind == "one token" else 3, 1 if kind == "one token" else WIDTH)}
    width = call["input_ids"].shape[1]
    if kind == "no ids":
        table = model.get_input_embeddings()
        call["inputs_embeds"], width = table(call.pop("input_ids")).detach(), 0
    call = {**call, "max_new_tokens": NEW, "do_sample": False}
    expected = gemma.stock(**changes).generate(**call)
    if kind == "static":
        call["cache_implementation"] = "static"
    elif kind == "unknown":
        # Its layers are made by the first forward, all of one kind.
        call |= cache_argument(DynamicCache())
    elif kind == "chunks":
        call["prefill_chunk_size"] = 4
    assert_same_text(expected, model.generate(**call, assistant_model=helper, tree_config=WIDE), width=width)
    assert model.treespec_stats.drafted_nodes > NEW


@pytest.mark.parametrize("rule", ["hybrid", "rrs", "block", "traversal"])
def test_independent_rules(rule: str) -> None:
    model, helper = gemma.treed(), gemma.assistant()
    config = WIDE.replace(verification=rule, max_nodes=12, max_children=4)
    call = {**prompt(3), "do_sample": True, "max_new_tokens": NEW, "tree_config": config}
    one, two = (model.generate(**call, assistant_model=helper) for _ in range(2))
    assert one.shape == (3, WIDTH + NEW) and torch.equal(one, two)
    assert model.treespec_stats.drafted_nodes > 0


def test_beside_sources_of_the_text() -> None:
    model, helper = gemma.treed(), gemma.assistant()
    for sampling, fallback in ((GREEDY, "off"), (SAMPLED, "auto")):
        config = WIDE.replace(draft=("model", "ngram"), fallback=fallback, growth="best_first")
        call = {**prompt(3), "max_new_tokens": NEW, **sampling}
        plain = model.generate(**call, tree_config=config.replace(max_nodes=0, draft="auto"))
        assert_same_text(plain, model.generate(**call, assistant_model=helper, tree_config=config))
        assert model.treespec_stats.drafted_by_source["gemma4_assistant"] > 0


def test_settings_of_the_assistant_hold() -> None:
    model, helper = gemma.treed(), gemma.assistant()
    helper.generation_config.num_assistant_tokens = 2
    model.generate(**prompt(1), max_new_tokens=NEW, do_sample=False, assistant_model=helper, tree_config=WIDE)
    assert model.treespec_stats.drafted_by_depth[1] and not any(model.treespec_stats.drafted_by_depth[2:])


def test_eager_attention_and_another_type() -> None:
    model = enable(gemma.build(attention="eager"))
    for helper in (gemma.assistant(attention="eager"), gemma.assistant().double()):
        call = {**prompt(3), "max_new_tokens": NEW, "do_sample": False}
        plain = gemma.stock().generate(**call)
        assert_same_text(plain, model.generate(**call, assistant_model=helper, tree_config=WIDE))
        assert model.treespec_stats.drafted_nodes > NEW


# -- what is read --


def of_stock(model: PreTrainedModel, helper: Any, text: Sequence[int], path: Sequence[int]) -> Tensor:
    """Logits of the assistant of transformers behind a text and a path that it drafts."""
    ids = torch.tensor([list(text)])
    with torch.no_grad():
        out = model(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
    # As a cache keeps them.
    keys, values = out.shared_kv_states["sliding_attention"]
    near = {"sliding_attention": (keys[:, :, 1 - gemma.WINDOW :], values[:, :, 1 - gemma.WINDOW :])}
    out.shared_kv_states = {**dict(out.shared_kv_states), **near}
    drafted = iter(path)
    said: list[Tensor] = []

    class Forced(torch.nn.Module):
        device = helper.device

        def forward(self, **inputs: Any) -> Any:
            got = helper(**inputs)
            said.append(got.logits[0, -1].clone())
            token = next(drafted, 0)
            got.logits[..., token] = 1e9
            return got

    forced = Forced()
    # Its constructor takes other arguments in each release.
    generator = object.__new__(SinglePositionMultiTokenCandidateGenerator)
    generator.assistant_model, generator.target_model_input_embeddings = forced, model.get_input_embeddings()
    generator.num_assistant_tokens, generator.main_model_max_length = len(path) + 1, len(text) + 20
    generator.is_main_model_prefill, generator.eos_token_id = True, None
    generator.get_candidates(ids, {}, out, is_first_iteration=False, n_last_matches=len(text) - 2)
    return said[len(path)]


@pytest.mark.parametrize("changes", [{}, UNSHARED], ids=["shared", "unshared"])
@pytest.mark.parametrize(("batch", "storage"), [(1, "auto"), (3, "auto"), (3, "dense")])
def test_every_node_is_what_transformers_makes_of_its_path(
    changes: dict[str, Any], batch: int, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After many rounds, with rejections and with accepted paths, and for all branches of a tree."""
    parted = gaps(monkeypatch)
    plain, helper = gemma.build(**changes).double(), gemma.assistant().double()
    model = enable(copy.deepcopy(plain))
    said: list[tuple[list[int], list[int], Tensor]] = []
    candidates = shared_states.SharedStatesDraft._candidates

    def spy(self: Any, source: Any, builder: TreeBuilder, nodes: Sequence[int], children: int, logits: Tensor) -> Any:
        for node, own in zip(nodes, logits, strict=True):
            path = []
            while node:
                path.insert(0, builder.tokens[node])
                node = builder.parents[node]
            said.append((list(source.tokens), path, own.clone()))
        return candidates(self, source, builder, nodes, children, logits)

    monkeypatch.setattr(shared_states.SharedStatesDraft, "_candidates", spy)
    config = WIDE.replace(max_nodes=24, max_children=6, kv_cache=storage)
    call = {"assistant_model": helper, "tree_config": config, "max_new_tokens": NEW, "do_sample": True}
    model.generate(**prompt(batch), **call)
    stats = model.treespec_stats
    assert stats.accepted_tokens > 1 and stats.rounds > 2
    assert batch == 1 or max(parted) > 0
    for text, path, logits in said:
        assert float((of_stock(plain, helper, text, path) - logits).abs().max()) < 1e-4
    assert {len(path) for _, path, _ in said} >= {0, 1, 2}
    assert len({len(text) for text, _, _ in said}) > 2


def gaps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """After each commit, by how much the longest row is longer than the shortest."""
    found: list[int] = []
    commit = CacheTransaction.commit

    def spy(self: CacheTransaction, slots: Sequence[Sequence[int]]) -> None:
        commit(self, slots)
        found.append(max(self._rows.lengths) - min(self._rows.lengths))

    monkeypatch.setattr(CacheTransaction, "commit", spy)
    return found


def test_rows_that_part_by_more_than_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of a short row ends where the row does, and is never empty."""
    parted, full = gaps(monkeypatch), []
    step = shared_states.AssistantHead.step

    def spy(self: Any, tokens: Tensor, above: Tensor, positions: Tensor, mask: Tensor | None, *more: Any) -> Any:
        full.append(mask is None or bool(mask[:, 1 - gemma.WINDOW :].all()))
        return step(self, tokens, above, positions, mask, *more)

    monkeypatch.setattr(shared_states.AssistantHead, "step", spy)
    call = {**prompt(3), "max_new_tokens": 90, "do_sample": True, "temperature": 0.9}
    for storage in ("dense", "int8"):
        model = gemma.treed(**UNSHARED)
        config = WIDE.replace(kv_cache=storage)
        plain = model.generate(**call, tree_config=config.replace(max_nodes=0))
        found = model.generate(**call, assistant_model=gemma.assistant(), tree_config=config)
        assert found.shape == plain.shape
        if storage == "dense":
            assert_same_text(plain, found)
        assert all(full) and max(parted) >= gemma.WINDOW
        parted.clear()


def test_eight_bits_of_layers_that_share_states_are_refused() -> None:
    config = WIDE.replace(kv_cache="int8")
    with pytest.raises(UnsupportedCallError, match="reads keys and values of a layer after"):
        gemma.treed().generate(**prompt(3), max_new_tokens=4, assistant_model=gemma.assistant(), tree_config=config)


def test_the_layers_are_those_that_the_target_shows() -> None:
    assert lent_layers(gemma.stock(), gemma.assistant()) == {"sliding_attention": 0, "full_attention": 1}
    assert lent_layers(gemma.stock(**UNSHARED), gemma.assistant()) == {"sliding_attention": 2, "full_attention": 3}


# -- oracle --


@batches
@samplings
def test_a_perfect_assistant_is_accepted_whole(batch: int, sampling: dict[str, Any]) -> None:
    model, helper = gemma.periodic()
    enable(model)
    cycle = heads.CYCLE
    ids = torch.tensor([list(cycle) + list(cycle[:3])] * batch)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :4] = 0
        mask[2, :1] = 0
    config = TreeConfig(max_nodes=12, max_depth=6, max_children=2, fallback="off", seed=3)
    call = {"input_ids": ids * mask, "attention_mask": mask, "max_new_tokens": 1 + 7 * 4, **sampling}
    text = model.generate(**call, assistant_model=helper, tree_config=config)
    whole = torch.tensor((list(cycle) * 9)[3 + len(cycle) :][: 1 + 7 * 4])
    assert torch.equal(text[:, ids.shape[1] :], whole.expand(batch, -1))
    stats = model.treespec_stats
    assert stats.rounds == 4
    assert stats.accepted_by_depth[5] == batch * 4


# -- refusals --


def refused(model: PreTrainedModel, helper: Any, match: str, error: type[Exception], **call: Any) -> None:
    text = model.generate(**prompt(1), max_new_tokens=4, do_sample=False)
    with pytest.raises(error, match=match):
        model.generate(**{**prompt(1), "tree_config": BUSHES, "max_new_tokens": 4, **call}, assistant_model=helper)
    assert torch.equal(text, model.generate(**prompt(1), max_new_tokens=4, do_sample=False))


def test_what_cannot_be_is_refused() -> None:
    model, helper = gemma.treed(), gemma.assistant()
    refused(tiny.treed("llama"), helper, "does not show (its )?keys and values", UnsupportedModelError)
    refused(model, gemma.assistant(size=48), "cannot read what it shows", UnsupportedModelError)
    refused(model, gemma.assistant(head_dim=4), "cannot read what it shows", UnsupportedModelError)
    refused(model, gemma.assistant(vocab_size=50), "vocabulary of 50 ids, and .* has 60", UnsupportedCallError)
    refused(model, helper, "synced_gpus=True", UnsupportedCallError, synced_gpus=True)
    ngrams = {"tree_config": BUSHES.replace(draft="ngram")}
    refused(model, helper, "draft='ngram'", UnsupportedCallError, **ngrams)
    refused(model, helper, "both say what drafts", UnsupportedCallError, use_mtp=True)
    other = gemma.assistant()
    with _compat.custom_attention(other, "hf_treespec_other", lambda *_, **__: None, "sdpa"):
        refused(model, other, "takes no tree mask", UnsupportedCallError)


@pytest.mark.parametrize("route", [Route.PATHS, Route.OWN_STATE, Route.STEPS])
def test_targets_without_a_tree_mask_are_refused(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    model, helper = enable(gemma.build()), gemma.assistant()
    monkeypatch.setattr(api_heads, "is_supported", lambda _: Support(True, route, ""))
    ran: list[Any] = []
    for each in (model, helper):
        each.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(UnsupportedModelError, match=f"the route '{re.escape(route.value)}'.* Leave assistant_model"):
        api_heads.find_head(model, WIDE, helper)
    assert not ran


def test_caches_that_cannot_be_read_between_forwards_are_refused() -> None:
    class Odd:
        pass

    class Cache:
        layers = (Odd(), Odd())

    with pytest.raises(UnsupportedCallError, match="layers of class Odd"):
        check_readable(Cache(), [1], "gemma4_assistant")
    check_readable(None, [1], "gemma4_assistant")
