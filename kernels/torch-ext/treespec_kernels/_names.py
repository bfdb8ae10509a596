"""The namespace of this package's torch operators.

A build for the Hub holds a generated module `_ops`, which gives every build a namespace of its own, so that two
versions can be loaded side by side. In the source tree there is none, and the package's name serves.
"""

import importlib
import importlib.util

__all__ = ["operator_name"]


def operator_name(name: str) -> str:
    """The qualified name under which the operator `name` is registered."""
    if importlib.util.find_spec(f"{__package__}._ops") is None:
        return f"treespec_kernels::{name}"
    qualified: str = importlib.import_module("._ops", __package__).add_op_namespace_prefix(name)
    return qualified
