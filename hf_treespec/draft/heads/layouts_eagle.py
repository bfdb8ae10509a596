"""Layouts of EAGLE heads.

Sources: SafeAILab/EAGLE, eagle/model/cnets1.py (EAGLE-1 and -2) and cnets.py (EAGLE-3); vLLM, models/llama_eagle.py
and llama_eagle3.py; SGLang, models/llama_eagle3.py and models/llama.py; SpecForge, configs/*-eagle3.json;
vllm-project/speculators, models/eagle3/{config,core,model_definitions}.py and models/eagle.py.

Two ways to name the hidden states that EAGLE-3 reads: `eagle_aux_hidden_state_layer_ids` at the top of a config counts
as `output_hidden_states` does (speculators, vLLM); inside of `eagle_config` it names the layers whose output is read,
from 0 (SGLang, SpecForge), which is one less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hf_treespec.draft.heads.base import DraftHead
from hf_treespec.draft.heads.eagle import EagleHead
from hf_treespec.draft.heads.layout import Config, Layout, Tensors, dtype_name, expect_keys, fill
from hf_treespec.draft.heads.layout_decoder import (
    decoder_config,
    decoder_settings,
    draft_ids,
    fit_biases,
    refuse,
    vocabulary_maps,
)
from hf_treespec.errors import TreeConfigError

__all__ = ["EAGLE", "EAGLE3", "EAGLE_KEYS", "LAYER_IDS", "as_eagle", "first_head", "third_head", "third_name"]

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_MAPS = ("d2t", "t2d")
_NESTED = ("norm_before_fc", "fc_norm", "norm_output")
# (Inside of a config of speculators what is not there is the default of transformers.)
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
# What the config of a head has besides that of its decoder.
EAGLE_KEYS = (
    "draft_vocab_size", "target_hidden_size", "eagle_config", "norm_before_residual", "norm_before_fc", "norm_output",
    "fc_norm", LAYER_IDS, "bias", "qkv_bias", "logit_scale",
)  # fmt: skip


def as_eagle(head: DraftHead, layout: str, version: int | None = None) -> EagleHead:
    """The head, if it is one of EAGLE's, of that version; else a `TreeConfigError`."""
    if not isinstance(head, EagleHead) or version not in (None, head.version):
        raise TreeConfigError(f"a {head.kind} head cannot be written in the layout {layout!r}")
    return head


