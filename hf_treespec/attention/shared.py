"""Changes that several calls may need at once: made for the first, undone after the last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

__all__ = ["held"]

_LOCK = threading.Lock()
_HELD: dict[Hashable, tuple[int, Callable[[], None]]] = {}


@contextmanager
def held(key: Hashable, make: Callable[[], Callable[[], None]]) -> Iterator[None]:
    """Keep a change in place for the length of the context, once however many contexts ask for it.

    Args:
        key: names the change. Whatever it names by `id` must outlive the context.
        make: makes the change and returns what undoes it.
    """
    with _LOCK:
        users, undo = _HELD[key] if key in _HELD else (0, make())
        _HELD[key] = users + 1, undo
    try:
        yield
    finally:
        with _LOCK:
            users, undo = _HELD[key]
            if users > 1:
                _HELD[key] = users - 1, undo
            else:
                del _HELD[key]
                undo()
