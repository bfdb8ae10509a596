"""What a person calls."""

from hf_treespec.api.auto import AutoTreeSpecModelForCausalLM
from hf_treespec.api.calibrate import calibrate
from hf_treespec.api.calibration import Calibration
from hf_treespec.api.enable import disable, enable, install, uninstall
from hf_treespec.api.layer_search import LayerSkip, find_layer_skip
from hf_treespec.api.support import Support, is_supported

__all__ = [
    "AutoTreeSpecModelForCausalLM",
    "Calibration",
    "LayerSkip",
    "Support",
    "calibrate",
    "disable",
    "enable",
    "find_layer_skip",
    "install",
    "is_supported",
    "uninstall",
]
