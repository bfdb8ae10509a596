"""What a person calls."""

from hf_treespec.api.auto import AutoTreeSpecModelForCausalLM
from hf_treespec.api.enable import disable, enable, install, uninstall
from hf_treespec.api.support import Support, is_supported

__all__ = [
    "AutoTreeSpecModelForCausalLM",
    "Support",
    "disable",
    "enable",
    "install",
    "is_supported",
    "uninstall",
]
