"""How a tree enters the model's own attention: masks through the registry, positions, choice of implementation."""

from hf_treespec.attention.biases import has_bias_functions
from hf_treespec.attention.by_slots import counted_by_depth
from hf_treespec.attention.kernel import KERNEL
from hf_treespec.attention.masks import TreeContext, tree_forward_context, tree_masks
from hf_treespec.attention.positions import learned_position_limit, node_positions
from hf_treespec.attention.reach import chooses_keys, own_structure, within_reach
from hf_treespec.attention.select import (
    attention_for_drafts,
    attention_for_probes,
    attention_for_trees,
    check_attention,
)
from hf_treespec.attention.shared import held, in_this_thread
from hf_treespec.attention.sites import ModuleCalls, position_modules, recorded_calls

__all__ = [
    "KERNEL",
    "ModuleCalls",
    "TreeContext",
    "attention_for_drafts",
    "attention_for_probes",
    "attention_for_trees",
    "check_attention",
    "chooses_keys",
    "counted_by_depth",
    "has_bias_functions",
    "held",
    "in_this_thread",
    "learned_position_limit",
    "node_positions",
    "own_structure",
    "position_modules",
    "recorded_calls",
    "tree_forward_context",
    "tree_masks",
    "within_reach",
]
