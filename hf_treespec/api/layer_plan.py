"""How the layers of a model are called, read off one small forward: where they are, and whether they form a chain."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_treespec import _compat
from hf_treespec.api.outliers import without_shared_outliers
from hf_treespec.api.probe import FAILURES, evaluation
from hf_treespec.attention import in_this_thread
from hf_treespec.draft import LayerPlan

__all__ = ["find_layers"]

_TOKENS = (4, 3, 1, 2)


class _Run:
    """What a layer was given and what it returned."""

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = name
        self.given: dict[int | str, Any] = dict(enumerate(args))
        self.given.update(kwargs)
        self.output: Any = None

    @property
    def hidden(self) -> Any:
        return self.output[0] if isinstance(self.output, tuple) and self.output else self.output


@torch.no_grad()
def find_layers(model: PreTrainedModel) -> LayerPlan | str:
    """The decoder layers of a model, if each is given what the one before it returned; or the reason why not.

    A forward must run each of `_compat.decoder_layers` once, in order. What they return besides hidden states is for a
    probe to judge.
    """
    if _compat.has_compiled_parts(model):
        return "parts of it are compiled, and may not see that layers are skipped; load it without torch.compile"
    layers = _compat.decoder_layers(model)
    if not layers:
        return "it has no list of layers"
    # A module that is used twice has one name here and fails to run once.
    of = {id(module): name for name, module in model.named_modules()}
    names = tuple(of[id(layer)] for layer in layers)
    runs: list[_Run] = []
    with ExitStack() as stack:
        for name, layer in dict(zip(names, layers, strict=True)).items():
            enter, leave = (in_this_thread(partial(hook, name, runs)) for hook in (_enter, _leave))
            stack.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(leave).remove)
        try:
            with evaluation(model), without_shared_outliers(model):
                ids = torch.tensor([_TOKENS], device=model.device)
                model(**_compat.prepare_inputs(model, ids, use_cache=False), return_dict=True)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            return f"a forward of {len(_TOKENS)} tokens raised {type(error).__name__}: {error}"
    if tuple(run.name for run in runs) != names:
        return f"a forward does not run {names[0]} to {names[-1]} one by one, each once"
    return _plan(names, runs)


def _enter(name: str, runs: list[_Run], module: Any, args: Any, kwargs: Any) -> None:
    runs.append(_Run(name, args, kwargs))


def _leave(name: str, runs: list[_Run], module: Any, args: Any, output: Any) -> None:
    next(run for run in reversed(runs) if run.name == name).output = output


def _plan(names: tuple[str, ...], runs: list[_Run]) -> LayerPlan | str:
    places = set()
    for before, run in zip(runs, runs[1:], strict=False):
        place = next((place for place, value in run.given.items() if value is before.hidden), None)
        if place is None:
            return "a layer is given something else than what the layer before it returned"
        places.add(place)
    shapes = {len(run.output) if isinstance(run.output, tuple) else None for run in runs}
    if len(places) > 1 or len(shapes) > 1 or any(not isinstance(run.hidden, Tensor) for run in runs):
        return "its layers are not all called alike"
    return LayerPlan(names, given=places.pop() if places else 0, outputs=shapes.pop())
