"""Runs rounds: prefill, draft, one target forward, walk, commit, emit."""

from hf_treespec.engine.checks import check_cache_of, check_path_settings, check_settings
from hf_treespec.engine.costs import setting_of, take_measured, way_of
from hf_treespec.engine.features import FeatureTaps, Places, tapped
from hf_treespec.engine.forward import TargetForward
from hf_treespec.engine.kv_cache import check_kv_cache, check_no_cache_beside
from hf_treespec.engine.loop import generate_with_tree
from hf_treespec.engine.ordered import OrderedForward
from hf_treespec.engine.paths import PathForward
from hf_treespec.engine.prompt import Prompt
from hf_treespec.engine.request import Request
from hf_treespec.engine.target import cache_of, make_target, state_kwargs
from hf_treespec.engine.trial import SizedTrees, Trial, on_trial

__all__ = [
    "FeatureTaps",
    "OrderedForward",
    "PathForward",
    "Places",
    "Prompt",
    "Request",
    "SizedTrees",
    "TargetForward",
    "Trial",
    "cache_of",
    "check_cache_of",
    "check_kv_cache",
    "check_no_cache_beside",
    "check_path_settings",
    "check_settings",
    "generate_with_tree",
    "make_target",
    "on_trial",
    "setting_of",
    "state_kwargs",
    "take_measured",
    "tapped",
    "way_of",
]
