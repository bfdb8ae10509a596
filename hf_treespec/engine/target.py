"""The cache of the rounds and their forward, by the route of the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_treespec import _compat
from hf_treespec.attention import learned_position_limit
from hf_treespec.cache import OrderBoundRows, PathCache, RowCache, check_cache, is_order_bound
from hf_treespec.engine.forward import TargetForward
from hf_treespec.engine.ordered import OrderedForward
from hf_treespec.engine.outputs import KeptStates
from hf_treespec.engine.paths import PathForward, path_length_limit
from hf_treespec.engine.prompt import Prompt
from hf_treespec.routes import PathTraits, Route

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["cache_of", "make_target", "positions_of", "state_kwargs"]


def cache_of(
    model: PreTrainedModel, route: Route, model_kwargs: Mapping[str, Any], outputs: Any
) -> tuple[Any, dict[str, Any]]:
    """What the prefill has left.

    Returns:
        The cache that the call returns, and all that goes from one forward to the next, by argument name; of this
        nothing where the cache is all.
    """
    cache = _compat.cache_from_outputs(outputs)
    if not route.by_paths or (route is Route.PATHS and cache is not None and not is_order_bound(cache)):
        return check_cache(cache), {}
    carried = {**state_kwargs(model, model_kwargs), **_compat.carried_state(model, outputs)}
    return _compat.returned_cache(carried), carried


def state_kwargs(model: PreTrainedModel, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The cache that a forward was given: some models do not give it back with their outputs."""
    name = _compat.cache_kwarg(model)
    return {name: model_kwargs[name]} if model_kwargs.get(name) is not None else {}


def make_target(
    model: PreTrainedModel,
    route: Route,
    traits: PathTraits,
    model_kwargs: Mapping[str, Any],
    cache: Any,
    carried: dict[str, Any],
    prompt: Prompt,
    states: KeptStates | None = None,
) -> tuple[RowCache | OrderBoundRows, TargetForward | PathForward | OrderedForward]:
    """The cache of the rounds and their forward.

    Args:
        model: the target.
        route: how trees enter it.
        traits: what else is known of it.
        model_kwargs: of the call.
        cache: from `cache_of`.
        carried: from `cache_of`.
        prompt: what the cache holds.
        states: gets hidden states and attentions, if the call asks for them.
    """
    batch = len(prompt.real_tokens)
    if carried:
        attributes = [(model.get_submodule(module), name) for module, name in traits.attributes]
        protected = _compat.is_user_defined(cache)
        lengths = [prompt.physical] * batch
        state = OrderBoundRows(carried, attributes, lengths, axes=dict(traits.axes), protected=protected)
        return state, OrderedForward(model, state, prompt, model_kwargs, alone=traits.alone)
    lengths = [_compat.cache_length(cache)] * batch
    if route.by_paths:
        paths = PathCache(cache, lengths)
        return paths, PathForward(model, paths, prompt, model_kwargs)
    rows = RowCache(cache, lengths)
    positions, mask = prompt.last_positions, prompt.mask_BP
    return rows, TargetForward(model, rows, positions, mask, model_kwargs, states, route)


def positions_of(model: PreTrainedModel, route: Route, prompt: Prompt) -> tuple[list[int], int | None]:
    """Per row the position of the last prompt token, and the first position that the model cannot read."""
    batch = len(prompt.real_tokens)
    if not route.told_positions:
        # Padding counts: it takes up slots of the cache.
        return [prompt.physical - 1] * batch, path_length_limit(model)
    limit = learned_position_limit(model, _compat.max_positions(model))
    return prompt.last_positions.reshape(-1, batch).amax(0).tolist(), limit
