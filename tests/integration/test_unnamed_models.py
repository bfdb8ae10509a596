"""Models that nobody named: their route is found, and proven, by the probe alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from calls import GREEDY, SAMPLED, Pair, twice
from hf_treespec import enable, is_supported
from tiny import assert_lively, assert_same_cache, build, prompt

batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])
pytestmark = pytest.mark.filterwarnings("ignore::hf_treespec.TreeSpecWarning")


class Smear(nn.Module):
    """A causal convolution over the two tokens before, behind an embedding, with a state on the module itself.

    Args:
        table: the embedding.
        forgets: whether several tokens behind a cache begin anew, as in some models.
    """

    def __init__(self, table: nn.Embedding, *, forgets: bool) -> None:
        super().__init__()
        self.table, self.forgets = table, forgets
        self.weight = table.weight
        self.last: Tensor | None = None
        self.behind_a_cache = False

    def forward(self, ids: Tensor) -> Tensor:
        here = self.table(ids)
        old = self.last
        if not self.behind_a_cache or old is None or (self.forgets and ids.shape[1] > 1):
            old = here.new_zeros((len(ids), 2, here.shape[-1]))
        seen = torch.cat([old, here], dim=1)
        self.last = seen[:, -2:].clone()
        return here + 0.5 * seen[:, 1:-1] - 0.7 * seen[:, :-2]


class SmearingLlama(LlamaForCausalLM):
    """Attention, and a convolution whose state no cache of transformers holds."""

    _is_stateful = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        self.model.embed_tokens.behind_a_cache = cache is not None and cache.get_seq_length() > 0
        return super().forward(*args, **kwargs)


# `generate` reads the signature.
SmearingLlama.forward.__signature__ = __import__("inspect").signature(LlamaForCausalLM.forward)


def smearing(*, forgets: bool) -> PreTrainedModel:
    model = build("llama")
    model.__class__ = SmearingLlama
    model.model.embed_tokens = Smear(model.model.embed_tokens, forgets=forgets)
    # What it does is part of what it is: answers are remembered by class and config.
    model.config.forgets = forgets
    return model


def both(batch: int, *, forgets: bool, **arguments: Any) -> Pair:
    models = smearing(forgets=forgets), enable(smearing(forgets=forgets))
    ids, mask = prompt("llama", batch)
    return twice(ids, mask, models=models, max_new_tokens=20, **arguments)


def test_a_state_on_a_module_is_found() -> None:
    support = is_supported(smearing(forgets=False))
    assert support.ok and support.route == "paths+own-state", support
    support = is_supported(smearing(forgets=True))
    assert support.ok and support.route == "token-by-token", support


@batches
@samplings
@pytest.mark.parametrize("maker", ["half_right", "wide", "wrong_chain"])
def test_a_state_on_a_module_follows_the_accepted_path(batch: int, sampling: dict[str, Any], maker: str) -> None:
    pair = both(batch, forgets=False, maker=maker, return_dict_in_generate=True, **sampling)
    assert_lively(pair.expected.sequences)
    if maker != "wrong_chain":
        assert pair.stats.accepted_tokens > 0
    caches = [out.get("cache", out.get("past_key_values")) for out in (dict(pair.expected), dict(pair.actual))]
    assert_same_cache(*caches, prompt("llama", batch)[1])


@batches
@samplings
def test_a_model_that_forgets_is_decoded_plainly(batch: int, sampling: dict[str, Any]) -> None:
    pair = both(batch, forgets=True, **sampling)
    assert pair.stats.drafted_nodes == 0


class FlaggedLlama(LlamaForCausalLM):
    """Its own rule for the arguments of the next forward says that the first one is over, as some remote code does."""

    counts = False

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, *args: Any, later: int = 0, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits.roll(later, -1)
        return outputs

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, **kwargs: Any) -> Any:
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
        return {**model_kwargs, "later": model_kwargs.get("later", 0) + 1 if self.counts else 3}


class CountingLlama(FlaggedLlama):
    """That rule says something else at each token, which no tree could follow."""

    counts = True


class LastLogitsLlama(LlamaForCausalLM):
    """Gives the logits of the last token of a forward, whatever is asked for."""

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits[:, -1:]
        return outputs


def of_class(kind: type[LlamaForCausalLM]) -> PreTrainedModel:
    model = build("llama")
    model.__class__ = kind
    return model


@batches
@samplings
def test_arguments_go_on_by_the_rule_of_the_class(batch: int, sampling: dict[str, Any]) -> None:
    models = of_class(FlaggedLlama), enable(of_class(FlaggedLlama))
    assert is_supported(models[1]).route.masked
    ids, mask = prompt("llama", batch)
    pair = twice(ids, mask, models=models, max_new_tokens=20, **sampling)
    assert_lively(pair.expected)
    assert pair.stats.accepted_tokens > 0


def test_arguments_that_change_with_every_token_are_found_out() -> None:
    support = is_supported(of_class(CountingLlama))
    assert not support.ok and "its own _update_model_kwargs_for_generation changes" in support.reason, support


def test_a_model_that_leaves_logits_out_is_refused() -> None:
    support = is_supported(of_class(LastLogitsLlama))
    assert not support.ok, support
    assert support.reason.startswith("the probe was refused: its forward gives the logits of 1 of 16 tokens"), support
