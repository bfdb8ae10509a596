"""Triton kernels for tree speculative decoding.

The package needs torch alone to be imported; triton is imported by the first launch.
"""

from .attention import tree_attention
from .attention_reference import tree_attention_reference
from .commit import commit_rows_, commit_rows_reference_

__all__ = ["commit_rows_", "commit_rows_reference_", "tree_attention", "tree_attention_reference"]
