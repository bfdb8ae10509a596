"""Where the layers of a decoder are, for drafts that skip some and for heads that read between them."""

from __future__ import annotations

import pytest
from torch import nn

import tiny
from conformance.zoo import models
from hf_treespec import _compat
from hf_treespec.api.layer_drafts import layers_of

# Names of the first layer. Git has a list of the same length for pictures, Bart one for its encoder; ModernBERT calls
# its LM head a decoder; Bloom and GPT-2 have their own words.
FIRST = {
    "git": "git.encoder.layer.0", "modernbert-decoder": "model.layers.0", "bart": "model.decoder.layers.0",
    "gpt2": "transformer.h.0", "bloom": "transformer.h.0", "mixtral": "model.layers.0",
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST)
def test_the_layers_of_the_part_that_reads_the_text(name: str) -> None:
    model = models.model_class(name)(models.config(name)).eval()
    layers = _compat.decoder_layers(model)
    assert layers[0] is model.get_submodule(FIRST[name])
    assert len(layers) == model.config.num_hidden_layers > 1
    # One answer for all.
    assert layers == layers_of(model).layers(model, range(len(layers)))


def test_another_list_that_is_no_longer_and_a_list_of_lists() -> None:
    model = tiny.build("llama")
    layers = [*model.model.layers]
    model.model.more = nn.ModuleList(nn.Linear(2, 2) for _ in layers)
    assert _compat.decoder_layers(model) == layers == layers_of(model).layers(model, range(2))
    model.model.layers[0].experts = nn.ModuleList([nn.Linear(4, 4)])
    assert _compat.decoder_layers(model) == layers
    del model.model.layers
    model.model.more = nn.ModuleList()
    assert _compat.decoder_layers(model) == []


def test_a_list_that_does_not_run_in_order() -> None:
    model = tiny.build("llama")
    one, two = model.model.layers
    model.model.layers = nn.ModuleList([one, two, one])
    from hf_treespec.api.layer_plan import find_layers

    assert "does not run model.layers.0 to model.layers.0 one by one, each once" in find_layers(model)
    del model.model.layers
    assert find_layers(model) == "it has no list of layers"
