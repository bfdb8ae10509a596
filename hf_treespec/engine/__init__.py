"""Runs rounds: prefill, draft, one target forward, walk, commit, emit."""

from hf_treespec.engine.checks import check_cache_of, check_path_settings, check_settings
from hf_treespec.engine.forward import TargetForward
from hf_treespec.engine.loop import Request, generate_with_tree
from hf_treespec.engine.paths import PathForward
from hf_treespec.engine.prompt import Prompt

__all__ = [
    "PathForward",
    "Prompt",
    "Request",
    "TargetForward",
    "check_cache_of",
    "check_path_settings",
    "check_settings",
    "generate_with_tree",
]
