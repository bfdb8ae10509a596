"""How a tree enters the model's own attention: masks through the registry, positions, choice of implementation."""

from hf_treespec.attention.masks import TreeContext, tree_forward_context, tree_masks
from hf_treespec.attention.positions import learned_position_limit, node_positions
from hf_treespec.attention.select import attention_for_trees, check_attention

__all__ = [
    "TreeContext",
    "attention_for_trees",
    "check_attention",
    "learned_position_limit",
    "node_positions",
    "tree_forward_context",
    "tree_masks",
]
