"""Deciding sizes: measured cost, measured gain, plain decoding where no tree pays."""

from hf_treespec.control.acceptance import gains_by_depth
from hf_treespec.control.costs import CostKey, Costs, costs_of, forget_texts, interpolated, known_of
from hf_treespec.control.policy import SizePolicy
from hf_treespec.control.store import Measured, Setting, cache_folder, find_measured, keep_measured

__all__ = [
    "CostKey",
    "Costs",
    "Measured",
    "Setting",
    "SizePolicy",
    "cache_folder",
    "costs_of",
    "find_measured",
    "forget_texts",
    "gains_by_depth",
    "interpolated",
    "keep_measured",
    "known_of",
]
