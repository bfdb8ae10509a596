"""Deciding sizes: measured cost, measured gain, plain decoding where no tree pays."""

from hf_treespec.control.costs import CostKey, Costs, costs_of, forget_texts
from hf_treespec.control.policy import SizePolicy
from hf_treespec.control.store import Measured, Setting, find_measured, keep_measured

__all__ = [
    "CostKey",
    "Costs",
    "Measured",
    "Setting",
    "SizePolicy",
    "costs_of",
    "find_measured",
    "forget_texts",
    "keep_measured",
]
