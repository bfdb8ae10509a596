"""Layouts of DFlash heads.

Sources: z-lab/dflash, dflash/model.py; vLLM, models/qwen3_dflash.py; vllm-project/speculators, models/dflash and
convert/dflash/converter.py; transformers, models/muse_glimmer_assistant.

The layers that a head reads are named by their number from 0 (`target_layer_ids`: z-lab, transformers), or as hidden
states (`aux_hidden_state_layer_ids`: speculators), which is one more. Layers with a sliding window attend to the left
only, unless the config says otherwise; in transformers to both sides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from hf_treespec import _compat
from hf_treespec.draft.heads.base import DraftHead
from hf_treespec.draft.heads.dflash import DFlashHead
from hf_treespec.draft.heads.layout import Config, Layout, Tensors, dtype_name, expect_keys, fill, say_unknown_keys
from hf_treespec.draft.heads.layout_decoder import decoder_config, decoder_settings, draft_ids, fit_biases, refuse
from hf_treespec.errors import TreeConfigError

__all__ = ["DFLASH", "DFLASH_HF", "SPECULATOR_KEYS", "block_name", "load_speculator", "speculator_config"]

_SLIDING, _FULL = "sliding_attention", "full_attention"
# What the decoder takes of a config of transformers.
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_parameters", "max_position_embeddings", "hidden_act", "attention_dropout", "layer_types",
)  # fmt: skip
_BLOCKS = ("block_size", "mask_token_id", "target_layer_ids")
# Beside the sizes of the decoder, in z-lab's layout; inside of `dflash_config` nothing else is read.
_OWN = ("dflash_config", "block_size", "num_target_layers", "is_causal", "target_layer_ids", "mask_token_id")
_NESTED = (*_BLOCKS, "causal", "use_swa", "swa_window_size", "output_multiplier", "final_logit_softcapping",
           "input_embedding_scale")  # fmt: skip
_WINDOWS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
SPECULATOR_KEYS = (
    "draft_vocab_size", "block_size", "target_hidden_size", "aux_hidden_state_layer_ids", "mask_token_id",
    "sliding_window_non_causal", "sample_from_anchor", "projector_type", "shift_label", "max_anchors",
    "num_hidden_layers", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", "lambda_base_start",
    "lambda_base_decay_ratio", "auf",
)  # fmt: skip
# What a config says of how it was saved.
_SAVED = {"architectures", "dtype", "model_type", "torch_dtype", "transformers_version", "_name_or_path"}
_UNUSED = ("d2t", "t2d", "verifier_lm_head.weight", "verifier_norm.weight")


def _name(own: str, fc: str, norm: str) -> str:
    return own.replace("decoder.", "").replace("encoder.fc.", fc).replace("encoder.output_norm_enc.", norm)


def block_name(head: DraftHead, own: str) -> str:
    """Name of a tensor in the layouts of z-lab and speculators."""
    return _name(own, "fc.", "hidden_norm.")


def _of(base: Any, config: Config, name: str) -> Any:
    """A setting of the decoder, also where its kind of config knows no windows."""
    return getattr(base, name) if hasattr(base, name) else config.get(name)


def _made(
    layout: str, config: Config, base: Any, blocks: dict[str, Any], tensors: Tensors, window: int | None, **more: Any
) -> DFlashHead:
    """A head with the layers that a config of transformers describes, with random weights.

    Args:
        layout: its name.
        config: of the decoder, as it is in the checkpoint.
        base: that of transformers.
        blocks: what `_compat.block_settings` names.
        tensors: of the checkpoint, which tell of biases.
        window: of layers with one, where it is not `base`'s.
        more: of the head.
    """
    settings = {name: value for name in _SIZES if (value := _of(base, config, name)) is not None}
    settings.setdefault("head_dim", int(base.hidden_size) // int(base.num_attention_heads))
    settings.setdefault("layer_types", [_FULL] * int(base.num_hidden_layers))
    if odd := sorted(set(settings["layer_types"]) - {_SLIDING, _FULL}):
        raise TreeConfigError(
            f"config.json of a checkpoint in the layout {layout!r} has layer_types {', '.join(odd)}: only {_SLIDING} "
            f"and {_FULL} are read"
        )
    window = window or _of(base, config, "sliding_window")
    # Without a width a window shows all.
    settings["sliding_window"] = int(window or settings["max_position_embeddings"])
    try:
        decoder = _compat.new_block_model({**settings, **blocks})
        head = DFlashHead(decoder, window_edge=1, embedding_scale=more.pop("embedding_scale", 1.0), **more)
    except (TypeError, ValueError) as error:
        raise TreeConfigError(f"config.json of a checkpoint in the layout {layout!r}: {error}") from error
    fusion = tensors.get("fc.weight")
    if fusion is not None and head.feature_size != decoder.encoder.fc.in_features:  # type: ignore[union-attr]
        decoder.encoder.fc = nn.Linear(head.feature_size, head.width, bias=False)  # type: ignore[union-attr]
    fit_biases(head, tensors, block_name)
    return head


# -- z-lab --


def _load(config: Config, tensors: Tensors) -> DraftHead:
    layout = "dflash"
    nested = {**(config.get("dflash_config") or {})}
    if odd := sorted(set(nested) - set(_NESTED)):
        raise TreeConfigError(
            f"config.json of a checkpoint in the layout {layout!r} has dflash_config with {', '.join(odd)}: such "
            "heads are not read"
        )
    said = {**{key: config[key] for key in _BLOCKS if key in config}, **nested}
    expect_keys(layout, said, _BLOCKS)
    base = decoder_config(layout, config, (*_OWN, *_WINDOWS), usual="qwen3")
    types = _of(base, config, "layer_types") or [_FULL] * int(base.num_hidden_layers)
    wanted = next((value for value in (said.get("causal"), config.get("is_causal")) if value is not None), None)
    causal, window = bool(_SLIDING in types if wanted is None else wanted), said.get("swa_window_size")
    if said.get("use_swa") and _SLIDING not in types:
        base.layer_types = types = [_SLIDING] * int(base.num_hidden_layers)
        window = window or config.get("sliding_window")
    if wanted and _FULL in types:
        raise TreeConfigError(
            f"config.json of a checkpoint in the layout {layout!r} wants layers of {_FULL} that attend to the left "
            "only: they are not read"
        )
    bound = said.get("final_logit_softcapping")
    head = _made(
        layout, config, base, {key: said[key] for key in _BLOCKS}, tensors, window,
        vocab_size=int(base.vocab_size), causal_windows=causal,
        embedding_scale=float(said.get("input_embedding_scale") or 1.0),
        logit_scale=float(said.get("output_multiplier") or 1.0), softcap=float(bound) if bound else None,
    )  # fmt: skip
    return fill(head, layout, config, tensors, block_name)


def _settings(head: DFlashHead) -> dict[str, Any]:
    """The decoder as a config of Qwen3, whose layers it has."""
    settings = decoder_settings(head.decoder.config)
    for key in (*_BLOCKS, "model_type"):
        settings.pop(key, None)
    if head.window_edge == 0:
        settings["sliding_window"] += 1
    bias = any(name.endswith("self_attn.q_proj.bias") for name in head.state_dict())
    return {**settings, "model_type": "qwen3", "vocab_size": head.vocab_size, "attention_bias": bias,
            "use_sliding_window": _SLIDING in settings["layer_types"]}  # fmt: skip


def _as_dflash(head: DraftHead, layout: str) -> DFlashHead:
    if not isinstance(head, DFlashHead):
        raise TreeConfigError(f"a {head.kind} head cannot be written in the layout {layout!r}")
    return head


def _cannot(head: DFlashHead, layout: str, faults: Iterable[tuple[bool, str]]) -> None:
    """Refuse to write what the layout has no word for."""
    named = [what for fault, what in faults if fault]
    if named:
        raise TreeConfigError(f"a {head.kind} head {', '.join(named)} cannot be written in the layout {layout!r}")


def _config(head: DraftHead, target: str) -> dict[str, Any]:
    layout = "dflash"
    own = _as_dflash(head, layout)
    _cannot(own, layout, [
        (own.embed_tokens is not None, "with embeddings of its own"), (own.lm_head is not None, "with an LM head"),
        (own.from_anchor, "that guesses from the anchor"), (not own.vocab_size, "whose vocabulary nobody names"),
        (own.hidden_size != own.width, "of another width than its target"), (0 in own.layers, "that reads layer 0"),
        (own.logit_scale is None or own.embedding_scale is None, "whose scales are its target's"),
    ])  # fmt: skip
    nested: dict[str, Any] = {
        "mask_token_id": own.mask_token_id,
        "target_layer_ids": [layer - 1 for layer in own.layers],
        "causal": own.causal_windows and _FULL not in own.decoder.config.layer_types,
    }
    if own.embedding_scale != 1.0:
        nested["input_embedding_scale"] = own.embedding_scale
    if own.logit_scale != 1.0:
        nested["output_multiplier"] = own.logit_scale
    if own.softcap is not None:
        nested["final_logit_softcapping"] = own.softcap
    settings = _settings(own)
    mixed = {_SLIDING, _FULL} <= set(settings["layer_types"])
    if mixed and own.causal_windows:
        # Of such layers the usual is what it does.
        nested.pop("causal")
    return {**settings, "architectures": ["DFlashDraftModel"], "block_size": own.block_size,
            "dflash_config": nested, "torch_dtype": dtype_name(own)}  # fmt: skip


DFLASH = Layout(
    name="dflash",
    file="model.safetensors",
    knows=lambda config, names: "dflash_config" in config,
    load=_load,
    rename=block_name,
    config=_config,
)


# -- speculators --


def load_speculator(layout: str, config: Config, inner: Config, tensors: Tensors) -> DraftHead:
    """A DFlash head of speculators; `inner` is its `transformer_layer_config`."""
    expect_keys(layout, config, ["block_size", "mask_token_id", "aux_hidden_state_layer_ids"])
    refuse(layout, config, projector_type="dflash", shift_label=False)
    base = decoder_config(layout, inner, _WINDOWS, usual="qwen3")
    layers = [int(layer) for layer in config["aux_hidden_state_layer_ids"]]
    blocks = {
        "block_size": int(config["block_size"]), "mask_token_id": int(config["mask_token_id"]),
        "target_layer_ids": [layer - 1 for layer in layers],
    }  # fmt: skip
    vocab = int(base.vocab_size)
    head = _made(
        layout, inner, base, blocks, tensors, None,
        vocab_size=vocab, hidden_size=int(config.get("target_hidden_size") or base.hidden_size),
        embeddings="embed_tokens.weight" in tensors, lm_head="lm_head.weight" in tensors,
        ids_V=draft_ids(layout, config, tensors, vocab), from_anchor=bool(config.get("sample_from_anchor")),
        normed_last=False, causal_windows=not config.get("sliding_window_non_causal"), logit_scale=1.0,
    )  # fmt: skip
    return fill(head, layout, config, tensors, block_name, unused=_UNUSED)


def speculator_config(head: DFlashHead) -> dict[str, Any]:
    """What the config of speculators says of a DFlash head alone."""
    _cannot(head, "speculators", [
        (not head.vocab_size, "whose vocabulary nobody names"), (head.softcap is not None, "with a softcap"),
        (head.logit_scale != 1.0 or head.embedding_scale != 1.0, "with scales"),
    ])  # fmt: skip
    config = {
        "transformer_layer_config": _settings(head),
        "draft_vocab_size": head.draft_vocab,
        "block_size": head.block_size,
        "mask_token_id": head.mask_token_id,
        "aux_hidden_state_layer_ids": list(head.layers),
        "sliding_window_non_causal": not head.causal_windows,
        "sample_from_anchor": head.from_anchor,
    }
    return config if head.hidden_size == head.width else {**config, "target_hidden_size": head.hidden_size}


# -- transformers --


def _own_name(head: DraftHead, own: str) -> str:
    return own.removeprefix("decoder.")


def _load_own(config: Config, tensors: Tensors) -> DraftHead:
    layout = "dflash-transformers"
    known = _compat.config_keys(_compat.BLOCK_MODEL_TYPE)
    say_unknown_keys(layout, config, known)
    settings = {key: value for key, value in config.items() if key in known - _SAVED}
    try:
        decoder = _compat.new_block_model(settings)
    except (TypeError, ValueError) as error:
        raise TreeConfigError(f"config.json of a checkpoint in the layout {layout!r}: {error}") from error
    return fill(DFlashHead(decoder), layout, config, tensors, _own_name)


def _own_config(head: DraftHead, target: str) -> dict[str, Any]:
    layout = "dflash-transformers"
    own = _as_dflash(head, layout)
    _cannot(own, layout, [
        (own.embed_tokens is not None, "with embeddings of its own"), (own.lm_head is not None, "with an LM head"),
        (own.from_anchor, "that guesses from the anchor"), (own.hidden_size != own.width, "of another width"),
        (own.causal_windows and _SLIDING in own.decoder.config.layer_types, "with causal windows"),
        (own.logit_scale is not None or own.embedding_scale is not None, "with scales that are not its target's"),
    ])  # fmt: skip
    settings = decoder_settings(own.decoder.config)
    settings["sliding_window"] -= own.window_edge
    return {**settings, "architectures": [type(own.decoder).__name__], "dtype": dtype_name(own)}


DFLASH_HF = Layout(
    name="dflash-transformers",
    file="model.safetensors",
    knows=lambda config, names: config.get("model_type") == _compat.BLOCK_MODEL_TYPE,
    load=_load_own,
    rename=_own_name,
    config=_own_config,
)
