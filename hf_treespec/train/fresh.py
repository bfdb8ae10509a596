"""Untrained drafts for a target, begun from its own weights where they fit."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.draft import EagleHead, MedusaHead, MLPHead
from hf_treespec.errors import TrainError
from hf_treespec.train.texts import Text

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["frequent_ids", "fresh_eagle", "fresh_medusa", "fresh_mlp"]


def frequent_ids(texts: Iterable[Text], size: int, vocab_size: int) -> Tensor | None:
    """int64 ids that the target writes most often, in rising order; None if that is all of them.

    Args:
        texts: of the target.
        size: how many.
        vocab_size: of the target.
    """
    if size >= vocab_size:
        return None
    counts = Counter(token for text in texts for token in text.new)
    seen = [token for token, _ in counts.most_common(size)]
    # Where the texts hold too few, ids from the front: tokenizers number frequent ones first.
    more = (token for token in range(vocab_size) if token not in counts)
    while len(seen) < size:
        seen.append(next(more))
    return torch.tensor(sorted(seen))


def _rows(target: PreTrainedModel, ids_V: Tensor | None) -> Tensor:
    """Rows of the target's LM head for the ids of the draft, float32."""
    head = _compat.target_parts(target)[1]
    weight = None if head is None else getattr(head, "weight", None)
    if not isinstance(weight, Tensor):
        raise TrainError(f"{type(target).__name__} has no LM head with a weight; a draft cannot begin from it")
    rows = weight.detach()
    return (rows if ids_V is None else rows[ids_V.to(rows.device)]).float().cpu().clone()


def layer_config(target: PreTrainedModel, intermediate_size: int | None = None) -> PreTrainedConfig:
    """Config of a decoder of one layer as wide as the target: a Llama's, of its heads where it has such."""
    config = target.config.get_text_config(decoder=True)
    width = _compat.hidden_size(target)
    heads = int(getattr(config, "num_attention_heads", 0) or max(1, width // 64))
    if width % heads:
        heads = next(count for count in range(max(1, width // 64), 0, -1) if width % count == 0)
    settings: dict[str, Any] = {
        "vocab_size": _compat.vocabulary_size(target),
        "hidden_size": width,
        "intermediate_size": intermediate_size or int(getattr(config, "intermediate_size", 0) or 4 * width),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "max_position_embeddings": int(getattr(config, "max_position_embeddings", 0) or 4096),
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", 1e-5)),
        "tie_word_embeddings": False,
    }
    if width // heads * heads == width and (width // heads) % 2:
        raise TrainError(f"hidden size {width} over {heads} heads leaves an odd head; no rotary positions fit")
    groups = getattr(config, "num_key_value_heads", None)
    if groups and heads == getattr(config, "num_attention_heads", 0) and heads % int(groups) == 0:
        settings["num_key_value_heads"] = int(groups)
    for name in ("rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, name, None)
        if value is not None:
            settings[name] = copy.deepcopy(value)
    return _compat.make_config("llama", settings)


def fresh_eagle(
    target: PreTrainedModel,
    ids_V: Tensor | None,
    *,
    layers: tuple[int, ...] | None = None,
    intermediate_size: int | None = None,
) -> EagleHead:
    """An EAGLE-3 head whose LM head is the target's own, cut to its ids.

    Args:
        target: the model.
        ids_V: see `DraftHead`.
        layers: hidden states to read; None for the usual three.
        intermediate_size: of its layer; None for the target's.
    """
    head = EagleHead(
        layer_config(target, intermediate_size),
        hidden_size=_compat.hidden_size(target),
        vocab_size=_compat.vocabulary_size(target),
        layers=layers,
        feature_count=3 if layers is None else len(layers),
        ids_V=torch.arange(_compat.vocabulary_size(target)) if ids_V is None else ids_V,
    )
    assert head.lm_head is not None
    with torch.no_grad():
        head.lm_head.weight.copy_(_rows(target, head.ids))
        _begin_as_last_layer(head, target)
    return head


def _begin_as_last_layer(head: EagleHead, target: PreTrainedModel) -> None:
    """Let the head pass on the last state that it reads, through the target's last layer and final norm.

    What does not fit, by name or by shape, stays random.
    """
    width = head.width
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, -width:] += torch.eye(width)
    last = {name: weight.float().cpu() for name, weight in _compat.decoder_layers(target)[-1].state_dict().items()}
    last["hidden_norm.weight"] = last.get("input_layernorm.weight", torch.ones(0))
    layer: Any = head.decoder.get_submodule("layers.0")
    for name, own in layer.state_dict().items():
        theirs = last.get(name)
        if theirs is None:
            continue
        if theirs.shape == own.shape:
            own.copy_(theirs)
        elif own.ndim == 2 and own.shape == (theirs.shape[0], 2 * theirs.shape[1]):
            # Embedding and state stand side by side; the layer knew the state alone.
            own[:, theirs.shape[1] :] = theirs
            own[:, : theirs.shape[1]] *= 0.1
    norm = _compat.final_norm(target)
    if norm is not None and head.norm is not None and norm.shape == head.norm.weight.shape:
        head.norm.weight.copy_(norm)


def fresh_medusa(target: PreTrainedModel, ids_V: Tensor | None, *, heads: int = 4) -> MedusaHead:
    """A Medusa stack whose heads begin as the target's own (Cai et al. 2024, 2.2.1)."""
    head = MedusaHead(
        _compat.hidden_size(target), _compat.vocabulary_size(target), heads=heads, ids_V=ids_V, shared=False
    )
    rows = _rows(target, ids_V)
    with torch.no_grad():
        for linear in head.heads:
            linear.weight.copy_(rows)  # type: ignore[operator, union-attr]
        for stack in head.blocks:
            for layer in stack:  # type: ignore[union-attr]
                layer.linear.weight.zero_()
                layer.linear.bias.zero_()
    return head


def fresh_mlp(target: PreTrainedModel, *, stages: int = 4, inner_size: int | None = None) -> MLPHead:
    """A recurrent MLP head with the same weights in all stages."""
    return MLPHead(
        _compat.hidden_size(target),
        _compat.vocabulary_size(target),
        inner_size=inner_size,
        stages=stages,
        tied=True,
        scale_input=True,
    )
