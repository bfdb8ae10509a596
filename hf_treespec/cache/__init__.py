"""Keeping exactly the accepted path in the model's cache."""

from hf_treespec.cache.calls import CallTrial, forget
from hf_treespec.cache.layers import (
    EMPTY,
    REPLAYED,
    SLIDING,
    STATIC,
    cache_parts,
    check_cache,
    is_named,
    layer_kind,
    needs_equal_rows,
)
from hf_treespec.cache.paths import PathCache, PathTransaction
from hf_treespec.cache.replay import ReplayRecorder
from hf_treespec.cache.rows import CacheTransaction, RowCache, restored_on_error
from hf_treespec.cache.static import check_windows

__all__ = [
    "EMPTY",
    "REPLAYED",
    "SLIDING",
    "STATIC",
    "CacheTransaction",
    "CallTrial",
    "PathCache",
    "PathTransaction",
    "ReplayRecorder",
    "RowCache",
    "cache_parts",
    "check_cache",
    "check_windows",
    "forget",
    "is_named",
    "layer_kind",
    "needs_equal_rows",
    "restored_on_error",
]
