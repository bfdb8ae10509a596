"""Options of draft sources, as a config keeps them: checked, copied, and unchangeable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from hf_treespec.errors import TreeConfigError

__all__ = ["DEPTH_OPTIONS", "FrozenDict", "Option", "checked_ids", "checked_options", "did_you_mean", "frequent_first"]

# Default of an option and what is expected: an integer or a number in a range, a bool, the path of a file, a list of
# layer numbers, or whatever a function makes of it, which is given what a message calls the option, and its value.
Option = tuple[Any, tuple[int, int] | tuple[float, float] | type | Callable[[str, Any], Any]]

# Of `TreeConfig.depth_options`, by the name of the controller; see `hf_treespec.control.depth`.
DEPTH_OPTIONS: dict[str, dict[str, Option]] = {
    "cost": {},
    "pid": {
        "setpoint": (0.6, (0.0, 1.0)),
        "kp": (4.0, (0.0, 1e3)),
        "ki": (0.5, (0.0, 1e3)),
        "kd": (0.0, (0.0, 1e3)),
        "window": (8, (1, 4096)),
    },
    "confidence": {"threshold": (0.3, (0.0, 1.0))},
    "kl": {"threshold": (0.1, (0.0, 1.0)), "decay": (0.8, (0.0, 1.0))},
}


class FrozenDict(dict[str, Any]):
    """A dict that stays as it is. JSON, copies and comparisons take it as a dict.

    Args:
        items: what it holds.
        field: of the config for which the items have been checked, or None.
    """

    def __init__(self, items: Any = (), field: str | None = None) -> None:
        super().__init__(items)
        self.field = field

    def _frozen(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("the options of a TreeConfig do not change: use config.replace(draft_options=...)")

    __setitem__ = __delitem__ = __ior__ = _frozen
    clear = pop = popitem = setdefault = update = _frozen

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any], str | None]]:
        return FrozenDict, (dict(self), self.field)


def did_you_mean(name: Any, known: Any) -> str:
    """``"; did you mean 'x'?"`` if a known name is close to this one, else nothing."""
    close = get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def checked_options(
    value: Any, known: Mapping[str, Mapping[str, Option]], field: str = "draft_options", of: str = "source"
) -> FrozenDict:
    """The options by source, with paths as strings.

    Args:
        value: what a caller gave.
        known: options of each source.
        field: of the config.
        of: what a message calls a source.

    Raises:
        TreeConfigError: naming the source and the option.
    """
    where = f"TreeConfig({field}="
    if isinstance(value, FrozenDict) and value.field == field:
        # From another config: `replace` need not read long lists of ids anew.
        return value
    if not isinstance(value, Mapping):
        example = "recycle" if "recycle" in known else "pid"
        raise TreeConfigError(
            f"{where}{value!r}): expected a mapping of {of} to options, such as {{{example!r}: {{...}}}}"
        )
    checked = {}
    for source, options in value.items():
        own = known.get(source) if isinstance(source, str) else None
        if own is None:
            raise TreeConfigError(
                f"{where}...): {of} {source!r}: expected one of {', '.join(map(repr, known))}"
                + did_you_mean(source, known)
            )
        if not isinstance(options, Mapping):
            raise TreeConfigError(f"{where}...): {source}={options!r}: expected a mapping of options")
        for name in options:
            if name not in own:
                raise TreeConfigError(
                    f"{where}...): {source}[{name!r}]: no such option; expected one of {', '.join(map(repr, own))}"
                    + did_you_mean(name, own)
                )
        checked[source] = FrozenDict(
            {
                # A default that is None may be named.
                name: None
                if one is None and own[name][0] is None
                else _checked(f"{where}...): {source}[{name!r}]", one, own[name][1])
                for name, one in options.items()
            }
        )
    return FrozenDict(checked, field)


def _checked(where: str, value: Any, expected: Any) -> Any:
    if expected is Path:
        if value is not None and (not isinstance(value, (str, Path)) or not str(value)):
            raise TreeConfigError(f"{where}={value!r}: expected the path of a file, or None")
        return None if value is None else str(value)
    if expected is bool:
        if not isinstance(value, bool):
            raise TreeConfigError(f"{where}={value!r}: expected True or False")
        return value
    if expected is list:
        return _checked_layers(where, value)
    if not isinstance(expected, tuple):
        return expected(where, value)
    kinds = (int,) if isinstance(expected[0], int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not expected[0] <= value <= expected[1]:
        number = "an integer" if kinds == (int,) else "a number"
        raise TreeConfigError(f"{where}={value!r}: expected {number} in [{expected[0]}, {expected[1]}]")
    return value


def _checked_layers(where: str, value: Any) -> tuple[int, ...]:
    """The numbers in ascending order."""
    layers = list(value) if isinstance(value, (list, tuple, set, frozenset, range)) else []
    if not layers or not _are_numbers(layers) or len(set(layers)) != len(layers):
        raise TreeConfigError(f"{where}={value!r}: expected a list of different layer numbers, the first being 0")
    return tuple(sorted(layers))


def checked_ids(where: str, value: Any) -> str | tuple[int, ...] | None:
    """The path of a file as a string; other token ids as a tuple, the most frequent first.

    Args:
        where: what a message calls the option.
        value: a path, ids in any sequence (a tensor or an array too), a mapping of ids to counts, or None.

    Raises:
        TreeConfigError: if it is none of these, or names an id twice.
    """
    if value is None or (isinstance(value, (str, Path)) and str(value)):
        return None if value is None else str(value)
    ids: Any = None
    if not isinstance(value, (str, Path)):
        ids = frequent_first(value.tolist() if hasattr(value, "tolist") else value)
    if ids is None:
        shown = f"{repr(value)[:80]}"
        raise TreeConfigError(
            f"{where}={shown}: expected the path of a .json file, or different token ids, the most frequent first, or "
            "a mapping of ids to counts"
        )
    return tuple(ids)


def frequent_first(value: Any) -> list[int] | None:
    """Ids by falling count if they have counts, else as they are; None if this is no collection of different ids."""
    if isinstance(value, Mapping):
        counts = list(value.values())
        if any(isinstance(count, bool) or not isinstance(count, (int, float)) for count in counts):
            return None
        try:
            # JSON has strings for keys.
            pairs = [(-count, int(token)) for token, count in value.items() if not isinstance(token, (bool, float))]
        except (TypeError, ValueError):
            return None
        value = [token for _, token in sorted(pairs)] if len(pairs) == len(counts) else None
    ids = list(value) if isinstance(value, (list, tuple, range)) else []
    return ids if ids and _are_numbers(ids) and len(set(ids)) == len(ids) else None


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values)
