"""Tree speculative decoding for Hugging Face `generate()`: the target's own text, sooner."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_treespec.api.auto import AutoTreeSpecModelForCausalLM
    from hf_treespec.api.calibrate import calibrate
    from hf_treespec.api.calibration import Calibration
    from hf_treespec.api.enable import disable, enable, install, uninstall
    from hf_treespec.api.layer_search import LayerSkip, find_layer_skip
    from hf_treespec.api.support import Support, is_supported
    from hf_treespec.cache import TreeCache
    from hf_treespec.config import TreeConfig
    from hf_treespec.draft.heads import load_draft, save_draft
    from hf_treespec.errors import (
        TreeConfigError,
        TreeSpecError,
        TreeSpecWarning,
        UnsupportedCallError,
        UnsupportedModelError,
    )
    from hf_treespec.stats import TreeStats

__version__ = "0.1.0"

__all__ = [
    "AutoTreeSpecModelForCausalLM",
    "Calibration",
    "LayerSkip",
    "Support",
    "TreeCache",
    "TreeConfig",
    "TreeConfigError",
    "TreeSpecError",
    "TreeSpecWarning",
    "TreeStats",
    "UnsupportedCallError",
    "UnsupportedModelError",
    "__version__",
    "calibrate",
    "disable",
    "enable",
    "find_layer_skip",
    "install",
    "is_supported",
    "load_draft",
    "save_draft",
    "uninstall",
]

# Loaded on first use: importing transformers takes seconds, which `treespec --help` and a TreeConfig can do without.
_HOMES = {
    "AutoTreeSpecModelForCausalLM": "api",
    "Calibration": "api",
    "LayerSkip": "api",
    "Support": "api",
    "TreeCache": "cache",
    "TreeConfig": "config",
    "TreeConfigError": "errors",
    "TreeSpecError": "errors",
    "TreeSpecWarning": "errors",
    "TreeStats": "stats",
    "UnsupportedCallError": "errors",
    "UnsupportedModelError": "errors",
    "calibrate": "api",
    "disable": "api",
    "enable": "api",
    "find_layer_skip": "api",
    "install": "api",
    "is_supported": "api",
    "load_draft": "draft.heads",
    "save_draft": "draft.heads",
    "uninstall": "api",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
