"""Switching trees on: per model by a subclass, or for all models by hooks on `GenerationMixin`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from hf_treespec import _compat
from hf_treespec.api.hooks import HOOKS
from hf_treespec.api.mtp import forget_modules
from hf_treespec.api.support import require_support, unwrap
from hf_treespec.control import forget_texts
from hf_treespec.draft import forget_tables
from hf_treespec.stats import TreeStats

__all__ = ["disable", "enable", "install", "is_enabled", "uninstall"]

ModelT = TypeVar("ModelT", bound=nn.Module)

_LOCK = threading.RLock()
_CLASSES: dict[type, type] = {}
# What `GenerationMixin` itself held under each name; None where it inherits.
_INSTALLED: dict[str, Callable[..., Any] | None] = {}


class TreeSpecMixin:
    """Mixed in front of a model's class by `enable`."""

    treespec_stats: TreeStats | None = None
    _treespec_base: type

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The subclass cannot be found by name, so copies and pickles rebuild it from its base.
        return _rebuild, (self._treespec_base,), self.__dict__


def _hooked(name: str) -> Callable[..., Any]:
    hook = HOOKS[name]

    # `generate` reads signatures of these methods, so that wraps is not mere politeness.
    @functools.wraps(getattr(_compat.GenerationMixin, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(getattr(super(TreeSpecMixin, self), name), self, *args, **kwargs)

    return method


for _name in HOOKS:
    setattr(TreeSpecMixin, _name, _hooked(_name))


def _rebuild(base: type) -> Any:
    return object.__new__(_tree_class(base))


def _tree_class(base: type) -> type:
    with _LOCK:
        if base not in _CLASSES:
            names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "_treespec_base": base}
            _CLASSES[base] = type(base.__name__, (TreeSpecMixin, base), names)
        return _CLASSES[base]


def enable(model: ModelT) -> ModelT:
    """Make `model.generate(..., tree_config=TreeConfig(...))` work on this instance.

    The instance gets a subclass of its own class; weights, config and every call without `tree_config` stay as they
    are. Wrappers (PEFT, torch.compile, DDP) are looked through. Enabling twice changes nothing.

    Args:
        model: a causal LM, or a wrapper of one.

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: if the model cannot take a tree; `is_supported` gives the same answer without raising.
    """
    inner = unwrap(model)
    if isinstance(inner, TreeSpecMixin):
        return model
    require_support(inner, "the model")
    with _LOCK:
        # Another thread may have been here during the probe, and a class must not be wrapped twice.
        if not isinstance(inner, TreeSpecMixin):
            inner.__class__ = _tree_class(type(inner))
    return model


def is_enabled(model: Any) -> bool:
    """Whether `enable` was called on a model and `disable` was not."""
    return isinstance(unwrap(model), TreeSpecMixin)


def disable(model: ModelT) -> ModelT:
    """Undo `enable`: the instance gets its own class back. Harmless on a model that is not enabled.

    Returns:
        The same object.
    """
    inner = unwrap(model)
    with _LOCK:
        if isinstance(inner, TreeSpecMixin):
            inner.__class__ = inner._treespec_base
    if isinstance(inner, PreTrainedModel):
        inner.__dict__.pop("treespec_stats", None)
        forget_tables(lambda model: model is inner)
        forget_texts(lambda model: model is inner)
        forget_modules(lambda model: model is inner)
    return model


def install() -> None:
    """Give every model of the process `tree_config`, by hooks on `GenerationMixin`; for pipelines and the like.

    Installing twice changes nothing. Model classes that override a hooked method themselves are not reached.
    """
    with _LOCK:
        if _INSTALLED:
            return
        for name, hook in HOOKS.items():
            original = getattr(_compat.GenerationMixin, name)
            _INSTALLED[name] = vars(_compat.GenerationMixin).get(name)
            setattr(_compat.GenerationMixin, name, _installed(original, hook))


def _installed(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(functools.partial(original, self), self, *args, **kwargs)

    return method


def uninstall() -> None:
    """Undo `install`. Harmless if it was not called."""
    with _LOCK:
        for name, original in _INSTALLED.items():
            if original is None:
                delattr(_compat.GenerationMixin, name)
            else:
                setattr(_compat.GenerationMixin, name, original)
        _INSTALLED.clear()
    # Those of models that were enabled one by one serve on.
    forget_tables(lambda model: not isinstance(model, TreeSpecMixin))
    forget_texts(lambda model: not isinstance(model, TreeSpecMixin))
    forget_modules(lambda model: not isinstance(model, TreeSpecMixin))
