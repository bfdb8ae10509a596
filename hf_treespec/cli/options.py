"""Arguments and options that several commands share, and what is checked about them before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_treespec.cli.faults import UsageFault, one_line
from hf_treespec.errors import TreeConfigError

if TYPE_CHECKING:
    from hf_treespec.config import TreeConfig

__all__ = [
    "AttnOption",
    "ChatOption",
    "DeviceOption",
    "DraftModelOption",
    "DtypeOption",
    "JsonOption",
    "ModelArgument",
    "TemperatureOption",
    "config_with",
    "read_config",
    "sampling_arguments",
    "to_json",
]

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a model, or its name on the hub.")]
DraftModelOption = Annotated[
    str | None,
    typer.Option("--draft-model", metavar="MODEL", help="Small model that shares the tokenizer, or a draft head."),
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto (as saved), float32, bfloat16, float16 or float64.")]
DeviceOption = Annotated[
    str, typer.Option("--device", help="auto (cuda if there is one), cpu, cuda, cuda:1, mps, ...")
]
AttnOption = Annotated[
    str | None, typer.Option("--attn", help="Attention implementation to load the model with: sdpa or eager.")
]
ChatOption = Annotated[
    bool | None,
    typer.Option("--chat/--raw", help="Through the chat template, or as it is. Default: what suits."),
]
TemperatureOption = Annotated[float, typer.Option("--temperature", min=0.0, help="0 decodes greedily.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else there.")]


def read_config(path: Path) -> TreeConfig:
    """The config in a file, or in `tree_config.json` of a folder.

    Raises:
        UsageFault: if it is missing, does not parse or holds a bad value.
    """
    from hf_treespec.config import TreeConfig

    try:
        return TreeConfig.from_pretrained(path)
    except (OSError, TreeConfigError) as error:
        raise UsageFault(f"--config {path}", one_line(error)) from error


def config_with(config: TreeConfig, overrides: Mapping[str, Any]) -> TreeConfig:
    """The config with the fields that were given as options; None means not given.

    Raises:
        UsageFault: naming the option whose value is bad.
    """
    for name, value in overrides.items():
        if value is None:
            continue
        if name == "draft_options":
            value = {**config.draft_options, **value}
        try:
            config = config.replace(**{name: value})
        except TreeConfigError as error:
            raise UsageFault(f"--{name.replace('_', '-')}", one_line(error)) from error
    return config


def sampling_arguments(temperature: float, top_p: float | None = None, top_k: int | None = None) -> dict[str, Any]:
    """What `generate` needs to decode greedily (temperature 0) or to sample.

    Raises:
        UsageFault: for a filter of the distribution without sampling.
    """
    if temperature == 0:
        for name, value in (("--top-p", top_p), ("--top-k", top_k)):
            if value is not None:
                raise UsageFault(name, f"{value} has no effect at temperature 0; pass --temperature as well")
        return {"do_sample": False}
    filters = {name: value for name, value in (("top_p", top_p), ("top_k", top_k)) if value is not None}
    return {"do_sample": True, "temperature": temperature, **filters}


def to_json(value: Any) -> str:
    """Indented JSON. A NaN or an infinity is a bug of the caller, as no parser need accept them."""
    import json

    return json.dumps(value, indent=2, allow_nan=False)
