"""Triton kernels for tree speculative decoding.

The package needs torch alone to be imported; triton is imported by the first launch.
"""

from .append import append_quantized_, quantize_rows
from .attention import tree_attention
from .attention_reference import tree_attention_reference
from .commit import commit_rows_, commit_rows_reference_

__all__ = [
    "append_quantized_",
    "commit_rows_",
    "commit_rows_reference_",
    "quantize_rows",
    "tree_attention",
    "tree_attention_reference",
]
