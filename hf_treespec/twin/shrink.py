"""A tiny config like another one: its sizes made small by the names of its fields.

One rule a kind of size, for all model types; what a type needs beside them is in `overrides`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hf_treespec._compat import PreTrainedConfig
from hf_treespec.twin.layers import LAYER_COUNT, by_layer, kept_layers

__all__ = ["DROP", "VOCAB", "WINDOW", "shrunk", "tiny_config"]

VOCAB = 96
WINDOW = 8

_HIDDEN = 64
_HEADS = 4
_HEAD_DIM = 16

# Field by full match, first rule wins. A field that holds no whole number above 0 stays as it is.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"max_.*position.*|n_positions|n_ctx|max_seq_len|context_length|model_max_length|.*max_(target|source)_positions",
     128),
    (r"(.*_)?vocab_size(_per_layer_input)?|encoder_hash_byte_group_vocab", VOCAB),
    # Windows that a prompt of a dozen tokens leaves.
    (r"sliding_window(_size)?|attention_chunk_size|window_size|attention_window_size|local_attention"
     r"|local_attention_window_len", WINDOW),
    (r"index_topk", 6),
    (r"index_topk_blocks|index_local_blocks", 2),
    # With few of them scores of no head at all would tie for the last place of a selection.
    (r"index_n_heads", 16),
    (r"index_block_size|block_size", 4),
    (r"num_(hidden_)?layers|n_layers?|(decoder|encoder)_layers|num_blocks|num_(en|de)coder_layers|depth"
     r"|conf_num_hidden_layers|num_global_layers", 2),
    # Heads.
    (r"swa_num_key_value_heads", 2),
    (r"(.*_)?num_(.*_)?key_value_heads|kv_n_heads|num_kv_heads|num_query_groups|(.*_)?num_key_heads", 2),
    (r"(.*_)?num_(.*_)?attention_heads|n_heads?|(en|de)coder_attention_heads|num_heads|attention_heads"
     r"|linear_num_(value_)?heads|num_attn_heads", _HEADS),
    (r"mamba_n(um)?_heads|n_mamba_heads|mamba_num_heads", 2 * _HEADS),
    # A part without positions and a part with: together they are a head.
    (r"qk_head_dim", _HEAD_DIM),
    (r"qk_(nope|rope)_head_dim", _HEAD_DIM // 2),
    (r"rotary_dim", _HEAD_DIM // 2),
    (r"(.*_)?head_dim(ension)?|mamba_(d_head|headdim)|attention_head_size|d_head|dim_head"
     r"|kv_channels|d_kv", _HEAD_DIM),
    (r"(.*_)?lora_rank|.*_(low)?rank", _HIDDEN // 4),
    # States of recurrent layers.
    (r"(mamba_)?d_state|(ssm_)?state_size|mamba_d_state", 8),
    (r"(mamba_)?chunk_size", 4),
    (r"mamba_dt_rank|time_step_rank", 4),
    # Widths.
    (r"(.*_)?(moe|expert|shared|experts?)_(.*)?(intermediate|hidden|ffn|hidden_state)_?(size|dim)?", _HIDDEN // 2),
    (r"(.*_)?intermediate_size(_.*)?|(.*_)?ffn_(hidden_size|dim)|(en|de)coder_ffn_dim|n_inner|ffn_config|d_inner|dff"
     r"|dim_ff|feed_forward_size|d_ff|mlp_dim", 2 * _HIDDEN),
    (r"(.*_)?hidden_size(_.*)?|n_embd|d_model|embed_dim|word_embed_proj_dim|embedding_(size|dim)|dim_model_base"
     r"|lru_width|(attention_)?hidden_size|emb_dim|out_hidden_size|projector_(in|out)put_dim|input_embedding_size"
     r"|vision_output_dim|input_size|audio_embed_dim|adapter_(in|out)_dim|adapter_input_size", _HIDDEN),
    # Experts.
    (r"n_group|num_expert_group", 2),
    (r"topk_group|n_shared_experts|num_shared_experts", 1),
    (r"num_experts_per_tok(en)?|moe_top_?k|top_k_experts|moe_k", 2),
    (r"(moe_)?num_(local_)?experts|n_routed_experts|moe_num_experts|num_experts|n_experts", 4),
    (r"first_k_dense_replace|num_dense_layers", 1),
)  # fmt: skip
_RULES = tuple((re.compile(pattern), size) for pattern, size in _SIZES)
# Fields that may be absent or off, and what switches them on.
_UNSET: dict[str, int] = {
    "sliding_window": WINDOW,
    "head_dim": _HEAD_DIM,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
# What `to_dict` adds, and sub-configs do not all take back; and weights in fewer bits, which random ones are not.
_NO_FIELDS = (
    "model_type",
    "transformers_version",
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "_name_or_path",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "chunk_size_feed_forward",
    "problem_type",
    "quantization_config",
)
_ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "forced_eos_token_id": None,
                         "decoder_start_token_id": 1}  # fmt: skip
_TOKEN = re.compile(r".*_token_(id|ids|index)")
DROP = object()


def tiny_config(
    config: PreTrainedConfig,
    changes: Mapping[str, Any],
    *,
    all_on: bool = False,
    first_layers: int | None = None,
) -> PreTrainedConfig:
    """A config with the same kinds of layers in small sizes.

    Args:
        config: of any model; it is not changed.
        changes: fields that the rules do not get right; a mapping goes into the sub-config of that name, and DROP
            leaves a field to the config class.
        all_on: whether windows, experts, causal masks and the cache are switched on where the config has them off, and
            texts never end.
        first_layers: how many layers stay, from the first one on, instead of one of each kind.
    """
    ids: set[int] = set()
    vocabulary = _read_ids(config, ids)
    last = VOCAB - 1
    moved = {old: last - place for place, old in enumerate(sorted(ids)) if VOCAB <= old < vocabulary}
    return _tiny(config, changes, all_on, first_layers, {} if all_on else moved)


def _tiny(
    config: PreTrainedConfig,
    changes: Mapping[str, Any],
    all_on: bool,
    first_layers: int | None,
    moved: Mapping[int, int],
) -> PreTrainedConfig:
    fields = config.to_dict()
    out = shrunk(fields, changes, all_on=all_on, first_layers=first_layers)
    parts: dict[str, PreTrainedConfig] = {}
    for name in fields:
        part, change = vars(config).get(name), changes.get(name, {})
        if isinstance(part, PreTrainedConfig) and isinstance(change, Mapping):
            parts[name] = _tiny(part, change, all_on, first_layers, moved)
    for name, value in out.items():
        if _TOKEN.fullmatch(name):
            out[name] = [moved.get(one, one) for one in value] if isinstance(value, list) else moved.get(value, value)
    try:
        return type(config)(**{**out, **parts})
    except (AttributeError, TypeError):
        # Some take their parts as a file has them only.
        return type(config)(**{**out, **{name: part.to_dict() for name, part in parts.items()}})


def shrunk(
    fields: Mapping[str, Any], changes: Mapping[str, Any], *, all_on: bool = False, first_layers: int | None = None
) -> dict[str, Any]:
    """The fields of a config with small sizes; see `tiny_config`."""
    kept = kept_layers(fields, first_layers)
    out: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _NO_FIELDS:
            continue
        change = changes.get(name, {})
        if change is DROP:
            continue
        if name == "per_layer_config":
            out[name] = _layer_fields(value, kept)
        elif _is_config(name, value):
            change = change if isinstance(change, Mapping) else {}
            out[name] = shrunk(value, change, all_on=all_on, first_layers=first_layers)
        elif (entries := by_layer(name, value, fields, kept)) is not None:
            out[name] = [_small(name, entry, all_on) for entry in entries] if isinstance(entries, list) else entries
        else:
            out[name] = _small(name, value, all_on)
    if kept:
        out.update({name: len(kept) for name in fields if LAYER_COUNT.fullmatch(name)})
    _keep_head_ratio(fields, out)
    if "qk_rope_head_dim" in fields and fields["qk_rope_head_dim"] == fields.get("head_dim"):
        out["head_dim"] = out["qk_rope_head_dim"]
    for name in ("rope_parameters", "rope_scaling"):
        if name in out:
            out[name] = _rope(fields[name], _head_width(out) / (_head_width(fields) or 1))
    _no_dropout(out)
    if all_on:
        _switched_on(fields, out)
    if isinstance(changes.get("layer_types"), list):
        out.update({name: len(changes["layer_types"]) for name in fields if LAYER_COUNT.fullmatch(name)})
    out.update({k: v for k, v in changes.items() if v is not DROP and not _is_config(k, fields.get(k))})
    return out


def _is_config(name: str, value: Any) -> bool:
    return isinstance(value, dict) and ("model_type" in value or name.endswith("_config"))


def _small(name: str, value: Any, all_on: bool) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | None):
        return value
    if not value:
        return _UNSET.get(name, value) if all_on else value
    if value < 0:
        return value
    for pattern, size in _RULES:
        if pattern.fullmatch(name.removesuffix("_per_layer")):
            return min(value, size)
    return value


def _read_ids(config: PreTrainedConfig, ids: set[int]) -> int:
    """Gather the ids of special tokens that a config and its parts name; returns the size of their vocabulary."""
    size = vars(config).get("vocab_size")
    size = size if isinstance(size, int) else 0
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            size = max(size, _read_ids(value, ids))
        elif _TOKEN.fullmatch(name):
            ids |= {one for one in (value if isinstance(value, list) else [value]) if type(one) is int}
    return size


def _keep_head_ratio(fields: Mapping[str, Any], out: dict[str, Any]) -> None:
    """As many key heads as heads, or one, if it was so."""
    for kv in [name for name in fields if re.fullmatch(r"(.*_)?num_(.*_)?key_value_heads|num_kv_heads", name)]:
        heads = next((fields[n] for n in ("num_attention_heads", "num_heads") if fields.get(n)), None)
        if isinstance(fields[kv], int) and fields[kv] > 1 and fields[kv] == heads:
            out[kv] = _HEADS


def _no_dropout(out: dict[str, Any]) -> None:
    for name, value in out.items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            out[name] = 0.0


def _layer_fields(special: Mapping[Any, Mapping[str, Any]], kept: list[int]) -> dict[int, dict[str, Any]]:
    """Fields that single layers have in their own size."""
    of_layer = {int(layer): fields for layer, fields in special.items()}
    small: dict[int, dict[str, Any]] = {}
    for place, layer in enumerate(kept):
        if layer in of_layer:
            small[place] = {name: _small(name, value, False) for name, value in of_layer[layer].items()}
            _keep_head_ratio(of_layer[layer], small[place])
    return small


def _switched_on(fields: Mapping[str, Any], out: dict[str, Any]) -> None:
    if "use_sliding_window" in fields:
        out["use_sliding_window"] = True
    if "max_window_layers" in fields:
        # The first layer is full, the others slide.
        out["max_window_layers"] = 1
        out.pop("layer_types", None)
    out.update({name: value for name, value in _ENDS.items() if name in fields})
    out.update({name: True for name in ("is_decoder", "use_cache") if name in fields})


def _head_width(fields: Mapping[str, Any]) -> float:
    """Width of the part of a head that rotates, or of the whole one: they shrink alike."""
    own = next((fields[name] for name in ("qk_rope_head_dim", "head_dim") if fields.get(name)), None)
    return float(own or fields.get("hidden_size", 0) / (fields.get("num_attention_heads") or 1))


def _rope(value: Any, share: float) -> Any:
    """Sections of M-RoPE share half a head, and factors by frequency are as many; all else has no size."""
    if not isinstance(value, dict):
        return value
    out = {name: _rope(part, share) for name, part in value.items()}
    if isinstance(out.get("mrope_section"), list):
        half = int(_HEAD_DIM * out.get("partial_rotary_factor", 1.0)) // 2
        first = half - 2 * (half // 4)
        out["mrope_section"] = [first, half // 4, half // 4]
    for name in ("short_factor", "long_factor"):
        if isinstance(out.get(name), list):
            out[name] = out[name][: max(1, round(len(out[name]) * share))]
    return out
