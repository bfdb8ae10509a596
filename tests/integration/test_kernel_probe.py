"""Which models run an attention function that is put in place of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import special
import tiny
from hf_treespec import _compat
from hf_treespec.api import kernel_probe
from hf_treespec.api.kernel_probe import takes_custom_attention

TAKING = special.known(("gemma2", "gpt_oss", "llama4_text", "modernbert-decoder"))
KEEPING = special.known((*special.INDEXED, "doge", "gpt_neo", "minimax_m3_vl_text"))


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_probe, "_ANSWERS", type(kernel_probe._ANSWERS)())


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_families_that_do(family: str) -> None:
    assert takes_custom_attention(tiny.stock(family)) is None


@pytest.mark.parametrize("name", TAKING)
def test_windows_sinks_and_soft_caps_are_no_hindrance(name: str) -> None:
    assert takes_custom_attention(special.build(name)) is None


@pytest.mark.parametrize("name", KEEPING)
def test_models_that_choose_keys_keep_their_own(name: str) -> None:
    assert "chooses keys by itself" in str(takes_custom_attention(special.build(name)))


@pytest.mark.parametrize("name", special.known(("deepseek_v32", "glm_moe_dsa")))
def test_a_custom_name_would_switch_the_index_off(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Without the word of the config the comparison says so."""
    monkeypatch.setattr(kernel_probe, "chooses_keys", lambda config: False)
    assert takes_custom_attention(special.build(name)) is not None


def bloom() -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(vocab_size=37, hidden_size=16, n_layer=1, n_head=2)).eval()


def test_a_model_that_does_not_dispatch() -> None:
    assert takes_custom_attention(bloom()) is not None


def test_a_function_that_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel_probe._Attention.__call__

    def blind(self: Any, module: Any, query: Any, *states: Any, **kwargs: Any) -> Any:
        return right(self, module, query, *states[:2], torch.zeros((1, 1, 1, query.shape[2])), **kwargs)

    monkeypatch.setattr(kernel_probe._Attention, "__call__", blind)
    assert "its logits are off by" in str(takes_custom_attention(tiny.stock("llama")))


def test_it_leaves_no_trace_and_is_asked_once() -> None:
    model = copy.deepcopy(tiny.stock("llama")).train()
    before = tiny.fingerprint(model)
    names = set(ALL_ATTENTION_FUNCTIONS), set(AttentionMaskInterface())
    ran: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: ran.append(1))
    assert takes_custom_attention(model) is None and len(ran) == 2
    assert takes_custom_attention(model) is None and len(ran) == 2
    handle.remove()
    assert tiny.fingerprint(model) == before
    assert (set(ALL_ATTENTION_FUNCTIONS), set(AttentionMaskInterface())) == names
    assert _compat.attention_implementation(model) == "sdpa"
