"""Token trees as plain data: topology, growth, tensor layout, JSON. No transformers here."""

from hf_treespec.tree.align import align_trees
from hf_treespec.tree.asked import AskedTree, with_asked
from hf_treespec.tree.codec import shape_from_json, shape_to_json, tree_from_json, tree_to_json
from hf_treespec.tree.growth import GROWTH_POLICIES, Candidate, CountedLevels, Expander, grow, grow_adapted
from hf_treespec.tree.layout import TreeLayout, layout_trees, pack_bits, unpack_words
from hf_treespec.tree.measure import NODES, PATHS, Measure
from hf_treespec.tree.shapes import best_first_shape, rank_acceptance
from hf_treespec.tree.topology import TokenTree, TreeBuilder, TreeLimits

__all__ = [
    "GROWTH_POLICIES",
    "NODES",
    "PATHS",
    "AskedTree",
    "Candidate",
    "CountedLevels",
    "Expander",
    "Measure",
    "TokenTree",
    "TreeBuilder",
    "TreeLayout",
    "TreeLimits",
    "align_trees",
    "best_first_shape",
    "grow",
    "grow_adapted",
    "layout_trees",
    "pack_bits",
    "rank_acceptance",
    "shape_from_json",
    "shape_to_json",
    "tree_from_json",
    "tree_to_json",
    "unpack_words",
    "with_asked",
]
