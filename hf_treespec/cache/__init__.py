"""Keeping exactly the accepted path in the model's cache."""

from hf_treespec.cache.layers import SLIDING, STATIC, cache_parts, check_cache, layer_kind, needs_equal_rows
from hf_treespec.cache.paths import PathCache, PathTransaction
from hf_treespec.cache.replay import Recorder, replay_commit
from hf_treespec.cache.rows import CacheTransaction, RowCache, restored_on_error
from hf_treespec.cache.static import check_windows

__all__ = [
    "SLIDING",
    "STATIC",
    "CacheTransaction",
    "PathCache",
    "PathTransaction",
    "Recorder",
    "RowCache",
    "cache_parts",
    "check_cache",
    "check_windows",
    "layer_kind",
    "needs_equal_rows",
    "replay_commit",
    "restored_on_error",
]
