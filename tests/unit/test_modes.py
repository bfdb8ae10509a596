"""Modes without trees are refused by the settings that ask for them, and only by those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationMixin

from hf_treespec import TreeConfig, UnsupportedCallError, enable, install, uninstall
from hf_treespec.api.modes import mode_settings, refuse_modes
from tiny import build, draft, prompt, stock, treed

ASKING: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 3}, "num_beams=3 .*use num_beams=1"),
    "beam_sample": ({"num_beams": 3, "do_sample": True}, "num_beams=3 "),
    "groups": (
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        "num_beams=4, num_beam_groups=2 .*use num_beams=1 and leave num_beam_groups out",
    ),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6 .*leave penalty_alpha out"),
    "constrained": ({"num_beams": 2, "force_words_ids": [[5]]}, r"force_words_ids=\[\[5\]\]"),
    "dola": ({"dola_layers": "low"}, "dola_layers='low'"),
}
# Settings of such modes that no mode comes of.
HARMLESS: dict[str, dict[str, Any]] = {
    "one_beam": {"num_beams": 1},
    "no_penalty": {"penalty_alpha": 0.0},
    "one_candidate": {"penalty_alpha": 0.6, "top_k": 1},
    "sampled": {"penalty_alpha": 0.6, "do_sample": True},
    "none": {"num_beams": None, "penalty_alpha": None, "dola_layers": None, "num_beam_groups": None},
}


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("assistant", [False, True])
@pytest.mark.parametrize("name", list(ASKING))
def test_mode_is_refused_by_its_settings(name: str, assistant: bool, trusted: bool) -> None:
    settings, message = ASKING[name]
    ids, _ = prompt("llama", 1)
    extra = {"assistant_model": draft("llama")} if assistant else {}
    with pytest.raises(UnsupportedCallError, match=f"{message}.*") as caught:
        treed("llama").generate(ids, tree_config=TreeConfig(), trust_remote_code=trusted, **settings, **extra)
    assert isinstance(caught.value, ValueError) and "with tree_config" in str(caught.value)


@pytest.mark.parametrize("name", list(HARMLESS))
def test_settings_that_ask_for_nothing_pass(name: str) -> None:
    assert mode_settings(HARMLESS[name].get) == {}
    ids, mask = prompt("llama", 1)
    if name not in ("sampled", "none"):
        call = {"attention_mask": mask, "max_new_tokens": 6, "pad_token_id": 0, **HARMLESS[name]}
        expected = stock("llama").generate(ids, **call)
        assert torch.equal(treed("llama").generate(ids, tree_config=TreeConfig(), **call), expected)


def test_settings_of_the_model_are_looked_at_too() -> None:
    model = enable(build("llama"))
    model.generation_config.num_beams = 3
    with pytest.raises(UnsupportedCallError, match="num_beams=3 with tree_config"):
        model.generate(prompt("llama", 1)[0], tree_config=TreeConfig())


def test_mode_that_no_setting_explains_is_named() -> None:
    with pytest.raises(UnsupportedCallError, match="generation mode 'new_search' with tree_config"):
        refuse_modes({}.get, "new_search")


@pytest.mark.parametrize("way", ["enabled", "installed"])
def test_continuous_batching_does_not_drop_the_tree(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Transformers would hand `tree_config` on among arguments that nobody reads.
    served: list[dict[str, Any]] = []

    def generate_batch(self: Any, inputs: Any, **kwargs: Any) -> dict[str, Any]:
        # The real one takes half a minute to start.
        served.append(kwargs)
        return {}

    monkeypatch.setattr(GenerationMixin, "generate_batch", generate_batch)
    ids, _ = prompt("llama", 1)
    message = "cache_implementation='paged'.*with tree_config"
    if way == "installed":
        install()
    try:
        model = treed("llama") if way == "enabled" else build("llama")
        with pytest.raises(UnsupportedCallError, match=message):
            model.generate(ids, cache_implementation="paged", tree_config=TreeConfig())
        with pytest.raises(UnsupportedCallError, match=message):
            model.generate_batch(ids.tolist(), tree_config=TreeConfig())
        assert served == []
        assert model.generate_batch(ids.tolist(), tree_config=None, max_new_tokens=3) == {}
        assert served == [{"max_new_tokens": 3}]
    finally:
        uninstall()
    assert GenerationMixin.generate_batch is generate_batch


def test_uninstalling_leaves_no_copy_of_an_inherited_method() -> None:
    before = dict(vars(GenerationMixin))
    install()
    assert "generate_batch" in vars(GenerationMixin)
    uninstall()
    assert dict(vars(GenerationMixin)) == before
