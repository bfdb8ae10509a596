"""Tree speculative decoding for Hugging Face `generate()`: the target's own text, sooner."""

from hf_treespec.api import (
    AutoTreeSpecModelForCausalLM,
    Support,
    disable,
    enable,
    install,
    is_supported,
    uninstall,
)
from hf_treespec.config import TreeConfig
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
    "Support",
    "TreeConfig",
    "TreeConfigError",
    "TreeSpecError",
    "TreeSpecWarning",
    "TreeStats",
    "UnsupportedCallError",
    "UnsupportedModelError",
    "__version__",
    "disable",
    "enable",
    "install",
    "is_supported",
    "uninstall",
]
