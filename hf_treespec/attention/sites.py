"""Models that count positions by their cache: where they make the embeddings of positions, and how to correct these.

Such a model takes no position of a token; it gives the tokens of a forward the slots behind its cache as positions. So
the modules that turn positions into embeddings (a table, rotary angles) are found by what their outputs depend on, and
while a tree is read, a hook on them gives each node the embedding of the slot `base` + depth. That slot is one of the
tree's own, since no node is deeper than its index; a tree that is read level by level has its earlier slots kept.

Shapes: N tokens of the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_treespec.attention.masks import active_tree
from hf_treespec.attention.shared import held, in_this_thread
from hf_treespec.errors import TreeSpecError

__all__ = ["ModuleCalls", "position_modules", "positions_by_depth", "recorded_calls"]


@dataclass(slots=True)
class ModuleCalls:
    """What went into and came out of the modules of one forward, as far as it has a row `[..., N, *]` per token.

    Args:
        width: N.
        calls: module names with their inputs and outputs, in the order in which they returned.
    """

    width: int
    calls: list[tuple[str, list[Tensor], list[Tensor]]] = field(default_factory=list)


@contextmanager
def recorded_calls(model: nn.Module, width: int) -> Iterator[ModuleCalls]:
    """Record the module calls of one forward of `width` tokens that runs inside."""
    record = ModuleCalls(width)

    def note(name: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        inputs = [*args, *kwargs.values()]
        record.calls.append((name, _rows_of(inputs, width), _rows_of(output, width)))

    handles = [
        module.register_forward_hook(in_this_thread(partial(note, name)), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def position_modules(base: ModuleCalls, other: ModuleCalls, later: ModuleCalls) -> tuple[str, ...]:
    """Names of the modules that make embeddings of positions.

    A tensor speaks of positions alone if other tokens leave it as it is and a longer cache changes it. The modules are
    those that give such tensors and are given none; of nested ones the innermost.

    Args:
        base: calls of some forward.
        other: of the same with other tokens.
        later: of the same tokens behind a longer cache.
    """
    names = [[name for name, _, _ in record.calls] for record in (base, other, later)]
    if not names[0] == names[1] == names[2]:
        return ()  # the model goes another way by what it reads
    makers, others = [], set()
    for (name, *one), (_, *two), (_, *three) in zip(base.calls, other.calls, later.calls, strict=True):
        given, made = (
            any(_of_positions(*tensors) for tensors in zip(*kinds, strict=False))
            for kinds in zip(one, two, three, strict=True)
        )
        if made and not given:
            makers.append(name)
        else:
            others.add(name)  # by this call or another: its output must stay as it is
    found = dict.fromkeys(name for name in makers if name not in others)
    return tuple(name for name in found if not any(inner.startswith(f"{name}.") for inner in found if name != inner))


def _of_positions(base: Tensor, other: Tensor, later: Tensor) -> bool:
    return torch.equal(base, other) and base.shape == later.shape and not torch.equal(base, later)


def _rows_of(value: Any, width: int) -> list[Tensor]:
    """The floating tensors `[..., N, *]` in a value, copied."""
    if isinstance(value, Tensor):
        return [value.detach().clone()] if _has_rows(value, width) else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in _rows_of(part, width)]
    return []


def _has_rows(tensor: Tensor, width: int) -> bool:
    return tensor.is_floating_point() and tensor.dim() >= 2 and tensor.shape[-2] == width


@contextmanager
def positions_by_depth(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """While a tree is active, have the named modules give each node the embedding of its depth.

    Args:
        model: the model.
        names: of the modules that make embeddings of positions, see `position_modules`.
    """
    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            # Once, however many calls run: a second hook would select among what the first has selected.
            stack.enter_context(held(("positions", id(module)), partial(_hook, module)))
        yield


def _hook(module: nn.Module) -> Callable[[], None]:
    return module.register_forward_hook(_corrected).remove


def _corrected(module: nn.Module, args: Any, output: Any) -> Any:
    tree = active_tree()
    if tree is None:
        return output
    slots, width = tree.slot_depths_BM.shape[1], tree.depths_BQ.shape[1]
    before = tree.seen.get(id(module))
    if before is None and slots != width:
        raise TreeSpecError("embeddings of positions were not seen in an earlier forward of the same tree")
    # The module may run several times a forward, once for each layer.
    tree.seen[id(module)] = rows = _joined(before, output, width, slots - width)
    # The depths are the same in all rows of the batch.
    return _by_depth(rows, tree.depths_BQ[0], slots)


def _joined(before: Any, value: Any, width: int, earlier: int) -> Any:
    """The rows of a tree's earlier slots, and behind them those of this forward."""
    if isinstance(value, Tensor):
        if not earlier or not _has_rows(value, width):
            return value
        return torch.cat([before.narrow(-2, 0, earlier), value], dim=-2)
    if type(value) in (list, tuple):
        old = [None] * len(value) if before is None else before
        return type(value)(_joined(one, two, width, earlier) for one, two in zip(old, value, strict=True))
    return value


def _by_depth(value: Any, depths_Q: Tensor, slots: int) -> Any:
    if isinstance(value, Tensor):
        return value.index_select(-2, depths_Q.to(value.device)) if _has_rows(value, slots) else value
    if type(value) in (list, tuple):
        return type(value)(_by_depth(part, depths_Q, slots) for part in value)
    return value
