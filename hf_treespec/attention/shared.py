"""Changes that several calls need at once, made for the first and undone after the last; and hooks of one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["held", "in_this_thread", "replaced"]

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


def replaced(
    name: str, get: Callable[[str], Any], register: Callable[[str, Any], None], mine: Any
) -> Callable[[], None]:
    """Register something under a name in place of what is there, for `held`.

    Args:
        name: in the registry.
        get: reads the registry.
        register: writes it.
        mine: what to register.

    Returns:
        What puts the earlier one back, unless somebody else has registered over it meanwhile: theirs stays.
    """
    before = get(name)
    register(name, mine)

    def undo() -> None:
        if get(name) is mine:
            register(name, before)

    return undo


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of modules for forwards of the calling thread alone; those of others go on as if there were none."""
    thread = threading.get_ident()

    def only(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs) if threading.get_ident() == thread else None

    return only
