"""State that depends on the order of the tokens read: kept, repeated by row and given back as a whole.

A recurrent or compressed state cannot drop a token. What can be done with any such state, whatever its class, is to
keep a copy, to repeat it for each of several paths, and to go back. The tensors are found by walking through the
containers that hold them: dicts, lists, tuples and the attributes of objects.

Shapes: B rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_treespec import _compat

__all__ = ["OrderBoundState", "Saved", "restored_state_on_error", "tensor_places"]

# A container, the name of its place, and those of its entries that are state; None for all.
_Part = tuple[dict[Any, Any] | list[Any], str, Sequence[Any] | None]
Saved = Sequence[tuple[_Part, Any]]
# In the name of a place: whatever the index or the number of a layer.
_ANY = "*"


class OrderBoundState:
    """The state of a model between two forwards.

    Args:
        holders: objects that hold it, by any names: caches, dicts, lists. The dict itself is part of the state.
        attributes: modules that keep tensors themselves, each with the name of a buffer or plain attribute.
        axes: which axis of a tensor is that of the rows, by the name of its place (`tensor_places`); None for a
            tensor that rows share. By default the first, if it is as long as there are rows.
    """

    def __init__(
        self,
        holders: dict[str, Any],
        attributes: Sequence[tuple[nn.Module, str]] = (),
        axes: Mapping[str, int | None] | None = None,
    ) -> None:
        self._holders = holders
        self._attributes = attributes
        self._axes = axes or {}

    def save(self) -> Saved:
        """What `restore` needs; the tensors are not copied."""
        parts: list[_Part] = [(container, place, None) for container, place in _containers(self._holders, "", set())]
        for module, name in self._attributes:
            parts.append((module._buffers if name in module._buffers else module.__dict__, "", [name]))
        return [((container, place, names), _content(container, names)) for container, place, names in parts]

    def restore(self, saved: Saved) -> None:
        """Go back to what `save` returned."""
        for (container, _, names), content in saved:
            if isinstance(container, list):
                container[:] = content
                continue
            if names is None:
                container.clear()
            container.update(content)

    def take(self, rows: Sequence[int] | None, batch: int) -> None:
        """Make row i of the state what row `rows[i]` was, in new storage, so that no forward writes to the old one.

        Args:
            rows: rows of the state, any number of them; None for all as they are.
            batch: B, the rows that the state has.
        """
        if rows is not None and list(rows) == list(range(batch)):
            rows = None
        taken: dict[int, Tensor] = {}
        growing = _growing(self._holders)

        def copied(value: Any, place: str) -> Any:
            if isinstance(value, tuple):
                parts = [copied(part, f"{place}.{_ANY}") for part in value]
                return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
            if not isinstance(value, Tensor):
                return value
            # Two names of one tensor stay two names of one tensor.
            if id(value) not in taken:
                axis = self._axes.get(place, 0)
                taken[id(value)] = _rows_of(value, rows, batch, axis, keep=id(value) in growing)
            return taken[id(value)]

        for (container, place, names), _ in self.save():
            for key in _keys(container, names):
                container[key] = copied(container[key], _below(place, key))

    def choose(self, rows: Sequence[int], batch: int) -> None:
        """`take` where nothing needs the old rows any more: none is copied that stays where it is."""
        if list(rows) != list(range(batch)):
            self.take(rows, batch)


def tensor_places(holders: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a state with the name of its place, in which all numbers are alike."""
    for container, place in _containers(holders, "", set()):
        for key in _keys(container, None):
            yield from _parts(container[key], _below(place, key))


@contextmanager
def restored_state_on_error(cache: Any) -> Iterator[None]:
    """Give a cache back as it was if the forward inside, such as a prefill, fails half-way."""
    if cache is None:
        yield
        return
    state = OrderBoundState({"cache": cache})
    saved = state.save()
    state.take(None, 0)
    try:
        yield
    except BaseException:
        state.restore(saved)
        raise


def _below(place: str, key: Any) -> str:
    return f"{place}.{key if isinstance(key, str) else _ANY}"


def _parts(value: Any, place: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, tuple):
        for part in value:
            yield from _parts(part, f"{place}.{_ANY}")


def _containers(value: Any, place: str, seen: set[int]) -> Iterator[tuple[dict[Any, Any] | list[Any], str]]:
    """Every dict and list below `value`, those of the attributes of objects included, each once."""
    if id(value) in seen or isinstance(value, (Tensor, nn.Module, type, _compat.PreTrainedConfig)):
        return
    seen.add(id(value))
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, (dict, list)):
        yield value, place
        inside = list(value.items() if isinstance(value, dict) else enumerate(value))
    elif isinstance(value, tuple):
        inside = list(enumerate(value))
    elif isinstance(getattr(value, "__dict__", None), dict) and not callable(value):
        yield from _containers(value.__dict__, place, seen)
    for key, part in inside:
        yield from _containers(part, _below(place, key), seen)


def _keys(container: dict[Any, Any] | list[Any], names: Sequence[Any] | None) -> Sequence[Any]:
    if names is not None:
        return names
    return range(len(container)) if isinstance(container, list) else list(container)


def _content(container: dict[Any, Any] | list[Any], names: Sequence[Any] | None) -> Any:
    if isinstance(container, list):
        return list(container)
    return {key: container[key] for key in _keys(container, names)}


def _growing(holders: Mapping[str, Any]) -> set[int]:
    """Keys and values that are never written in place: updates concatenate to them."""
    layers = [layer for holder in holders.values() for layer in getattr(holder, "layers", ())]
    return {
        id(getattr(layer, name))
        for layer in layers
        if _compat.grows_by_concatenation(layer)
        for name in ("keys", "values")
    }


def _rows_of(tensor: Tensor, rows: Sequence[int] | None, batch: int, axis: int | None, *, keep: bool) -> Tensor:
    if rows is None:
        return tensor if keep else tensor.clone()
    if axis is None or tensor.dim() <= axis or tensor.shape[axis] != batch:
        return tensor.clone()
    if keep and batch == 1:
        return tensor.expand(len(rows), *tensor.shape[1:])
    return tensor.index_select(axis, torch.tensor(list(rows), device=tensor.device))
