"""The library's own warning."""

from __future__ import annotations

import warnings

from hf_treespec.errors import TreeSpecWarning

__all__ = [
    "warn_once",
]


def warn_once(message: str) -> None:
    """A `TreeSpecWarning`, once per process and message."""
    if message not in _WARNED:
        _WARNED.add(message)
        warnings.warn(message, TreeSpecWarning, stacklevel=3)


_WARNED: set[str] = set()
