"""Keeping exactly the accepted path in the model's cache."""

from hf_treespec.cache.layers import check_cache, layer_kind
from hf_treespec.cache.replay import Recorder, replay_commit
from hf_treespec.cache.rows import CacheTransaction, RowCache, restored_on_error

__all__ = [
    "CacheTransaction",
    "Recorder",
    "RowCache",
    "check_cache",
    "layer_kind",
    "replay_commit",
    "restored_on_error",
]
