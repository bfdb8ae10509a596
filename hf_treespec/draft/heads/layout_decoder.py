"""What layouts of heads with decoder layers have in common: configs, biases, reduced vocabularies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_treespec import _compat
from hf_treespec.draft.heads.base import DraftHead, check_ids
from hf_treespec.draft.heads.layout import Config, Tensors, say_unknown_keys
from hf_treespec.errors import TreeConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["decoder_config", "decoder_settings", "draft_ids", "fit_biases", "refuse", "vocabulary_maps"]


def decoder_config(layout: str, config: Config, own: Iterable[str] = (), usual: str = "llama") -> Any:
    """Config of transformers for the decoder of a head.

    Args:
        layout: its name.
        config: of the checkpoint.
        own: keys that say something of the head besides.
        usual: `model_type` where the config names none.

    Raises:
        TreeConfigError: for a type that transformers does not know, or settings that its config does not take.
    """
    model_type = str(config.get("model_type") or usual)
    try:
        known = _compat.config_keys(model_type)
    except ValueError as error:
        raise TreeConfigError(f"config.json of a checkpoint in the layout {layout!r}: {error}") from error
    say_unknown_keys(layout, config, {*known, *own})
    settings = {key: value for key, value in config.items() if key in known and key not in ("model_type", "dtype")}
    settings.pop("torch_dtype", None)
    settings["num_hidden_layers"] = int(config.get("num_hidden_layers") or 1)
    try:
        return _compat.make_config(model_type, settings)
    except (TypeError, ValueError) as error:
        raise TreeConfigError(f"config.json of a checkpoint in the layout {layout!r}: {error}") from error


def fit_biases(head: DraftHead, tensors: Tensors, rename: Callable[[DraftHead, str], str]) -> None:
    """Which maps of the decoder have a bias is told by the tensors: configs name it in several ways."""
    for name, module in head.named_modules():
        if name.startswith("decoder.") and isinstance(module, nn.Linear):
            wanted = rename(head, f"{name}.bias") in tensors
            module.register_parameter("bias", nn.Parameter(torch.zeros(module.out_features)) if wanted else None)


def refuse(layout: str, config: Config, **only: Any) -> None:
    """Raise a `TreeConfigError` if a config has another value of these keys than the one that is read."""
    for key, value in only.items():
        given = config.get(key)
        if given is not None and given != value:
            raise TreeConfigError(
                f"config.json of a checkpoint in the layout {layout!r} has {key}={given!r}: only {value!r} is read"
            )


def draft_ids(layout: str, config: Config, tensors: Tensors, vocab: int) -> Tensor | None:
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


def vocabulary_maps(head: DraftHead) -> dict[str, Tensor]:
    """`d2t` and `t2d` of a head of fewer ids than its target."""
    ids = head.ids
    if ids is None:
        return {}
    marks = torch.zeros(head.vocab_size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids), device=ids.device), "t2d": marks}


def decoder_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Settings of a decoder as a `config.json` has them."""
    settings: dict[str, Any] = config.to_dict()
    for key in ("architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype"):
        settings.pop(key, None)
    # As configs were written before transformers 5, for whoever reads them so.
    rope = settings.get("rope_parameters") or {}
    if "rope_theta" in rope:
        settings["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        settings["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {**settings, "tie_word_embeddings": False}
