"""Deciding sizes: measured cost, measured gain, plain decoding where no tree pays."""

from hf_treespec.control.policy import SizePolicy

__all__ = ["SizePolicy"]
