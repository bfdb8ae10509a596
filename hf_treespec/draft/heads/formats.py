"""Reading and writing draft heads in the layouts that others use."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from hf_treespec import _compat
from hf_treespec.draft.heads.base import DraftHead
from hf_treespec.draft.heads.layout import Layout, names_of, taken
from hf_treespec.draft.heads.layouts_dflash import DFLASH, DFLASH_HF
from hf_treespec.draft.heads.layouts_eagle import EAGLE, EAGLE3
from hf_treespec.draft.heads.layouts_small import MEDUSA, MEDUSA_VLLM, MLP, MLP_REDUCED
from hf_treespec.draft.heads.layouts_speculators import SPECULATORS
from hf_treespec.errors import TreeConfigError

__all__ = ["LAYOUTS", "is_head", "load_draft", "save_draft"]

# The first that knows a checkpoint reads it.
LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (SPECULATORS, DFLASH, DFLASH_HF, MEDUSA_VLLM, MEDUSA, MLP_REDUCED, MLP, EAGLE3, EAGLE)
}
# The first that is there is read, and no other one is asked for: from the Hub that would be to download it.
_INDEX = ".index.json"
_FILES = (
    "model.safetensors", "medusa_lm_head.safetensors", "model.safetensors" + _INDEX, "medusa_lm_head.pt",
    "pytorch_model.bin", "pytorch_model.bin" + _INDEX,
)  # fmt: skip


def load_draft(path: str | Path) -> DraftHead:
    """Read a draft head: Medusa, EAGLE-1, -2 or -3, an MLP speculator or DFlash, in any of the public layouts.

    The head is on the CPU, in the type of its checkpoint, in evaluation mode; `head.to(...)` moves it. It is passed as
    `generate(..., assistant_model=head, tree_config=...)`.

    Args:
        path: a folder with `config.json` and the tensors, or the name of a repository on the Hub.

    Raises:
        FileNotFoundError: if there is no such checkpoint, or it lacks a file.
        TreeConfigError: if it is in none of the layouts, or lacks a key or a tensor, or has an unknown tensor.
    """
    config_file, files = _files(str(path))
    config = _compat.read_json(config_file)
    tensors = {name: tensor for file in files for name, tensor in _compat.read_tensors(file).items()}
    for layout in LAYOUTS.values():
        if layout.knows(config, tensors):
            return layout.load(config, tensors)
    raise TreeConfigError(
        f"{path}: no draft head is known by this config.json (model_type={config.get('model_type')!r}, architectures="
        f"{config.get('architectures')}) and tensors such as {', '.join(sorted(tensors)[:3])}; expected one of the "
        f"layouts {', '.join(LAYOUTS)}"
    )


def save_draft(head: DraftHead, path: str | Path, *, layout: str | None = None, target: str = "") -> Path:
    """Write a draft head.

    In the layout that it was read from it is written as it was, tensor for tensor and with its whole config. vLLM
    serves `medusa-vllm`, `mlp_speculator`, `eagle`, `eagle3`, `dflash` and `speculators`; SGLang `eagle`, `eagle3` and
    `dflash`.

    Args:
        head: from `load_draft`, or made and trained.
        path: a folder, which is made if needed.
        layout: one of `LAYOUTS`; default is the one that it was read from, else the usual one of its kind.
        target: name or path of the model that it drafts for, for layouts whose config says so.

    Returns:
        The folder.

    Raises:
        TreeConfigError: for a layout that does not exist, or that cannot hold this head.
    """
    source = head.source
    reduced = head.ids is not None
    usual = {
        "medusa": "medusa-vllm" if reduced else "medusa",
        "mlp": "mlp_speculator_reduced" if reduced else "mlp_speculator",
        # Around a model of transformers, whose vocabulary is the target's.
        "dflash": "dflash" if head.vocab_size else "dflash-transformers",
    }.get(head.kind, head.kind)
    name = layout or (source.layout if source is not None else usual)
    if name not in LAYOUTS:
        raise TreeConfigError(f"layout={name!r}: expected one of {', '.join(LAYOUTS)}")
    chosen = LAYOUTS[name]
    same = source is not None and source.layout == name
    config = dict(source.config) if source is not None and same else chosen.config(head, target)
    own = head.state_dict()
    tensors: dict[str, Tensor] = {name: own[mine] for mine, name in names_of(head, chosen.rename).items()}
    tensors |= source.unused if source is not None and same else chosen.extra(head)
    if source is not None and same:
        tensors = taken(tensors, source.tensors)
    folder = Path(path)
    _compat.write_checkpoint(folder, config, tensors, chosen.file)
    return folder


def is_head(path: str | Path) -> bool:
    """Whether a folder or repository looks like a draft head, by its `config.json` and the names of its tensors."""
    try:
        config, files = _files(str(path))
    except FileNotFoundError:
        return False
    names = [name for file in files for name in _compat.tensor_names(file)]
    return any(layout.knows(_compat.read_json(config), names) for layout in LAYOUTS.values())


def _files(path: str) -> tuple[Path, list[Path]]:
    """The config and the files of tensors."""
    try:
        config = _compat.find_file(path, "config.json")
        name, file = next(((name, file) for name in _FILES if (file := _compat.find_file(path, name))), ("", None))
    except OSError as error:
        raise FileNotFoundError(f"{path}: no such checkpoint of a draft head: {error}") from error
    if config is None:
        raise FileNotFoundError(f"{path}: a draft head needs a config.json")
    if file is None:
        raise FileNotFoundError(f"{path}: no tensors of a draft head; expected one of {', '.join(_FILES)}")
    if not name.endswith(_INDEX):
        return config, [file]
    parts = sorted(set(_compat.read_json(file)["weight_map"].values()))
    shards = [_compat.find_file(path, part) for part in parts]
    if missing := [part for part, shard in zip(parts, shards, strict=True) if shard is None]:
        raise FileNotFoundError(f"{path}: {name} names {', '.join(missing)}, which are not there")
    return config, [shard for shard in shards if shard is not None]
