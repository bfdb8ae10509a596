"""Runs rounds: prefill, draft, one target forward, walk, commit, emit."""

from hf_treespec.engine.checks import check_settings
from hf_treespec.engine.forward import TargetForward
from hf_treespec.engine.loop import Request, generate_with_tree

__all__ = ["Request", "TargetForward", "check_settings", "generate_with_tree"]
