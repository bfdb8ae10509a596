"""The universal commit: undo the tree, then call the layer again with the accepted tokens only, one after the other.

It asks nothing of a layer but that its state changes through its methods. Which tensors of a call hold tokens, and on
which axis, is found by a trial (`CallTrial`) and not by the names of methods. It is the reference that every fast path
must equal bit for bit, and it serves layers of classes that nobody has named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_treespec.cache.accepted import Accepted, wide_index
from hf_treespec.cache.calls import Call, CallPlan, call_plan, token_methods
from hf_treespec.cache.snapshot import LayerState
from hf_treespec.errors import TreeSpecError

__all__ = ["ReplayRecorder"]


class ReplayRecorder:
    """Notes what a layer's methods are called with between a snapshot and its commit.

    Args:
        layer: a cache layer; its methods are shadowed on the instance until `remove`.
        plan: how it is called; default what a trial has found for its class.

    Raises:
        TreeSpecError: if they are not known.
    """

    def __init__(self, layer: Any, plan: CallPlan | None = None) -> None:
        plan = plan or call_plan(type(layer))
        if plan is None:
            raise TreeSpecError(f"cache layers of class {type(layer).__name__} have not been tried")
        self.layer = layer
        self._plan = plan
        self._state = LayerState(layer)
        self._calls: list[Call] = []
        self._chosen: Tensor | None = None
        self._inside = False
        for name in token_methods(type(layer)):
            setattr(layer, name, partial(self._noted, name, getattr(layer, name)))

    def _noted(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            # A method that calls another is replayed as a whole.
            return method(*args, **kwargs)
        self._calls.append(Call(name, args, kwargs))
        self._inside = True
        try:
            return method(*args, **kwargs)
        finally:
            self._inside = False

    def spread(self, rows_P: Tensor) -> None:
        """Repeat the layer's rows: row `rows_P[p]` becomes row p for the calls that follow, and of those noted so far.

        Args:
            rows_P: int64 `[P]`.
        """
        self.layer.reorder_cache(rows_P)
        self._calls = [Call(call.name, *call.mapped(partial(self._taken, call.name, rows_P))) for call in self._calls]

    def gather(self, chosen_B: Tensor) -> None:
        """End `spread`: of the noted calls keep, as row b, row `chosen_B[b]`.

        Args:
            chosen_B: int64 `[B]`.
        """
        self._chosen = chosen_B

    def remove(self) -> None:
        """Give the layer back as it was at the snapshot."""
        self._state.restore()

    def commit(self, accepted: Accepted) -> None:
        """Call the layer's methods again with each accepted slot in turn.

        Raises:
            TreeSpecError: if rows keep unequally many slots, or a method was called that the trial has not seen.
        """
        self.remove()
        if not accepted.uniform:
            raise TreeSpecError(f"rows of {type(self.layer).__name__} must all accept equally many nodes")
        steps = [self._whole(calls) for calls in self._by_method()]
        for step in range(accepted.count):
            for call in steps:
                args, kwargs = call.mapped(partial(self._token, call.name, accepted, step))
                getattr(self.layer, call.name)(*args, **kwargs)

    def _by_method(self) -> Iterator[list[Call]]:
        for name in dict.fromkeys(call.name for call in self._calls):
            yield [call for call in self._calls if call.name == name]

    def _whole(self, calls: Sequence[Call]) -> Call:
        """The calls of all levels of a tree as one."""
        name = calls[0].name
        if name not in self._plan.methods:
            raise TreeSpecError(
                f"{type(self.layer).__name__}.{name} was called, which it was not when the layer was tried"
            )

        def joined(place: int | str, last: Any) -> Any:
            axes = self._plan.axes.get((name, place))
            if axes is None:
                return last
            parts = [call.at(place) for call in calls]
            return torch.cat(parts, dim=axes.tokens)

        args, kwargs = calls[-1].mapped(joined)
        return Call(name, args, kwargs)

    def _taken(self, name: str, rows: Tensor, place: int | str, value: Any) -> Any:
        """These rows of an argument that holds tokens."""
        axes = self._plan.axes.get((name, place))
        return value if axes is None else value.index_select(axes.rows, rows.to(value.device))

    def _token(self, name: str, accepted: Accepted, step: int, place: int | str, value: Any) -> Any:
        """The tokens of one accepted slot of every row."""
        axes = self._plan.axes.get((name, place))
        if axes is None:
            return value
        if self._chosen is not None:
            value = self._taken(name, self._chosen, place, value)
        if accepted.same:
            return value.index_select(axes.tokens, accepted.picks(value.device)[step : step + 1])
        index_B1 = accepted.picks_BA(value.device)[:, step : step + 1]
        return value.gather(axes.tokens, wide_index(index_B1, value, axes))
