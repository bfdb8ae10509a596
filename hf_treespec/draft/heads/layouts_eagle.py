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

import torch
from torch import Tensor, nn

from hf_treespec import _compat
from hf_treespec.draft.heads.base import DraftHead, check_ids
from hf_treespec.draft.heads.eagle import EagleHead
from hf_treespec.draft.heads.layout import (
    Config,
    Layout,
    Tensors,
    dtype_name,
    expect_keys,
    fill,
    say_unknown_keys,
)
from hf_treespec.errors import TreeConfigError

__all__ = ["EAGLE", "EAGLE3", "SPECULATORS"]

_IDS = "eagle_aux_hidden_state_layer_ids"
_MAPS = ("d2t", "t2d")
_NESTED = ("norm_before_fc", "fc_norm", "norm_output")
# (Inside of a config of speculators what is not there is the default of transformers.)
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
# What the config of a head has besides that of its decoder.
_OWN = (
    "draft_vocab_size", "target_hidden_size", "eagle_config", "norm_before_residual", "norm_before_fc", "norm_output",
    "fc_norm", _IDS, "bias", "qkv_bias", "logit_scale",
)  # fmt: skip
_SPECULATORS = (
    "speculators_model_type", "speculators_config", "speculators_version", "transformer_layer_config",
    "transformer_layer_architecture", "layernorms", "fusion_bias", "embed_requires_grad", "has_no_defaults_at_init",
    "enable_sp_ulysses",
)  # fmt: skip


def _eagle(head: DraftHead, layout: str, version: int | None = None) -> EagleHead:
    if not isinstance(head, EagleHead) or version not in (None, head.version):
        raise TreeConfigError(f"a {head.kind} head cannot be written in the layout {layout!r}")
    return head


def _decoder_config(layout: str, config: Config) -> Any:
    """Config of transformers for the decoder."""
    model_type = str(config.get("model_type") or "llama")
    try:
        known = _compat.config_keys(model_type)
    except ValueError as error:
        raise TreeConfigError(f"config.json of a checkpoint in the layout {layout!r}: {error}") from error
    say_unknown_keys(layout, config, {*known, *_OWN, *_SPECULATORS})
    settings = {key: value for key, value in config.items() if key in known and key not in ("model_type", "dtype")}
    settings.pop("torch_dtype", None)
    settings["num_hidden_layers"] = int(config.get("num_hidden_layers") or 1)
    try:
        return _compat.make_config(model_type, settings)
    except (TypeError, ValueError) as error:
        raise TreeConfigError(f"config.json of a checkpoint in the layout {layout!r}: {error}") from error


def _fit_biases(head: EagleHead, tensors: Tensors, rename: Callable[[DraftHead, str], str]) -> None:
    """Which maps of the decoder have a bias is told by the tensors: configs name it in several ways."""
    for name, module in head.named_modules():
        if name.startswith("decoder.") and isinstance(module, nn.Linear):
            wanted = rename(head, f"{name}.bias") in tensors
            module.register_parameter("bias", nn.Parameter(torch.zeros(module.out_features)) if wanted else None)


def _refuse(layout: str, config: Config, **only: Any) -> None:
    for key, value in only.items():
        given = config.get(key)
        if given is not None and given != value:
            raise TreeConfigError(
                f"config.json of a checkpoint in the layout {layout!r} has {key}={given!r}: only {value!r} is read"
            )


