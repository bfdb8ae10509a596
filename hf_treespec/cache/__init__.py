"""Keeping exactly the accepted path in the model's cache."""

from hf_treespec.cache.calls import CallTrial, forget
from hf_treespec.cache.layers import (
    DENSE,
    EMPTY,
    REPLAYED,
    SLIDING,
    STATIC,
    TREE,
    cache_parts,
    check_cache,
    is_named,
    is_order_bound,
    layer_kind,
    needs_equal_rows,
)
from hf_treespec.cache.lent import check_readable, committed_states, lent, right_aligned
from hf_treespec.cache.order_bound import OrderBoundRows, OrderBoundTransaction, Read
from hf_treespec.cache.paths import PathCache, PathTransaction
from hf_treespec.cache.replay import ReplayRecorder
from hf_treespec.cache.rows import CacheTransaction, RowCache, restored_on_error
from hf_treespec.cache.state import restored_state_on_error, tensor_places
from hf_treespec.cache.static import check_windows
from hf_treespec.cache.tree_cache import TreeCache, layer_fault

__all__ = [
    "DENSE",
    "EMPTY",
    "REPLAYED",
    "SLIDING",
    "STATIC",
    "TREE",
    "CacheTransaction",
    "CallTrial",
    "OrderBoundRows",
    "OrderBoundTransaction",
    "PathCache",
    "PathTransaction",
    "Read",
    "ReplayRecorder",
    "RowCache",
    "TreeCache",
    "cache_parts",
    "check_cache",
    "check_readable",
    "check_windows",
    "committed_states",
    "forget",
    "is_named",
    "is_order_bound",
    "layer_fault",
    "layer_kind",
    "lent",
    "needs_equal_rows",
    "restored_on_error",
    "restored_state_on_error",
    "right_aligned",
    "tensor_places",
]
