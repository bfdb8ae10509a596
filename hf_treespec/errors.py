"""Errors and warnings of hf_treespec.

Every error also is the built-in exception a caller of `generate()` would expect, so existing `except ValueError`
code keeps working. Messages name the argument, its value, what was expected and what to do.
"""

from __future__ import annotations

import sys
import warnings

__all__ = [
    "TrainError",
    "TreeConfigError",
    "TreeSpecError",
    "TreeSpecWarning",
    "UnsupportedCallError",
    "UnsupportedModelError",
    "warn",
]

# Packages whose lines a warning does not point at: the library, and those that a call goes through to it.
_BETWEEN = frozenset({"hf_treespec", "transformers", "torch", "peft", "accelerate", "contextlib"})


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


def warn(message: str) -> None:
    """A `TreeSpecWarning` that points at the caller's line: the innermost one outside of the packages in between."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, TreeSpecWarning, stacklevel=level)
