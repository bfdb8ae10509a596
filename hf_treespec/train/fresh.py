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


def frequent_ids(texts: Iterable[Text], size: int, vocab_size: int) -> list[int]:
    """Ids that the target writes most often, the most frequent first.

    Args:
        texts: of the target.
        size: how many; all of the target's at most.
        vocab_size: of the target.
    """
    counts = Counter(token for text in texts for token in text.new)
    # Of equally frequent ones the lower first, whatever the order of the texts.
    seen = sorted(counts, key=lambda token: (-counts[token], token))
    # Where the texts hold too few, ids from the front: tokenizers number frequent ones first.
    more = (token for token in range(vocab_size) if token not in counts)
    return [*seen, *more][: min(size, vocab_size)]


def _rows(target: PreTrainedModel, ids_V: Tensor | None) -> Tensor:
    """Rows of the target's LM head for the ids of the draft, float32."""
    head = _compat.target_parts(target)[1]
    weight = None if head is None else getattr(head, "weight", None)
    if not isinstance(weight, Tensor):
        raise TrainError(f"{type(target).__name__} has no LM head with a weight; a draft cannot begin from it")
    rows = weight.detach()
    return (rows if ids_V is None else rows[ids_V.to(rows.device)]).float().cpu().clone()


def layer_config(target: PreTrainedModel, intermediate_size: int | None = None) -> PreTrainedConfig:
    """Config of a decoder of one layer as wide as the target: a Llama's, with the target's heads where they fit."""
    config = target.config.get_text_config(decoder=True)
    width = _compat.hidden_size(target)
    own = getattr(config, "num_attention_heads", None)
    usual = range(max(1, width // 64), 0, -1)
    # Rotary positions need heads of an even size.
    heads = next((n for n in (own, *usual) if isinstance(n, int) and n and width % n == 0 and width // n % 2 == 0), 0)
    if not heads:
        raise TrainError(f"the target's hidden size is {width}: an EAGLE head needs an even one; train kind='medusa'")
    groups = getattr(config, "num_key_value_heads", None)
    fits = heads == own and isinstance(groups, int) and groups and heads % groups == 0
    inner = getattr(config, "intermediate_size", None)
    settings: dict[str, Any] = {
        "vocab_size": _compat.vocabulary_size(target),
        "hidden_size": width,
        "intermediate_size": intermediate_size or (inner if isinstance(inner, int) and inner else 4 * width),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": groups if fits else heads,
        "head_dim": width // heads,
        "max_position_embeddings": _compat.max_positions(target) or 4096,
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", None) or 1e-5),
        # The target's frequencies; not what it does to them for long texts, of which kinds are many.
        "rope_parameters": {"rope_type": "default", "rope_theta": _theta(config)},
        "tie_word_embeddings": False,
    }
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, name, None)
        if value is not None:
            settings[name] = copy.deepcopy(value)
    return _compat.make_config("llama", settings)


def _theta(config: PreTrainedConfig) -> float:
    told = getattr(config, "rope_parameters", None) or {}
    # Some have one set for each kind of layer.
    theta = told.get("rope_theta") or (told.get("full_attention") or {}).get("rope_theta")
    return float(theta or getattr(config, "rope_theta", None) or 10_000.0)


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
        for name, weight in head.named_parameters():
            if name.startswith("heads."):
                weight.copy_(rows)
            else:
                weight.zero_()
    return head


def fresh_mlp(
    target: PreTrainedModel, ids_V: Tensor | None, *, stages: int = 4, inner_size: int | None = None
) -> MLPHead:
    """A recurrent MLP head with the same weights in all stages."""
    head = MLPHead(
        _compat.hidden_size(target),
        _compat.vocabulary_size(target),
        inner_size=inner_size,
        stages=stages,
        tied=True,
        scale_input=True,
        ids_V=ids_V,
    )
    with torch.no_grad():
        for name, weight in head.named_parameters():
            # So that state and token come in in the shares that the head is built for.
            if not name.startswith("ln."):
                weight.normal_(std=head.inner_size**-0.5)
    return head
