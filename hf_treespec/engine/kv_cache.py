"""`TreeConfig(kv_cache=...)`: a `TreeCache` in place of the cache that `generate` has made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_treespec import _compat
from hf_treespec.cache import TreeCache, layer_fault
from hf_treespec.errors import UnsupportedCallError
from hf_treespec.routes import Route

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["check_kv_cache", "check_no_cache_beside", "put_kv_cache"]


def check_no_cache_beside(kind: str, cache: Any) -> None:
    """Refuse a cache of the caller's beside `kv_cache`.

    Args:
        kind: of the tree config.
        cache: as passed, or None.

    Raises:
        UnsupportedCallError: naming both.
    """
    if kind != "auto" and cache is not None:
        raise UnsupportedCallError(
            f"TreeConfig(kv_cache={kind!r}) with a {type(cache).__name__} passed in: both say which cache to use. "
            f"Leave kv_cache at 'auto', or pass TreeCache(model.config, storage={kind!r}) in its place"
        )


def check_kv_cache(model: PreTrainedModel, kind: str, route: Route, cache_implementation: str | None) -> None:
    """Refuse a `kv_cache` that cannot be had for this call, as far as class, config and settings tell.

    Args:
        model: the target.
        kind: of the tree config.
        route: how trees enter the model.
        cache_implementation: of the generation config.

    Raises:
        UnsupportedCallError: naming what is in the way.
    """
    if kind == "auto":
        return
    asked = f"TreeConfig(kv_cache={kind!r})"
    if cache_implementation not in (None, "dynamic"):
        raise UnsupportedCallError(
            f"{asked} with cache_implementation={cache_implementation!r}: both say which cache to use; leave one out"
        )
    if route.by_paths:
        raise UnsupportedCallError(
            f"{asked} for {type(model).__name__}: it reads a tree path by path, which repeats rows of a dynamic cache "
            "(encoder-decoders have one of pairs); leave kv_cache at 'auto'"
        )
    if fault := layer_fault(getattr(_compat.make_cache(model.config), "layers", [])):
        raise UnsupportedCallError(f"{asked} for {type(model).__name__}: {fault}; leave kv_cache at 'auto'")


def put_kv_cache(model: PreTrainedModel, kind: str, model_kwargs: dict[str, Any]) -> None:
    """Put an empty `TreeCache` into the place of the one that `generate` has made.

    Args:
        model: the target.
        kind: of the tree config; with "auto" nothing is done.
        model_kwargs: of the call, changed in place.
    """
    if kind != "auto":
        _compat.replace_cache(model_kwargs, TreeCache(model.config, storage=kind))