def _draft_ids(layout: str, config: Config, tensors: Tensors, vocab: int) -> Tensor | None:
    """Target's id of each id of the head: `d2t` is how much larger it is; `t2d` marks them in the target's."""
    reduced = int(config.get("draft_vocab_size") or vocab)
    steps = tensors.get("d2t")
    if steps is None:
        if reduced != vocab:
            raise TreeConfigError(f"tensors of a checkpoint in the layout {layout!r}: missing: d2t")
        return None
    if steps.shape != (reduced,):
        raise TreeConfigError(
            f"tensor 'd2t' has shape {tuple(steps.shape)}: expected ({reduced},), by draft_vocab_size"
        )
    ids = torch.arange(reduced) + steps.long()
    check_ids("tensor 'd2t'", ids, vocab)
    marks = tensors.get("t2d")
    if marks is not None and (marks.shape != (vocab,) or not torch.equal(marks.nonzero()[:, 0], ids.sort().values)):
        raise TreeConfigError("tensor 't2d' marks other ids of the target than 'd2t' names")
    return None if reduced == vocab and not bool(steps.any()) else ids


def _maps(head: DraftHead) -> dict[str, Tensor]:
    ids = head.ids
    if ids is None:
        return {}
    marks = torch.zeros(head.vocab_size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids), device=ids.device), "t2d": marks}


def _third(
    layout: str, config: Config, decoder: Any, tensors: Tensors, layers: Iterable[int] | None, first: str
) -> DraftHead:
    """An EAGLE-3 head; `first` is the name of its first layer."""
    _refuse(layout, config, logit_scale=1.0, fc_norm=False)
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
        ids_V=_draft_ids(layout, config, tensors, int(decoder.vocab_size)),
        fusion_bias="fc.bias" in tensors,
        norm_before_fusion=bool(config.get("norm_before_fc", False)),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_output=bool(config.get("norm_output", False)),
    )

    def rename(_: DraftHead, own: str) -> str:
        return _third_name(own, first)

    _fit_biases(head, tensors, rename)
    return fill(head, layout, config, tensors, rename, unused=_MAPS)


def _third_name(own: str, first: str) -> str:
    return own.replace("decoder.layers.0.", f"{first}.").replace("decoder.", "")


