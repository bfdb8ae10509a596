"""How a cache layer of any class is called in a forward, found by trial: which arguments hold tokens, on which axis.

A trial watches forwards over inputs of several sizes. An axis that is as long as the batch in all of them is the axis
of rows, one that is as long as the tokens is the axis of tokens. If the whole state of a layer proves to be tensors
that grow by what it was given, it can be committed like a `DynamicLayer`; else its calls are replayed.

Shapes: B rows, Q tokens of a forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.cache.states import Axes, forget_states, learn_states

__all__ = ["Call", "CallPlan", "CallTrial", "call_plan", "forget", "token_methods"]

# Public methods of every layer that are given no tokens.
_TOKENLESS = frozenset(
    (
        "activate_past_recording",
        "batch_repeat_interleave",
        "batch_select_indices",
        "crop",
        "early_initialization",
        "get_mask_sizes",
        "get_max_cache_shape",
        "get_max_length",
        "get_seq_length",
        "lazy_initialization",
        "offload",
        "prefetch",
        "reorder_cache",
        "reset",
    )
)
_PLAIN = (type(None), bool, int, float, str, Tensor, torch.dtype, torch.device, type)


class CallPlan(NamedTuple):
    """How layers of one class are called.

    Attributes:
        axes: per method and argument the axes of its rows and tokens; arguments without tokens are left out.
        methods: all methods that were called.
    """

    axes: dict[tuple[str, int | str], Axes]
    methods: frozenset[str]


_PLANS: dict[type, CallPlan] = {}


class Call(NamedTuple):
    """One call of a layer's method."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def at(self, place: int | str) -> Any:
        """The argument at a position or of a name."""
        return self.args[place] if isinstance(place, int) else self.kwargs[place]

    def places(self) -> Iterator[tuple[int | str, Any]]:
        """All arguments."""
        yield from enumerate(self.args)
        yield from self.kwargs.items()

    def mapped(self, change: Callable[[Any, Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `change(place, value)` in place of each tensor."""

        def new(place: int | str, value: Any) -> Any:
            return change(place, value) if isinstance(value, Tensor) else value

        args = tuple(new(place, value) for place, value in enumerate(self.args))
        return args, {name: new(name, value) for name, value in self.kwargs.items()}


def call_plan(cls: type) -> CallPlan | None:
    """What trials have found about a class; None for a class that was not tried."""
    return _PLANS.get(cls)


def forget(cls: type) -> None:
    """Undo what a trial has found: something else has shown that the class cannot be relied on."""
    _PLANS.pop(cls, None)
    forget_states(cls)


def token_methods(cls: type) -> list[str]:
    """Public methods of a layer that may be given tokens."""
    names = {
        name
        for base in cls.__mro__
        for name, value in vars(base).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    return sorted(name for name in names if name not in _TOKENLESS and not name.startswith("lazy_initialization"))


class _Watched(NamedTuple):
    """What one forward did with one layer."""

    batch: int
    tokens: int
    calls: list[Call]
    before: dict[str, Any]
    after: dict[str, Any]


class CallTrial:
    """Forwards over inputs of several sizes, and what they did with the layers of classes that nobody has named.

    Both B and Q must differ between some of the forwards.
    """

    def __init__(self) -> None:
        self._watched: dict[type, list[_Watched]] = {}

    @contextmanager
    def watching(self, layers: list[Any], *, batch: int, tokens: int) -> Iterator[None]:
        """One forward over `[batch, tokens]` inputs inside."""
        noted: list[tuple[Any, dict[str, Any], list[Call]]] = []
        for layer in layers:
            calls: list[Call] = []
            noted.append((layer, dict(layer.__dict__), calls))
            for name in token_methods(type(layer)):
                setattr(layer, name, _noting(name, getattr(layer, name), calls))
        try:
            yield
        finally:
            for layer in layers:
                for name in token_methods(type(layer)):
                    layer.__dict__.pop(name, None)
        for layer, before, calls in noted:
            seen = _Watched(batch, tokens, calls, before, dict(layer.__dict__))
            self._watched.setdefault(type(layer), []).append(seen)

    def conclude(self) -> str | None:
        """Remember how the watched classes are called; or the reason why that cannot be known."""
        for cls, watched in self._watched.items():
            plan = _plan(cls, watched)
            if isinstance(plan, str):
                return plan
            known = _PLANS.setdefault(cls, plan)
            if known != plan:
                return f"cache layers of class {cls.__name__} are called in more than one way"
            states = _growing(watched)
            if states is not None:
                learn_states(cls, states)
        return None


def _noting(name: str, method: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(Call(name, args, kwargs))
        return method(*args, **kwargs)

    return noted


def _plan(cls: type, watched: list[_Watched]) -> CallPlan | str:
    of = f"cache layers of class {cls.__name__}"
    shapes: dict[tuple[str, int | str], list[tuple[int, int, tuple[int, ...]]]] = {}
    for seen in watched:
        names = [call.name for call in seen.calls]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            return f"{of} are given tokens by {twice[0]} more than once in a forward"
        if opaque := _opaque(seen.after):
            return f"{of} keep {opaque}, whose content cannot be seen"
        for call in seen.calls:
            for place, value in call.places():
                if isinstance(value, Tensor):
                    sizes = seen.batch, seen.tokens, tuple(value.shape)
                    shapes.setdefault((call.name, place), []).append(sizes)
    axes = {}
    for (name, place), given in shapes.items():
        found = _axes(given)
        if found is None:
            return f"argument {place} of {cls.__name__}.{name} changes its shape with something else than the tokens"
        if found:
            axes[name, place] = found[0]
    return CallPlan(axes, frozenset(call.name for seen in watched for call in seen.calls))


def _axes(sizes: list[tuple[int, int, tuple[int, ...]]]) -> list[Axes] | None:
    """Axes of rows and tokens as a list of one, or of none; None if they cannot be told."""
    if len({len(shape) for _, _, shape in sizes}) != 1:
        return None
    rows, tokens = [], []
    for axis in range(len(sizes[0][2])):
        if all(shape[axis] == batch for batch, _, shape in sizes):
            rows.append(axis)
        elif all(shape[axis] == count for _, count, shape in sizes):
            tokens.append(axis)
        elif len({shape[axis] for _, _, shape in sizes}) != 1:
            return None
    if not tokens:
        return []
    return [Axes(rows[0], tokens[0])] if len(rows) == len(tokens) == 1 else None


def _growing(watched: list[_Watched]) -> dict[str, Axes] | None:
    """The tensors that are all there is to the layers, and grow by as many slots as there were tokens; or None."""
    grown: dict[str, list[tuple[int, int, tuple[int, ...]]]] = {}
    for seen in watched:
        fresh = not any(isinstance(value, Tensor) and value.numel() for value in seen.before.values())
        for name, now in seen.after.items():
            then = seen.before.get(name)
            if isinstance(now, Tensor) and now is not then:
                grown.setdefault(name, []).append((seen.batch, seen.tokens, _added(then, now)))
            elif not isinstance(now, Tensor) and not fresh and (type(now) is not type(then) or now != then):
                return None
    states = {}
    for name, sizes in grown.items():
        found = _axes(sizes)
        if not found:
            return None
        states[name] = found[0]._replace(owned=False)
    for seen in watched:
        for name, axes in states.items():
            then, now = seen.before.get(name), seen.after.get(name)
            if isinstance(then, Tensor) and isinstance(now, Tensor) and then.numel():
                kept = now.narrow(axes.tokens, 0, then.shape[axes.tokens])
                if kept.shape != then.shape or not torch.equal(kept, then):
                    return None
    return states


def _added(then: Any, now: Tensor) -> tuple[int, ...]:
    """The shape of what a tensor has grown by."""
    if not isinstance(then, Tensor) or not then.numel() or then.dim() != now.dim():
        return tuple(now.shape)
    return tuple(new if new == old else new - old for old, new in zip(then.shape, now.shape, strict=True))


def _opaque(value: Any) -> str | None:
    """The class of something in a layer's state that may change unseen, or None."""
    if isinstance(value, dict):
        return next((found for part in value.values() if (found := _opaque(part))), None)
    if isinstance(value, (list, tuple)):
        return next((found for part in value if (found := _opaque(part))), None)
    if isinstance(value, _PLAIN) or _compat.is_config(value):
        return None
    return f"an object of class {type(value).__name__}"
