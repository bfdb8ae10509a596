"""Deciding sizes before anything is drawn: measured cost, measured gain, fallback to plain decoding."""

from hf_treespec.control.estimates import RoundEstimates, RunningMean
from hf_treespec.control.policy import SizePolicy

__all__ = ["RoundEstimates", "RunningMean", "SizePolicy"]
