"""Where the tiny twin of a model cannot take a tree, and where there is none."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, MambaConfig, PreTrainedConfig, PreTrainedModel
from transformers import LlamaForCausalLM as Llama

from hf_treespec import is_supported
from hf_treespec.twin import TwinError, tiny_twin

# Threads only cost time at these sizes.
torch.set_num_threads(1)

TOLD = ", in a tiny twin of this config"


def skeleton(model_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return model_class(config)  # type: ignore[no-any-return]


class MixingLlama(Llama):
    """Its rows look at one another, so that neither a mask nor a path batch is heeded."""

    @functools.wraps(Llama.forward)
    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(input_ids=input_ids, attention_mask=None, position_ids=None, **kwargs)
        outputs.logits = outputs.logits.cumsum(1) + outputs.logits.sum(0, keepdim=True)
        return outputs


class OneByOneLlama(Llama):
    """Fails behind a cache."""

    @functools.wraps(Llama.forward)
    def forward(self, input_ids: Any, use_cache: Any = None, **kwargs: Any) -> Any:
        if use_cache:
            raise RuntimeError("no cache, please")
        return super().forward(input_ids=input_ids, use_cache=use_cache, **kwargs)


@pytest.mark.parametrize(
    ("cls", "said"), [(MixingLlama, "as batch rows alike"), (OneByOneLlama, "RuntimeError: no cache, please")]
)
def test_a_no_of_the_twin_is_a_no(cls: type[Llama], said: str) -> None:
    support = is_supported(skeleton(cls, LlamaConfig()))
    assert (support.ok, support.route) == (False, "refuse")
    assert said in support.reason and support.reason.endswith(TOLD)


class LargeLlama(Llama):
    """Is not made in small sizes."""

    def __init__(self, config: LlamaConfig) -> None:
        if config.hidden_size < 1000:
            raise ValueError("hidden_size:\n 1000 at least")
        super().__init__(config)


class WideLlama(Llama):
    """Has a size that no config names."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.wide = nn.Linear(8192, 8192)


class Rare(nn.Module):
    """Is in the last of many layers only."""


class LateLlama(Llama):
    """Has a layer of a kind of its own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        if config.num_hidden_layers > 39:
            self.model.layers[39].rare = Rare()


class SightedLlama(Llama):
    """Reads no text alone."""

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        raise KeyError("pixels")


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (LargeLlama, "ValueError: hidden_size: 1000 at least"),
        (WideLlama, "67"),
        (LateLlama, "not all kinds of Rare are left in it"),
        (SightedLlama, "KeyError: 'pixels'"),
    ],
)
def test_where_there_is_no_twin_the_answer_says_why(cls: type[Llama], why: str) -> None:
    model = skeleton(cls, LlamaConfig(num_hidden_layers=40 if cls is LateLlama else 2))
    support = is_supported(model)
    assert (support.ok, support.route) == (True, "mask")
    told = "by class, config and cache layers; not probed, parameters are on the meta device and no tiny twin of this "
    assert support.reason.startswith(told + "config can be built: " + why)
    if cls is not LateLlama:
        with pytest.raises(TwinError, match=why), tiny_twin(model):
            pass


def test_layers_are_added_until_all_kinds_are_there() -> None:
    class LaterLlama(LateLlama):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            if config.num_hidden_layers > 9:
                self.model.layers[9].rare = Rare()

    with tiny_twin(skeleton(LaterLlama, LlamaConfig(num_hidden_layers=20))) as twin:
        assert twin.config.num_hidden_layers == 12


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("none left")])
def test_running_out_of_memory_says_nothing_about_the_model(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullLlama(Llama):
        pass

    def full(*args: Any, **kwargs: Any) -> Any:
        raise error

    model = skeleton(FullLlama, LlamaConfig())
    with monkeypatch.context() as patched:
        patched.setattr(FullLlama, "forward", full)
        with pytest.raises(type(error)):
            is_supported(model)
    assert "not probed" not in is_supported(model).reason


def test_what_is_refused_without_a_look_needs_no_twin() -> None:
    model = skeleton(transformers.LlamaModel, LlamaConfig())
    assert is_supported(model).reason == "the model cannot generate"


def test_a_twin_reads_one_token_a_forward_if_the_model_does() -> None:
    support = is_supported(skeleton(transformers.MambaForCausalLM, MambaConfig()))
    assert (support.ok, support.route) == (True, "token-by-token") and support.reason.endswith(TOLD)
