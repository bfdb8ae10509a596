"""Keeping exactly the accepted path in the model's cache."""

from hf_treespec.cache.layers import cache_parts, check_cache, layer_kind
from hf_treespec.cache.paths import PathCache, PathTransaction
from hf_treespec.cache.replay import Recorder, replay_commit
from hf_treespec.cache.rows import CacheTransaction, RowCache, restored_on_error

__all__ = [
    "CacheTransaction",
    "PathCache",
    "PathTransaction",
    "Recorder",
    "RowCache",
    "cache_parts",
    "check_cache",
    "layer_kind",
    "replay_commit",
    "restored_on_error",
]
