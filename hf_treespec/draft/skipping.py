"""A model that is read without some of its layers, and stays what it is for everybody else.

A skipped layer stays where it is and hands on the hidden states that it is given. So what a model numbers its layers
by (masks by kind of layer, cache layers, windows) stays right, nothing is copied, and no modeling code is needed. Who
skips is a matter of the running context: another thread, and the target between two forwards of the draft, run all
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from torch import nn

from hf_treespec.attention import held

__all__ = ["LayerPlan", "skippable", "skipping"]

_SKIPPED: ContextVar[frozenset[int]] = ContextVar("hf_treespec_skipped", default=frozenset())


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The decoder layers of a model and how they are called.

    Args:
        names: of the layers, in the order in which they run.
        given: where a layer is given the hidden states: place or name of the argument.
        outputs: length of the tuple that a layer returns, hidden states first; a skipped one returns None for the
            rest. None for layers that return the hidden states themselves.
    """

    names: tuple[str, ...]
    given: int | str = 0
    outputs: int | None = None

    def layers(self, model: nn.Module, numbers: Sequence[int]) -> list[nn.Module]:
        """The layers of these numbers."""
        return [model.get_submodule(self.names[number]) for number in numbers]


@contextmanager
def skippable(model: nn.Module, plan: LayerPlan, numbers: Sequence[int]) -> Iterator[None]:
    """Make layers able to be skipped; nobody skips any until `skipping`.

    Args:
        model: its layers have a `forward` of their own meanwhile, and what they had before on every exit.
        plan: of the model.
        numbers: of the layers.
    """
    with ExitStack() as stack:
        for layer in plan.layers(model, numbers):
            stack.enter_context(held(("skip", id(layer)), partial(_made_skippable, layer, plan)))
        yield


@contextmanager
def skipping(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Forwards inside, in this context alone, go without these layers, which must be `skippable`."""
    token = _SKIPPED.set(frozenset(map(id, layers)))
    try:
        yield
    finally:
        _SKIPPED.reset(token)


def _made_skippable(layer: nn.Module, plan: LayerPlan) -> Callable[[], None]:
    # accelerate puts a forward on the instance too.
    before = vars(layer).get("forward")
    original, key = layer.forward, id(layer)

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if key not in _SKIPPED.get():
            return original(*args, **kwargs)
        hidden = args[plan.given] if isinstance(plan.given, int) else kwargs[plan.given]
        return hidden if plan.outputs is None else (hidden, *[None] * (plan.outputs - 1))

    def undo() -> None:
        if before is None:
            del layer.forward
        else:
            vars(layer)["forward"] = before

    vars(layer)["forward"] = forward
    return undo
