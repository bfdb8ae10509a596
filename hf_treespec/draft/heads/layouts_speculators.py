"""The layout of vllm-project/speculators, in which vLLM serves heads of several kinds.

Sources: vllm-project/speculators, models/eagle3/{config,core,model_definitions}.py, models/eagle.py,
models/dflash/{config,core,model_definitions}.py and convert/dflash/converter.py.
"""

from __future__ import annotations

from typing import Any

from hf_treespec.draft.heads.base import DraftHead
from hf_treespec.draft.heads.dflash import DFlashHead
from hf_treespec.draft.heads.layout import Config, Layout, Tensors, dtype_name, expect_keys, say_unknown_keys
from hf_treespec.draft.heads.layout_decoder import decoder_config, decoder_settings, refuse, vocabulary_maps
from hf_treespec.draft.heads.layouts_dflash import SPECULATOR_KEYS, block_name, load_speculator, speculator_config
from hf_treespec.draft.heads.layouts_eagle import (
    EAGLE_KEYS,
    LAYER_IDS,
    as_eagle,
    first_head,
    third_head,
    third_name,
)
from hf_treespec.errors import TreeConfigError

__all__ = ["SPECULATORS"]

_NAME = "speculators"
_KEYS = (
    "speculators_model_type", "speculators_config", "speculators_version", "transformer_layer_config",
    "transformer_layer_architecture", "layernorms", "fusion_bias", "embed_requires_grad", "has_no_defaults_at_init",
    "enable_sp_ulysses",
)  # fmt: skip


def _load(config: Config, tensors: Tensors) -> DraftHead:
    kind = config.get("speculators_model_type")
    expect_keys(_NAME, config, ["transformer_layer_config"])
    inner = {**config["transformer_layer_config"]}
    more = SPECULATOR_KEYS if kind == "dflash" else EAGLE_KEYS
    say_unknown_keys(_NAME, config, {*more, *_KEYS})
    if kind == "dflash":
        return load_speculator(_NAME, config, inner, tensors)
    if kind == "eagle3":
        merged = {key: value for key, value in config.items() if key in EAGLE_KEYS}
        decoder = decoder_config(_NAME, inner, EAGLE_KEYS)
        head = third_head(_NAME, {**inner, **merged}, decoder, tensors, config.get(LAYER_IDS), "layers.0")
        assert head.source is not None
        head.source.config = dict(config)
        return head
    if kind != "eagle":
        raise TreeConfigError(
            f"config.json has speculators_model_type={kind!r}: expected 'eagle3', 'eagle' or 'dflash'; other "
            "kinds are not read"
        )
    refuse(_NAME, config, layernorms=False, transformer_layer_architecture="LlamaDecoderLayer")
    return first_head(_NAME, config, decoder_config(_NAME, inner, EAGLE_KEYS), tensors, _tensor_name, "fusion_fc")


def _tensor_name(head: DraftHead, own: str) -> str:
    if isinstance(head, DFlashHead):
        return block_name(head, own)
    if as_eagle(head, _NAME).version == 3:
        return third_name(own, "layers.0")
    return own.replace("decoder.layers.0.", "transformer.").replace("fc.", "fusion_fc.", own.startswith("fc."))


def _config(head: DraftHead, target: str) -> dict[str, Any]:
    """What all kinds have, with that of the kind."""
    if isinstance(head, DFlashHead):
        kind, architecture, ahead, more = "dflash", "DFlashDraftModel", head.max_depth, speculator_config(head)
    else:
        version = as_eagle(head, _NAME).version
        kind = "eagle3" if version == 3 else "eagle"
        architecture = "Eagle3Speculator" if version == 3 else "EagleSpeculator"
        ahead, more = 5, _eagle_config(head)
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": ahead}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "torch_dtype": dtype_name(head),
        "tie_word_embeddings": False,
        **more,
    }


def _eagle_config(head: DraftHead) -> dict[str, Any]:
    own = as_eagle(head, _NAME)
    config: dict[str, Any] = {
        "transformer_layer_config": {**decoder_settings(own.config), "vocab_size": own.vocab_size}
    }
    if own.version != 3:
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
        config[LAYER_IDS] = list(own.layers)
    return config


SPECULATORS = Layout(
    name=_NAME,
    file="model.safetensors",
    knows=lambda config, names: "speculators_model_type" in config or "speculators_config" in config,
    load=_load,
    rename=_tensor_name,
    config=_config,
    extra=vocabulary_maps,
)
