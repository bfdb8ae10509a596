"""Checks of single settings: who is wrong is told its name, its value and what was expected."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

__all__ = ["SettingsError", "flag", "mapping", "number", "several", "text", "texts", "whole"]


class SettingsError(ValueError):
    """A setting that cannot work; the message names it."""


def _wrong(name: str, value: object, expected: str) -> SettingsError:
    return SettingsError(f"{name}: {value!r}: expected {expected}")


def whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """An integer from `least` on, up to `most` if there is a limit."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        raise _wrong(name, value, f"an integer of at least {least}" + ("" if most is None else f", at most {most}"))


def number(name: str, value: object, low: float, high: float, *, ends: str = "[]") -> None:
    """A number between `low` and `high`; a round bracket in `ends` leaves that end out."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not fits or (value == low and ends[0] == "(") or (value == high and ends[1] == ")"):
        raise _wrong(name, value, f"a number in {ends[0]}{low:g}, {high:g}{ends[1]}")


def flag(name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")


def text(name: str, value: object, *, among: Collection[str] = ()) -> None:
    """A text; one of `among` if there are some."""
    if not isinstance(value, str):
        raise _wrong(name, value, "a text" if not among else f"one of {', '.join(among)}")
    if among and value not in among:
        raise _wrong(name, value, f"one of {', '.join(among)}")


def texts(name: str, value: Sequence[object]) -> None:
    """At least one text, none of them empty."""
    if not value or not all(isinstance(one, str) and one for one in value):
        raise _wrong(name, list(value), "a list of texts")


def mapping(name: str, value: object, known: Collection[str]) -> None:
    """A mapping without unknown names."""
    if not isinstance(value, Mapping):
        raise _wrong(name, value, f"a mapping of some of {', '.join(known)}")
    if unknown := sorted(str(key) for key in value if key not in known):
        raise SettingsError(f"{name}: {', '.join(unknown)}: expected some of {', '.join(known)}")


def several(name: str, value: object) -> tuple[Any, ...]:
    """The entries of a list; a single text or mapping counts as a list of one."""
    if isinstance(value, str | Mapping):
        return (value,)
    if not isinstance(value, list | tuple):
        raise _wrong(name, value, "a list")
    return tuple(value)
