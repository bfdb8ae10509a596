"""What kinds of modules a model is made of, to tell whether a small model has all those of a large one."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_treespec import _compat

__all__ = ["Kind", "kinds"]

# Class of a module, and what it is set to besides its sizes.
Kind = tuple[type, frozenset[tuple[str, Any]]]
# Says nothing about the layer, but how it is being used.
_NO_SETTINGS = ("training", "gradient_checkpointing")


def kinds(model: _compat.PreTrainedModel) -> set[Kind]:
    """The kinds of modules in the part that reads the generated tokens.

    Switches and names count, and whether there is a number, such as a window; which one is a size.

    Args:
        model: weights may be on any device.
    """
    part = _compat.decoder_of(model) if _compat.is_encoder_decoder(model) else _compat.text_part(model)
    return {_kind(module) for module in part.modules() if not isinstance(module, nn.Identity)}


def _kind(module: nn.Module) -> Kind:
    if isinstance(module, nn.Linear):
        # Whatever keeps its weights in fewer bits.
        return nn.Linear, frozenset()
    own = getattr(type(module), "_treespec_base", type(module))
    if isinstance(module, _compat.PreTrainedModel):
        # A whole model is set to what is in its config, and to names of files and of its class.
        return own, frozenset()
    settings = (
        (name, value if isinstance(value, bool | str) else "a number")
        for name, value in vars(module).items()
        if isinstance(value, bool | str | int | float) and not name.startswith("_") and name not in _NO_SETTINGS
    )
    return own, frozenset(settings)
