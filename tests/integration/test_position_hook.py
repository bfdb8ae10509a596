"""Models that count positions by their cache, and that nobody has named: what is found, and whole calls."""

from __future__ import annotations

import functools
import inspect
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import slot_models
from calls import BUSHES, CHAINS_OF_4, GREEDY, SAMPLED, twice
from hf_treespec import Support, _compat, enable, is_supported
from hf_treespec.api import hooks
from hf_treespec.routes import Route
from slot_models import VOCAB, prompt
from tiny import assert_same_cache

batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])


class NoPositions(LlamaForCausalLM):
    """Its signature has no position_ids, so that `generate` tells it none: rotary angles go by the cache."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


_SIGNATURE = inspect.signature(LlamaForCausalLM.forward)
NoPositions.forward.__signature__ = _SIGNATURE.replace(
    parameters=[p for name, p in _SIGNATURE.parameters.items() if name != "position_ids"]
)


class Projected(nn.Module):
    """A table of positions behind which a linear layer reads: only the table makes positions."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, width)
        self.project = nn.Linear(width, width)

    def forward(self, first: int, count: int) -> Tensor:
        return self.project(self.table(torch.arange(first, first + count)))


class TabledModel(LlamaModel):
    """Learned positions beside rotary ones, both by the cache."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.position_table = Projected(64, config.hidden_size)
        self.post_init()

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("position_ids", None)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        past = 0 if cache is None else int(cache.get_seq_length())
        words = self.embed_tokens(input_ids)
        return super().forward(inputs_embeds=words + self.where(past, words.shape[1]), **kwargs)

    def where(self, past: int, count: int) -> Tensor:
        return self.position_table(past, count)


class Tabled(NoPositions):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = TabledModel(config)
        self.post_init()


class Unhooked(Tabled):
    """Takes the rows of its table without calling any module."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.where = self.looked_up

    def looked_up(self, past: int, count: int) -> Tensor:
        table = self.model.position_table
        return table.table.weight[past : past + count] @ table.project.weight.T


def build(cls: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.5, bos_token_id=1,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return cls(config).eval().double()


@functools.cache
def pair_of(cls: type[LlamaForCausalLM]) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    return build(cls), enable(build(cls))


HOOKED = {NoPositions: "model.rotary_emb", Tabled: "model.position_table.table, model.rotary_emb"}


@pytest.mark.parametrize("cls", HOOKED)
@batches
@samplings
@pytest.mark.parametrize("maker", ["half_right", "deep", "chain"])
def test_a_model_that_nobody_has_named(cls: Any, batch: int, sampling: dict[str, Any], maker: str) -> None:
    assert f"the outputs of {HOOKED[cls]} taken by depth" in is_supported(pair_of(cls)[0]).reason
    ids, mask = prompt(batch)
    config = CHAINS_OF_4 if maker == "chain" else BUSHES
    call = {"maker": maker, "config": config, "max_new_tokens": 21, "return_dict_in_generate": True, **sampling}
    pair = twice(ids, mask, models=pair_of(cls), **call)
    assert_same_cache(*(_compat.cache_from_outputs(out) for out in (pair.expected, pair.actual)), mask)
    if maker == "chain":
        assert (pair.stats.rounds, pair.stats.accepted_tokens) == (4, 16 * batch)


@batches
def test_a_model_without_a_module_for_it_goes_path_by_path(batch: int) -> None:
    assert is_supported(pair_of(Unhooked)[0]).route == "paths"
    ids, mask = prompt(batch)
    twice(ids, mask, models=pair_of(Unhooked), maker="deep", max_new_tokens=12)


@batches
def test_positions_that_skip_padding_go_path_by_path(batch: int) -> None:
    stock, treed = (slot_models.build("trocr", use_learned_position_embeddings=False) for _ in range(2))
    assert is_supported(stock).route == "paths"
    ids, mask = prompt(batch)
    twice(ids, mask, models=(stock, enable(treed)), maker="deep", max_new_tokens=12)


@batches
def test_positions_that_are_told_and_counted_are_taken_by_depth_once(
    monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """Sent down this route by force, a model that heeds position_ids is told slots: nothing is moved twice."""
    forced = Support(True, Route.POSITION_HOOK, "by this test")
    monkeypatch.setattr(hooks, "is_supported", lambda model: forced)
    ids, mask = prompt(batch)
    pair = twice(ids, mask, models=pair_of(LlamaForCausalLM), maker="wide", max_new_tokens=21)
    assert pair.stats.accepted_tokens == 13 * batch


@pytest.mark.parametrize("family", ["bart", "falcon", "bloom"])
def test_calls_of_several_threads_over_one_model(family: str) -> None:
    """One with trees and one without, at the same time: a correction touches its own thread's trees alone."""
    model = enable(slot_models.build(family))
    ids, mask = prompt(1)
    wanted = slot_models.stock(family).generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    wrong: list[str] = []

    def work(name: str, **more: Any) -> None:
        for _ in range(4):
            out = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False, **more)
            if not torch.equal(out, wanted):
                wrong.append(name)

    trees = {"tree_config": BUSHES.replace(draft="ngram")}
    threads = [threading.Thread(target=work, args=(f"trees {i}",), kwargs=trees) for i in range(2)]
    threads.append(threading.Thread(target=work, args=("plain",)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not any(module._forward_hooks for module in model.modules())