def _decoder_settings(head: EagleHead) -> dict[str, Any]:
    settings: dict[str, Any] = head.config.to_dict()
    for key in ("architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype"):
        settings.pop(key, None)
    # As configs were written before transformers 5, for whoever reads them so.
    rope = settings.get("rope_parameters") or {}
    if "rope_theta" in rope:
        settings["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        settings["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {**settings, "vocab_size": head.vocab_size, "tie_word_embeddings": False}


# -- EAGLE-1 and -2 --


def _first_name(head: DraftHead, own: str) -> str:
    return own.removeprefix("decoder.")


def _inverse_frequencies(tensors: Tensors) -> list[str]:
    # Older checkpoints keep this table; it follows from the config.
    return [name for name in tensors if name.endswith("rotary_emb.inv_freq")]


def _load_first(config: Config, tensors: Tensors) -> DraftHead:
    layout = "eagle"
    expect_keys(layout, config, _SIZES)
    _refuse(layout, config, logit_scale=1.0)
    return _first(layout, config, _decoder_config(layout, config), tensors, _first_name, "fc")


def _first(
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
    _fit_biases(head, tensors, rename)
    return fill(head, layout, config, tensors, rename, unused=_inverse_frequencies(tensors))


def _first_config(head: DraftHead, target: str) -> dict[str, Any]:
    own = _eagle(head, "eagle", 1)
    bias = own.fc.bias is not None
    return {**_decoder_settings(own), "architectures": ["LlamaForCausalLMEagle"], "bias": bias,
            "torch_dtype": dtype_name(own)}  # fmt: skip


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
    _refuse(layout, nested, use_aux_hidden_state=True)
    ids, top = nested.get(_IDS), config.get(_IDS)
    # NVIDIA's name none by an empty list.
    layers = [int(layer) + 1 for layer in ids] if ids else top
    first = "midlayer" if any(name.startswith("midlayer.") for name in tensors) else "layers.0"
    # And they say there how the head computes.
    merged = {**{key: nested[key] for key in _NESTED if key in nested}, **config}
    head = _third(layout, merged, _decoder_config(layout, config), tensors, layers, first)
    assert head.source is not None
    head.source.config = dict(config)
    return head


def _layout_three_name(head: DraftHead, own: str) -> str:
    source = head.source
    plain = source is not None and source.layout == "eagle3" and "layers.0.hidden_norm.weight" in source.tensors
    return _third_name(own, "layers.0" if plain else "midlayer")


def _third_config(head: DraftHead, target: str) -> dict[str, Any]:
    own = _eagle(head, "eagle3", 3)
    if own.input_norm is not None:
        raise TreeConfigError("a head with norm_before_fusion cannot be written in the layout 'eagle3'")
    config = {
        **_decoder_settings(own),
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
        config[_IDS] = list(own.layers)
        config["eagle_config"] = {_IDS: [layer - 1 for layer in own.layers], "use_aux_hidden_state": True}
    return config


EAGLE3 = Layout(
    name="eagle3",
    file="model.safetensors",
    knows=lambda config, names: "draft_vocab_size" in config or any(n.startswith("midlayer.") for n in names),
    load=_load_third,
    rename=_layout_three_name,
    config=_third_config,
    extra=_maps,
)

# -- speculators --


def _load_speculators(config: Config, tensors: Tensors) -> DraftHead:
    layout, kind = "speculators", config.get("speculators_model_type")
    expect_keys(layout, config, ["transformer_layer_config"])
    inner = {**config["transformer_layer_config"]}
    say_unknown_keys(layout, config, {*_OWN, *_SPECULATORS})
    if kind == "eagle3":
        merged = {key: value for key, value in config.items() if key in _OWN}
        decoder = _decoder_config(layout, inner)
        head = _third(layout, {**inner, **merged}, decoder, tensors, config.get(_IDS), "layers.0")
        assert head.source is not None
        head.source.config = dict(config)
        return head
    if kind != "eagle":
        raise TreeConfigError(
            f"config.json has speculators_model_type={kind!r}: expected 'eagle3' or 'eagle'; other kinds are not read"
        )
    _refuse(layout, config, layernorms=False, transformer_layer_architecture="LlamaDecoderLayer")
    return _first(layout, config, _decoder_config(layout, inner), tensors, _speculators_name, "fusion_fc")


def _speculators_name(head: DraftHead, own: str) -> str:
    if _eagle(head, "speculators").version == 3:
        return _third_name(own, "layers.0")
    return own.replace("decoder.layers.0.", "transformer.").replace("fc.", "fusion_fc.", own.startswith("fc."))


def _speculators_config(head: DraftHead, target: str) -> dict[str, Any]:
    own = _eagle(head, "speculators")
    third = own.version == 3
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator" if third else "EagleSpeculator"],
        "speculators_model_type": "eagle3" if third else "eagle",
        "speculators_config": {
            "algorithm": "eagle3" if third else "eagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": _decoder_settings(own),
        "torch_dtype": dtype_name(own),
        "tie_word_embeddings": False,
    }
    if not third:
        return {**config, "layernorms": False, "fusion_bias": own.fc.bias is not None,
                "transformer_layer_architecture": "LlamaDecoderLayer"}  # fmt: skip
    config["draft_vocab_size"] = own.draft_vocab
    config["norm_before_residual"] = own.decoder.layers[0].norm_before_residual  # type: ignore[union-attr, index]
    if own.input_norm is not None:
        config["norm_before_fc"] = True
    if own.norm_output:
        config["norm_output"] = True
    if own.hidden_size != own.width:
        config["target_hidden_size"] = own.hidden_size
    if own.layers is not None:
        config[_IDS] = list(own.layers)
    return config


SPECULATORS = Layout(
    name="speculators",
    file="model.safetensors",
    knows=lambda config, names: "speculators_model_type" in config or "speculators_config" in config,
    load=_load_speculators,
    rename=_speculators_name,
    config=_speculators_config,
    extra=_maps,
)