def third_head(
    layout: str, config: Config, decoder: Any, tensors: Tensors, layers: Iterable[int] | None, first: str
) -> DraftHead:
    """An EAGLE-3 head; `first` is the name of its first layer."""
    refuse(layout, config, logit_scale=1.0, fc_norm=False)
    fusion = tensors.get("fc.weight")
    if fusion is None:
        raise TreeConfigError(f"tensors of a checkpoint in the layout {layout!r}: missing: fc.weight")
    hidden = int(config.get("target_hidden_size") or decoder.hidden_size)
    if "lm_head.weight" not in tensors and config.get("tie_word_embeddings"):
        raise TreeConfigError(f"config.json of a checkpoint in the layout {layout!r} ties an LM head: it is not read")
    head = EagleHead(
        decoder,
        hidden_size=hidden,
        vocab_size=int(decoder.vocab_size),
        layers=tuple(int(layer) for layer in layers or ()) or None,
        feature_count=max(1, fusion.shape[1] // hidden),
        embeddings="embed_tokens.weight" in tensors,
        lm_head="lm_head.weight" in tensors,
        ids_V=draft_ids(layout, config, tensors, int(decoder.vocab_size)),
        fusion_bias="fc.bias" in tensors,
        norm_before_fusion=bool(config.get("norm_before_fc", False)),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_output=bool(config.get("norm_output", False)),
    )

    def rename(_: DraftHead, own: str) -> str:
        return third_name(own, first)

    fit_biases(head, tensors, rename)
    return fill(head, layout, config, tensors, rename, unused=_MAPS)


def third_name(own: str, first: str) -> str:
    """What layouts call a tensor of an EAGLE-3 head whose first layer has this name."""
    return own.replace("decoder.layers.0.", f"{first}.").replace("decoder.", "")


# -- EAGLE-1 and -2 --


def _first_name(head: DraftHead, own: str) -> str:
    return own.removeprefix("decoder.")


def _inverse_frequencies(tensors: Tensors) -> list[str]:
    # Older checkpoints keep this table; it follows from the config.
    return [name for name in tensors if name.endswith("rotary_emb.inv_freq")]


def _load_first(config: Config, tensors: Tensors) -> DraftHead:
    layout = "eagle"
    expect_keys(layout, config, _SIZES)
    refuse(layout, config, logit_scale=1.0)
    return first_head(layout, config, decoder_config(layout, config, EAGLE_KEYS), tensors, _first_name, "fc")


def first_head(
    layout: str, config: Config, decoder: Any, tensors: Tensors, rename: Callable[[DraftHead, str], str], fusion: str
) -> DraftHead:
    """An EAGLE-1 or -2 head; `fusion` is the name of the map that joins embeddings and features."""
    head = EagleHead(
        decoder,
        hidden_size=int(decoder.hidden_size),
        vocab_size=int(decoder.vocab_size),
        version=1,
        embeddings="embed_tokens.weight" in tensors,
        lm_head="lm_head.weight" in tensors,
        fusion_bias=f"{fusion}.bias" in tensors,
    )
    fit_biases(head, tensors, rename)
    return fill(head, layout, config, tensors, rename, unused=_inverse_frequencies(tensors))


def _first_config(head: DraftHead, target: str) -> dict[str, Any]:
    own = as_eagle(head, "eagle", 1)
    bias = own.fc.bias is not None
    return {**decoder_settings(own.config), "vocab_size": own.vocab_size, "bias": bias,
            "architectures": ["LlamaForCausalLMEagle"], "torch_dtype": dtype_name(own)}  # fmt: skip


EAGLE = Layout(
    name="eagle",
    file="model.safetensors",
    knows=lambda config, names: any(n.startswith("layers.0.self_attn.") for n in names) and "fc.weight" in names,
    load=_load_first,
    rename=_first_name,
    config=_first_config,
)

# -- EAGLE-3 --


def _load_third(config: Config, tensors: Tensors) -> DraftHead:
    layout = "eagle3"
    expect_keys(layout, config, _SIZES)
    nested = config.get("eagle_config") or {}
    refuse(layout, nested, use_aux_hidden_state=True)
    ids, top = nested.get(LAYER_IDS), config.get(LAYER_IDS)
    # NVIDIA's name none by an empty list.
    layers = [int(layer) + 1 for layer in ids] if ids else top
    first = "midlayer" if any(name.startswith("midlayer.") for name in tensors) else "layers.0"
    # And they say there how the head computes.
    merged = {**{key: nested[key] for key in _NESTED if key in nested}, **config}
    head = third_head(layout, merged, decoder_config(layout, config, EAGLE_KEYS), tensors, layers, first)
    assert head.source is not None
    head.source.config = dict(config)
    return head


def _layout_three_name(head: DraftHead, own: str) -> str:
    source = head.source
    plain = source is not None and source.layout == "eagle3" and "layers.0.hidden_norm.weight" in source.tensors
    return third_name(own, "layers.0" if plain else "midlayer")


def _third_config(head: DraftHead, target: str) -> dict[str, Any]:
    own = as_eagle(head, "eagle3", 3)
    if own.input_norm is not None:
        raise TreeConfigError("a head with norm_before_fusion cannot be written in the layout 'eagle3'")
    config = {
        **decoder_settings(own.config),
        "vocab_size": own.vocab_size,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": own.draft_vocab,
        "torch_dtype": dtype_name(own),
    }
    if own.hidden_size != own.width:
        config["target_hidden_size"] = own.hidden_size
    if own.decoder.layers[0].norm_before_residual:  # type: ignore[union-attr, index]
        config["norm_before_residual"] = True
    if own.norm_output:
        config["norm_output"] = True
    if own.layers is not None:
        if 0 in own.layers:
            raise TreeConfigError("a head that reads hidden state 0 cannot be written in the layout 'eagle3'")
        config[LAYER_IDS] = list(own.layers)
        config["eagle_config"] = {LAYER_IDS: [layer - 1 for layer in own.layers], "use_aux_hidden_state": True}
    return config


EAGLE3 = Layout(
    name="eagle3",
    file="model.safetensors",
    knows=lambda config, names: "draft_vocab_size" in config or any(n.startswith("midlayer.") for n in names),
    load=_load_third,
    rename=_layout_three_name,
    config=_third_config,
    extra=vocabulary_maps,
)
