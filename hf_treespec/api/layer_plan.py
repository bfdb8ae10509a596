"""How the layers of a model are called, read off one small forward: where they are, and whether they form a chain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_treespec import _compat
from hf_treespec.api.outliers import without_shared_outliers
from hf_treespec.api.probe import FAILURES, evaluation
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

    They are in the one list of modules that is as long as the config counts layers and of which a forward runs every
    module once, in order. What they return besides hidden states is for a probe to judge.
    """
    if _compat.has_compiled_parts(model):
        return "parts of it are compiled, and may not see that layers are skipped; load it without torch.compile"
    lists = list(_lists(model))
    runs: list[_Run] = []
    with ExitStack() as stack:
        for name, layer in ((f"{prefix}.{number}", one) for prefix, ms in lists for number, one in enumerate(ms)):
            stack.callback(layer.register_forward_pre_hook(partial(_enter, name, runs), with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(partial(_leave, name, runs)).remove)
        try:
            with evaluation(model), without_shared_outliers(model):
                ids = torch.tensor([_TOKENS], device=model.device)
                model(**_compat.prepare_inputs(model, ids, use_cache=False), return_dict=True)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            return f"a forward of {len(_TOKENS)} tokens raised {type(error).__name__}: {error}"
    found = []
    for prefix, modules in lists:
        names = tuple(f"{prefix}.{number}" for number in range(len(modules)))
        mine = [run for run in runs if run.name in names]
        if tuple(run.name for run in mine) == names:
            found.append(_plan(names, mine))
    if len(found) != 1:
        return (
            f"{len(found)} of its lists of modules are as long as its config counts layers and run one by one in a "
            "forward; expected one"
        )
    return found[0]


def _lists(model: PreTrainedModel) -> Iterator[tuple[str, nn.ModuleList]]:
    """Lists of as many modules as there are layers, but for those inside the modules of such a list."""
    counts = _compat.layer_counts(model)
    outer: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{prefix}.") for prefix in outer)
        if isinstance(module, nn.ModuleList) and len(module) in counts and not inside:
            outer.append(name)
            yield name, module


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
