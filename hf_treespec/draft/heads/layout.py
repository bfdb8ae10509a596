"""What a layout of checkpoints is, and how tensors get in and out of a head by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_treespec import _compat
from hf_treespec.draft.heads.base import DraftHead, Source
from hf_treespec.errors import TreeConfigError

__all__ = ["Layout", "Tensors", "dtype_name", "expect_keys", "fill", "names_of", "say_unknown_keys", "taken"]

Config = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
# Keys that say nothing about the computation.
_INERT = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "auto_map", "_name_or_path",
    "base_model_name_or_path", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range",
    "tie_word_embeddings", "return_dict", "name_or_path",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """A public layout.

    Args:
        name: what `save_draft` calls it.
        file: of the tensors, where they are written.
        knows: whether a checkpoint with this config and these names of tensors is one.
        load: the head of such a checkpoint.
        rename: name of a tensor in the layout, given the head and its own name for it.
        config: `config.json` for a head that was not read from this layout; the second argument names its target.
    """

    name: str
    file: str
    knows: Callable[[Config, Iterable[str]], bool]
    load: Callable[[Config, Tensors], DraftHead]
    rename: Callable[[DraftHead, str], str]
    config: Callable[[DraftHead, str], dict[str, Any]]
    extra: Callable[[DraftHead], dict[str, Tensor]] = lambda head: {}


def names_of(head: DraftHead, rename: Callable[[DraftHead, str], str]) -> dict[str, str]:
    """Name in the layout of each tensor of the head."""
    return {own: rename(head, own) for own in head.state_dict()}


def taken(tensors: Tensors, names: Iterable[str]) -> dict[str, Tensor]:
    """Those of these names that there are."""
    return {name: tensors[name] for name in names if name in tensors}


def fill(
    head: DraftHead,
    layout: str,
    config: Config,
    tensors: Tensors,
    rename: Callable[[DraftHead, str], str],
    unused: Iterable[str] = (),
) -> DraftHead:
    """Put tensors into a head, in their own types.

    Args:
        head: of the right sizes.
        layout: name of the layout.
        config: of the checkpoint.
        tensors: of the checkpoint.
        rename: see `Layout.rename`.
        unused: names of tensors that may be there and are not in the head.

    Raises:
        TreeConfigError: naming the tensors that are missing, unknown or of another shape.
    """
    names = names_of(head, rename)
    own = head.state_dict()
    kept = taken(tensors, unused)
    unknown = sorted(set(tensors) - set(names.values()) - set(kept))
    # Of tensors that are one in the head, one is enough.
    present = {own[mine].data_ptr(): tensors[name] for mine, name in names.items() if name in tensors}
    missing = sorted(name for mine, name in names.items() if own[mine].data_ptr() not in present)
    if unknown or missing:
        said = [f"{what}: {', '.join(found)}" for what, found in (("unknown", unknown), ("missing", missing)) if found]
        raise TreeConfigError(f"tensors of a checkpoint in the layout {layout!r}: {'; '.join(said)}")
    filled = {}
    for mine, name in names.items():
        tensor = present[own[mine].data_ptr()]
        if tensor.shape != own[mine].shape:
            raise TreeConfigError(
                f"tensor {name!r} of a checkpoint in the layout {layout!r} has shape {tuple(tensor.shape)}: expected "
                f"{tuple(own[mine].shape)} by its config and its other tensors"
            )
        filled[mine] = tensor
    head.load_state_dict(filled, assign=True)
    head.source = Source(layout, dict(config), tuple(tensors), kept)
    return head.eval()


def expect_keys(layout: str, config: Config, keys: Iterable[str]) -> None:
    """Raise a `TreeConfigError` that names the keys which a config lacks."""
    missing = sorted(key for key in keys if config.get(key) is None)
    if missing:
        raise TreeConfigError(f"config.json of a checkpoint in the layout {layout!r} lacks {', '.join(missing)}")


def say_unknown_keys(layout: str, config: Config, known: Iterable[str]) -> None:
    """Warn once of keys that mean nothing here: they may change what the head is."""
    unknown = sorted(set(config) - set(known) - _INERT)
    if config.get("quantization_config"):
        raise TreeConfigError(f"config.json of a checkpoint in the layout {layout!r}: quantization_config is not read")
    if unknown:
        _compat.warn_once(
            f"config.json of a checkpoint in the layout {layout!r} has unknown keys: {', '.join(unknown)}. They are "
            "taken to say nothing about how the head computes"
        )


def dtype_name(head: DraftHead) -> str:
    """Type of the weights as configs name it."""
    return str(head.dtype).removeprefix("torch.")
