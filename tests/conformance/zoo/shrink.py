"""A tiny config of any model type: the default config with its sizes made small by the names of its fields.

One rule a kind of size, for all model types; what a type needs beside them is in `overrides`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

VOCAB = 96
WINDOW = 8
MOST_LAYERS = 6

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
     r"|vision_output_dim|audio_embed_dim|adapter_(in|out)_dim|adapter_input_size", _HIDDEN),
    # Experts.
    (r"n_group|num_expert_group", 2),
    (r"topk_group|n_shared_experts|num_shared_experts", 1),
    (r"num_experts_per_tok(en)?|moe_top_?k|top_k_experts|moe_k", 2),
    (r"(moe_)?num_(local_)?experts|n_routed_experts|moe_num_experts|num_experts|n_experts", 4),
    (r"first_k_dense_replace|num_dense_layers", 1),
)  # fmt: skip
_RULES = tuple((re.compile(pattern), size) for pattern, size in _SIZES)
# Fields that may be absent or off, and what makes them work.
_UNSET: dict[str, int] = {
    "sliding_window": WINDOW,
    "head_dim": _HEAD_DIM,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
# Lists with an entry a layer; others are told by their length.
_BY_LAYER = re.compile(r"layer_types|mlp_layer_types|layers_block_type|indexer_types|no_rope_layers")
# What `to_dict` adds, and sub-configs do not all take back.
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
)
_LAYER_COUNT = re.compile(r"num_(hidden_)?layers|n_layers?|decoder_layers")
_ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "forced_eos_token_id": None,
                         "decoder_start_token_id": 1}  # fmt: skip


def tiny_config(config_class: type[PreTrainedConfig], changes: Mapping[str, Any]) -> PreTrainedConfig:
    """The tiny config of a class.

    Args:
        config_class: of any model.
        changes: fields that the rules do not get right; a mapping goes into the sub-config of that name, and DROP
            leaves a field to the config class.
    """
    return config_class(**shrunk(config_class().to_dict(), changes))


DROP = object()


def shrunk(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config with small sizes."""
    kept = _kept_layers(fields)
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
            out[name] = shrunk(value, change if isinstance(change, Mapping) else {})
        elif name == "rope_parameters" or name == "rope_scaling":
            out[name] = _rope(value)
        elif isinstance(value, list) and kept and (_BY_LAYER.fullmatch(name) or len(value) == _layer_count(fields)):
            out[name] = [_small(name, value[layer]) for layer in kept if layer < len(value)]
        else:
            out[name] = _small(name, value)
    if kept:
        for name in fields:
            if _LAYER_COUNT.fullmatch(name):
                out[name] = len(kept)
    _keep_head_ratio(fields, out)
    if "qk_rope_head_dim" in fields and fields["qk_rope_head_dim"] == fields.get("head_dim"):
        out["head_dim"] = out["qk_rope_head_dim"]
    _no_dropout(out)
    _windowed(fields, out)
    out.update({name: value for name, value in _ENDS.items() if name in fields})
    out.update({name: True for name in ("is_decoder", "use_cache") if name in fields})
    if isinstance(changes.get("layer_types"), list):
        out.update({name: len(changes["layer_types"]) for name in fields if _LAYER_COUNT.fullmatch(name)})
    out.update({k: v for k, v in changes.items() if v is not DROP and not _is_config(k, fields.get(k))})
    return out


def _is_config(name: str, value: Any) -> bool:
    return isinstance(value, dict) and ("model_type" in value or name.endswith("_config"))


def _small(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | None):
        return value
    if not value:
        return _UNSET.get(name, value)
    if value < 0:
        return value
    for pattern, size in _RULES:
        if pattern.fullmatch(name):
            return min(value, size)
    return value


def _layer_count(fields: Mapping[str, Any]) -> int | None:
    return next((int(v) for k, v in fields.items() if _LAYER_COUNT.fullmatch(k) and isinstance(v, int)), None)


def _kept_layers(fields: Mapping[str, Any]) -> list[int]:
    """Layers of the default config, in order, of which each is of a kind of its own; two at least."""
    count = _layer_count(fields)
    if count is None:
        return []
    lists = {
        name: value for name, value in fields.items()
        if isinstance(value, list) and (len(value) == count or _BY_LAYER.fullmatch(name)) and value
        and not isinstance(value[0], list)
    }  # fmt: skip
    special = {int(layer): fields_of for layer, fields_of in fields.get("per_layer_config", {}).items()}
    if special:
        lists["per_layer_config"] = [special.get(layer) for layer in range(count)]
    if not lists:
        return []
    seen: dict[tuple[str, ...], int] = {}
    for layer in range(min(len(value) for value in lists.values())):
        kind = tuple(str(value[layer]) for value in lists.values())
        seen.setdefault(kind, layer)
    kept = sorted(seen.values())[:MOST_LAYERS]
    return kept if len(kept) > 1 else [kept[0], kept[0] + 1]


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
    by_layer = {int(layer): fields for layer, fields in special.items()}
    small: dict[int, dict[str, Any]] = {}
    for place, layer in enumerate(kept):
        if layer in by_layer:
            small[place] = {name: _small(name, value) for name, value in by_layer[layer].items()}
            _keep_head_ratio(by_layer[layer], small[place])
    return small


def _windowed(fields: Mapping[str, Any], out: dict[str, Any]) -> None:
    """Windows that are off by default are on."""
    if "use_sliding_window" in fields:
        out["use_sliding_window"] = True
    if "max_window_layers" in fields:
        # The first layer is full, the others slide.
        out["max_window_layers"] = 1
        out.pop("layer_types", None)


def _rope(value: Any) -> Any:
    """Sections of M-RoPE share half a head; all else has no size."""
    if not isinstance(value, dict):
        return value
    out = {name: _rope(part) for name, part in value.items()}
    if isinstance(out.get("mrope_section"), list):
        half = int(_HEAD_DIM * out.get("partial_rotary_factor", 1.0)) // 2
        first = half - 2 * (half // 4)
        out["mrope_section"] = [first, half // 4, half // 4]
    return out
