"""Warnings: the library's own, and silence of those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging

from hf_treespec.errors import warn

__all__ = [
    "quiet_transformers",
    "warn_once",
]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Only errors are logged inside, for calls that no user has made and that would warn of what none has done."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def warn_once(message: str) -> None:
    """A `TreeSpecWarning`, once per process and message."""
    if message not in _WARNED:
        _WARNED.add(message)
        warn(message)


_WARNED: set[str] = set()
