"""Errors and warnings of hf_treespec.

Every error also is the built-in exception a caller of `generate()` would expect, so existing `except ValueError`
code keeps working. Messages name the argument, its value, what was expected and what to do.
"""

from __future__ import annotations

__all__ = [
    "TrainError",
    "TreeConfigError",
    "TreeSpecError",
    "TreeSpecWarning",
    "UnsupportedCallError",
    "UnsupportedModelError",
]


class TreeSpecError(Exception):
    """Base of all errors raised by hf_treespec."""


class TreeConfigError(TreeSpecError, ValueError):
    """A `TreeConfig` field or another argument has a value that cannot work."""


class UnsupportedCallError(TreeSpecError, ValueError):
    """The model can take a tree, this `generate()` call cannot. Raised before any forward."""


class UnsupportedModelError(TreeSpecError, NotImplementedError):
    """The model cannot take a tree in one forward. The message says why."""


class TrainError(TreeSpecError, ValueError):
    """A setting of a training run, or the folder of one, has a value that cannot work."""


class TreeSpecWarning(UserWarning):
    """Category of all warnings of hf_treespec, so that they can be filtered."""
