"""Files of a checkpoint: in a folder, or of a repository of the Hub as transformers finds them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils.hub import cached_file

__all__ = ["config_keys", "find_file", "make_config", "read_json", "read_tensors", "tensor_names", "write_checkpoint"]


def find_file(path: str, name: str) -> Path | None:
    """A file of a folder or of a repository; None if it has none of that name.

    Raises:
        OSError: if there is no such folder or repository, with what transformers says of it.
    """
    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: if it is none.
    """
    value = json.loads(path.read_text())
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file of safetensors, or of one that `torch.save` wrote; no code in it is run."""
    if path.suffix == ".safetensors":
        return load_file(path)
    return dict(torch.load(path, map_location="cpu", weights_only=True))


def tensor_names(path: Path) -> list[str]:
    """Names of the tensors of a file, without reading them."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    return list(torch.load(path, map_location="cpu", weights_only=True, mmap=True))


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> None:
    """Write `config.json` and one file of tensors, of either kind."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    whole = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    if name.endswith(".safetensors"):
        # Tensors that share memory are refused by the format.
        save_file({key: tensor.clone() for key, tensor in whole.items()}, folder / name, metadata={"format": "pt"})
    else:
        torch.save(whole, folder / name)


def make_config(model_type: str, settings: Mapping[str, Any]) -> PreTrainedConfig:
    """A config of transformers of that type.

    Raises:
        ValueError: for an unknown type.
    """
    return AutoConfig.for_model(model_type, **settings)


def config_keys(model_type: str) -> set[str]:
    """The keys that the config of a model type knows, and those of its older versions."""
    return {*make_config(model_type, {}).to_dict(), "rope_theta", "rope_scaling", "pretraining_tp", "torch_dtype"}
