"""Layouts of Medusa and MLP heads.

Sources: FasterDecoding/Medusa, medusa/model/medusa_model.py (a list of sequences of blocks and a map, in
`medusa_lm_head.pt`); vLLM, models/medusa.py and transformers_utils/configs/medusa.py; foundation-model-stack,
fms_extras/models/speculator.py, and vLLM, models/mlp_speculator.py (`speculator.` may stand in front of all names).
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from hf_treespec import _compat
from hf_treespec.draft.heads.base import DraftHead
from hf_treespec.draft.heads.layout import (
    Config,
    Layout,
    Tensors,
    dtype_name,
    expect_keys,
    fill,
    say_unknown_keys,
)
from hf_treespec.draft.heads.medusa import MedusaHead
from hf_treespec.draft.heads.mlp import MLPHead
from hf_treespec.errors import TreeConfigError

__all__ = ["MEDUSA", "MEDUSA_VLLM", "MLP", "MLP_REDUCED"]


def _medusa(head: DraftHead, layout: str) -> MedusaHead:
    if not isinstance(head, MedusaHead):
        raise TreeConfigError(f"a {head.kind} head cannot be written in the layout {layout!r}")
    return head


# -- FasterDecoding --


def _original_name(head: DraftHead, own: str) -> str:
    if block := re.fullmatch(r"blocks\.(\d+)\.(\d+)\.(linear\..*)", own):
        return ".".join(block.groups())
    return f"{own.split('.')[1]}.{_medusa(head, 'medusa').layers}.weight"


def _load_original(config: Config, tensors: Tensors) -> DraftHead:
    layout = "medusa"
    expect_keys(layout, config, ["medusa_num_heads", "medusa_num_layers"])
    say_unknown_keys(layout, config, ["medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size"])
    layers = int(config["medusa_num_layers"])
    first = tensors.get(f"0.{layers}.weight")
    if first is None:
        raise TreeConfigError(f"tensors of a checkpoint in the layout {layout!r}: missing: 0.{layers}.weight")
    found = len({number for name in tensors if (number := name.split(".")[0]).isdecimal()})
    heads = int(config["medusa_num_heads"])
    if found > heads:
        # As in the first checkpoints that were published, whose configs name two of five.
        _compat.warn_once(
            f"config.json names medusa_num_heads={heads}, and there are tensors of {found}: all are read"
        )
    head = MedusaHead(int(first.shape[1]), int(first.shape[0]), heads=max(found, heads), layers=layers)
    return fill(head, layout, config, tensors, _original_name)


def _original_config(head: DraftHead, target: str) -> dict[str, Any]:
    own = _medusa(head, "medusa")
    plain = own.ids is None and own.scale == 1.0 and not (own.shared and len(own.heads) > 1)
    if not plain or (own.layers and not _has_bias(own)):
        raise TreeConfigError(
            "a Medusa head with a reduced vocabulary, a shared map, scaled logits or layers without a bias cannot be "
            "written in the layout 'medusa'; use 'medusa-vllm'"
        )
    return {
        "base_model_name_or_path": target,
        "medusa_num_heads": own.max_depth,
        "medusa_num_layers": own.layers,
    }


MEDUSA = Layout(
    name="medusa",
    file="medusa_lm_head.pt",
    knows=lambda config, names: "medusa_num_heads" in config or any(re.match(r"0\.0\.linear\.", n) for n in names),
    load=_load_original,
    rename=_original_name,
    config=_original_config,
)

# -- vLLM --

_VLLM_KEYS = (
    "hidden_size", "vocab_size", "num_heads", "num_hidden_layers", "truncated_vocab_size", "medusa_fc_bias",
    "original_lm_head", "logit_scale", "max_paths", "topk", "max_seq_len",
)  # fmt: skip


def _vllm_name(head: DraftHead, own: str) -> str:
    if block := re.fullmatch(r"blocks\.(\d+)\.(\d+)\.linear\.(.*)", own):
        return "blocks.{}.layers.{}.{}".format(*block.groups())
    return "lm_head.weight" if _medusa(head, "medusa-vllm").shared else f"lm_heads.{own.split('.')[1]}.weight"


def _has_bias(head: MedusaHead) -> bool:
    return any(name.endswith("linear.bias") for name in head.state_dict())


def _load_vllm(config: Config, tensors: Tensors) -> DraftHead:
    layout = "medusa-vllm"
    expect_keys(layout, config, ["hidden_size", "vocab_size", "num_heads", "num_hidden_layers"])
    say_unknown_keys(layout, config, _VLLM_KEYS)
    vocab, ids = int(config["vocab_size"]), tensors.get("token_map")
    reduced = int(config.get("truncated_vocab_size") or vocab)
    if (reduced < vocab) != (ids is not None):
        raise TreeConfigError(
            f"a checkpoint in the layout {layout!r} with vocab_size={vocab}, truncated_vocab_size={reduced} and "
            f"{'no' if ids is None else 'a'} tensor token_map: expected the tensor if, and only if, they differ"
        )
    head = MedusaHead(
        int(config["hidden_size"]),
        vocab,
        heads=int(config["num_heads"]),
        layers=int(config["num_hidden_layers"]),
        bias=bool(config.get("medusa_fc_bias", False)),
        shared=bool(config.get("original_lm_head", False)),
        ids_V=None if ids is None else ids.long(),
        scale=float(config.get("logit_scale", 1.0)),
    )
    return fill(head, layout, config, tensors, _vllm_name, unused=["token_map"])


def _vllm_config(head: DraftHead, target: str) -> dict[str, Any]:
    own = _medusa(head, "medusa-vllm")
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": own.hidden_size,
        "vocab_size": own.vocab_size,
        "truncated_vocab_size": own.draft_vocab,
        "num_heads": own.max_depth,
        "num_hidden_layers": own.layers,
        "medusa_fc_bias": _has_bias(own),
        "original_lm_head": own.shared,
        "logit_scale": own.scale,
        "torch_dtype": dtype_name(own),
    }


MEDUSA_VLLM = Layout(
    name="medusa-vllm",
    file="model.safetensors",
    knows=lambda config, names: config.get("model_type") == "medusa" and any(n.startswith("blocks.") for n in names),
    load=_load_vllm,
    rename=_vllm_name,
    config=_vllm_config,
    extra=lambda head: {} if head.ids is None else {"token_map": head.ids},
)

# -- MLP --

_MLP_KEYS = (
    "vocab_size", "emb_dim", "inner_dim", "n_predict", "tie_weights", "scale_input", "top_k_tokens_per_head",
    "n_candidates", "hidden_size", "num_lookahead_tokens",
)  # fmt: skip
_PREFIX = "speculator."


def _load_mlp(config: Config, tensors: Tensors) -> DraftHead:
    return _mlp_of("mlp_speculator", config, tensors, None)


def _mlp_of(layout: str, config: Config, tensors: Tensors, ids: Tensor | None) -> DraftHead:
    expect_keys(layout, config, ["vocab_size", "emb_dim", "n_predict"])
    say_unknown_keys(layout, config, [*_MLP_KEYS, "method", *([] if ids is None else ["draft_vocab_size"])])
    if config.get("method", "sum_rnn") != "sum_rnn":
        raise TreeConfigError(f"config.json has method={config['method']!r}: expected 'sum_rnn', the head of a sum")
    head = MLPHead(
        int(config["emb_dim"]),
        int(config["vocab_size"]),
        inner_size=int(config.get("inner_dim") or 0) or None,
        stages=int(config["n_predict"]),
        tied=bool(config.get("tie_weights", False)),
        scale_input=bool(config.get("scale_input", False)),
        ids_V=ids,
    )
    prefixed = any(name.startswith(_PREFIX) for name in tensors)
    unused = [] if ids is None else ["token_map"]
    return fill(head, layout, config, tensors, lambda _, own: _PREFIX + own if prefixed else own, unused)


def _mlp_name(head: DraftHead, own: str) -> str:
    source = head.source
    bare = source is not None and source.layout == "mlp_speculator" and not source.tensors[0].startswith(_PREFIX)
    return own if bare else _PREFIX + own


def _mlp_config(head: DraftHead, target: str) -> dict[str, Any]:
    if not isinstance(head, MLPHead):
        raise TreeConfigError(f"a {head.kind} head cannot be written in the layout 'mlp_speculator'")
    if head.ids is not None:
        raise TreeConfigError(
            "an MLP head with a reduced vocabulary cannot be written in the layout 'mlp_speculator'; use "
            "'mlp_speculator_reduced'"
        )
    return _mlp_keys(head)


def _mlp_keys(head: MLPHead) -> dict[str, Any]:
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": head.vocab_size,
        "emb_dim": head.hidden_size,
        "inner_dim": head.inner_size,
        "n_predict": head.max_depth,
        "n_candidates": 5,
        "top_k_tokens_per_head": [max(1, 5 - stage) for stage in range(head.max_depth)],
        "tie_weights": head.tied,
        "scale_input": head.scale_input,
        "torch_dtype": dtype_name(head),
    }


MLP = Layout(
    name="mlp_speculator",
    file="model.safetensors",
    knows=lambda config, names: config.get("model_type") == "mlp_speculator" or "n_predict" in config,
    load=_load_mlp,
    rename=_mlp_name,
    config=_mlp_config,
)

# -- MLP over some ids: ours, under a name that nobody takes for the layout above --

_REDUCED = "mlp_speculator_reduced"


def _load_reduced(config: Config, tensors: Tensors) -> DraftHead:
    expect_keys(_REDUCED, config, ["draft_vocab_size"])
    ids = tensors.get("token_map")
    if ids is None or ids.shape != (int(config["draft_vocab_size"]),):
        found = "no tensor token_map" if ids is None else f"a tensor token_map of shape {tuple(ids.shape)}"
        raise TreeConfigError(
            f"a checkpoint in the layout {_REDUCED!r} with draft_vocab_size={config['draft_vocab_size']} and {found}: "
            "expected as many ids"
        )
    return _mlp_of(_REDUCED, config, tensors, ids.long())


def _reduced_config(head: DraftHead, target: str) -> dict[str, Any]:
    if not isinstance(head, MLPHead) or head.ids is None:
        raise TreeConfigError(
            f"a {head.kind} head over {head.draft_vocab} of {head.vocab_size} ids cannot be written in the layout "
            f"{_REDUCED!r}: expected an MLP head with a reduced vocabulary"
        )
    own = {"architectures": ["ReducedMLPSpeculator"], "model_type": _REDUCED, "draft_vocab_size": head.draft_vocab}
    return {**_mlp_keys(head), **own}


MLP_REDUCED = Layout(
    name=_REDUCED,
    file="model.safetensors",
    knows=lambda config, names: config.get("model_type") == _REDUCED,
    load=_load_reduced,
    rename=_mlp_name,
    config=_reduced_config,
    extra=lambda head: {} if head.ids is None else {"token_map": head.ids},
)
