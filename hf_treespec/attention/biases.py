"""ALiBi: models whose attention has a bias by distance, counted in cache slots.

Such a model makes the bias of all keys at once, in a function of its own. While a tree is read, the function gives the
committed keys what it gives in plain decoding, and each tree slot the bias of the slot `base` + depth. The bias of a
key is linear in its position, so that one constant for all keys makes no difference to attention: neither where the
queries stand nor where a longer table begins needs to be known.

Shapes: N tree slots, K keys, S biases that the function gives, S >= K.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from hf_treespec.attention.masks import TreeContext, active_tree
from hf_treespec.attention.shared import held
from hf_treespec.errors import TreeSpecError

__all__ = ["bias_functions", "biases_by_depth", "has_bias_functions"]

_BUILDER = re.compile(r"^(?!.*slope)_*(build|get|make|compute|create|gen(erate)?)_.*alibi", re.IGNORECASE)
_MISSING = object()


def bias_functions(model: nn.Module) -> list[tuple[Any, str]]:
    """The functions that make the model's bias by distance, as owners and attribute names.

    They are methods of its modules, such as `build_alibi_tensor`, or else functions beside their classes.
    """
    methods = [
        (module, name)
        for module in model.modules()
        for name in dir(type(module))
        if _BUILDER.match(name) and callable(getattr(module, name, None))
    ]
    if methods:
        return methods
    files = {cls.__module__: None for module in model.modules() for cls in type(module).__mro__}
    return [
        (sys.modules[file], name)
        for file in files
        if file in sys.modules
        for name, function in list(vars(sys.modules[file]).items())
        if _BUILDER.match(name) and callable(function)
    ]


def has_bias_functions(model: nn.Module) -> bool:
    """Whether the model, or the file it comes from, has a function that makes a bias by distance."""
    return bool(bias_functions(model))


@contextmanager
def biases_by_depth(model: nn.Module) -> Iterator[None]:
    """While a tree is active, have the model's bias functions count its slots by depth; other forwards see no change.

    Functions beside the classes are replaced for the whole process as long as a call needs it.
    """
    with ExitStack() as stack:
        for owner, name in bias_functions(model):
            stack.enter_context(held(("bias", id(owner), name), partial(_replace, owner, name)))
        yield


def _replace(owner: Any, name: str) -> Callable[[], None]:
    names, original = vars(owner), getattr(owner, name)
    before = names.get(name, _MISSING)

    @wraps(original)
    def corrected(*args: Any, **kwargs: Any) -> Any:
        bias, tree = original(*args, **kwargs), active_tree()
        return bias if tree is None else _by_depth(bias, tree)

    names[name] = corrected

    def undo() -> None:
        # Somebody else may have put theirs over it meanwhile: it stays.
        if names.get(name) is corrected:
            if before is _MISSING:
                del names[name]
            else:
                names[name] = before

    return undo


def _by_depth(bias: Any, tree: TreeContext) -> Tensor:
    """`[..., K]` with the bias of every key at its position."""
    keys = tree.keys
    if not isinstance(bias, Tensor) or keys is None or bias.shape[-1] < keys:
        shape = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
        raise TreeSpecError(f"a bias by distance of shape {shape} was made during a tree forward over {keys} keys")
    # The same in all rows.
    depths_N = tree.slot_depths_BM[0].to(bias.device)
    key_K = torch.arange(keys, device=bias.device)
    key_K[tree.base : tree.base + len(depths_N)] = tree.base + depths_N
    return bias[..., bias.shape[-1] - keys :].index_select(-1, key_K)
