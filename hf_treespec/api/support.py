"""Whether a model can take a tree, and why not: read off the model, then proven by one small probe."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_treespec import _compat
from hf_treespec.api.gaps import heeds_gaps
from hf_treespec.api.order_probe import probe_continuing, probe_order, without_baseline
from hf_treespec.api.probe import find_position_modules, probe_masks, probe_paths
from hf_treespec.attention import has_bias_functions, own_structure
from hf_treespec.cache import is_named, is_order_bound, layer_kind
from hf_treespec.errors import UnsupportedModelError
from hf_treespec.routes import PathTraits, Route
from hf_treespec.twin import TwinError, is_twin, tiny_twin

__all__ = ["Support", "is_supported", "path_traits", "require_support", "routed", "unwrap"]

_REMEMBERED = 64
_PROVEN = "a probe tree equals its paths"
_PROVEN_BY = {
    Route.MASK: "",
    Route.POSITION_HOOK: " with the outputs of {} taken by depth",
    Route.ALIBI: " with its bias by distance taken by depth",
}
_PROVEN_PATHS = "a probe tree equals its paths when each is a batch row"
# By model type: what a probe as short as ours cannot see.
_ONE_BY_ONE = {
    "moshi": "behind its window of some thousand tokens it masks several tokens of a forward otherwise than one",
}
_LOCK = threading.Lock()
_ANSWERS: OrderedDict[tuple[Any, ...], Support] = OrderedDict()
_POSITION_MODULES: OrderedDict[tuple[Any, ...], tuple[str, ...]] = OrderedDict()
_TRAITS: OrderedDict[tuple[Any, ...], PathTraits] = OrderedDict()


class Support(NamedTuple):
    """Answer of `is_supported`.

    Attributes:
        ok: whether trees work.
        route: how they enter the model.
        reason: what the answer rests on.
    """

    ok: bool
    route: Route
    reason: str


def _refuse(reason: str) -> Support:
    return Support(False, Route.REFUSE, reason)


def unwrap(model: Any) -> Any:
    """The transformers model inside PEFT, torch.compile and DDP wrappers."""
    seen = 0
    while not isinstance(model, PreTrainedModel) and seen < 8:
        seen += 1
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        elif isinstance(getattr(model, "module", None), nn.Module):
            model = model.module
        else:
            break
    # A compiled PreTrainedModel passes isinstance; its hooks belong on the original.
    inner = model.__dict__.get("_modules", {}).get("_orig_mod") if isinstance(model, nn.Module) else None
    return inner if inner is not None else model


def is_supported(model: Any) -> Support:
    """Whether `model` can take a tree in one forward, and by which route.

    The static part reads class, config and cache layers. Then a probe compares one small tree with its paths, in a
    few tiny forwards; the answer is kept per class, config, dtype, device type and attention; under autocast its
    dtype counts. A model that takes no
    tree mask, or whose probe tells that it does not heed it, is probed for the path batch. Between the two, a model
    that counts positions or a bias by distance in cache slots is probed with these corrected.

    A model without weights (parameters on the meta device) cannot be run. A tiny twin of it, with random weights on
    the CPU, is probed in its place, and the reason says so.

    Args:
        model: a causal LM, an encoder-decoder, or a wrapper of one. It is not changed.
    """
    inner = unwrap(model)
    if not isinstance(inner, PreTrainedModel):
        return _refuse(
            f"{type(inner).__name__} is no transformers PreTrainedModel; expected a loaded model, such as "
            "AutoModelForCausalLM.from_pretrained(...) gives"
        )
    with _LOCK:
        key = _key(inner)
        if key in _ANSWERS:
            _ANSWERS.move_to_end(key)
            return _ANSWERS[key]
        static = _static_reason(inner)
        if static is not None:
            return _refuse(static)
        place = _compat.weights_place(inner)
        if place == "nowhere":
            answer, final = _probed_in_a_twin(inner)
        elif place == "offloaded":
            # To bring in offloaded weights for all the forwards of a probe would take too long.
            answer, final = _unprobed(inner, "its weights are offloaded"), False
        else:
            # In inference mode tensors do not tell that they were written to.
            with torch.inference_mode(False), torch.no_grad():
                answer, final = _probed(inner)
        # The key of a model that is here in part is that of one that is here.
        if final and (place == "here" or inner.device.type == "meta"):
            _remember(_ANSWERS, key, answer)
        return answer


def _unprobed(model: PreTrainedModel, why: str) -> Support:
    """The answer where nothing can be run."""
    masked = _may_take_masks(model) and not own_structure(model.config) and not _keeps_order(model)
    route = Route.MASK if masked else Route.PATHS
    return Support(True, route, f"by class, config and cache layers; not probed, {why}")


def _probed_in_a_twin(model: PreTrainedModel) -> tuple[Support, bool]:
    """The answer of the probes of a tiny twin of a model without weights, and whether it is final."""
    try:
        with tiny_twin(model) as twin:
            answer, final = _probed(twin, model)
    except TwinError as error:
        why = f"parameters are on the meta device and no tiny twin of this config can be built: {error}"
        return _unprobed(model, why), True
    return answer._replace(reason=f"{answer.reason}, in a tiny twin of this config"), final


def _remember(answers: OrderedDict[tuple[Any, ...], Any], key: tuple[Any, ...], answer: Any) -> None:
    answers[key] = answer
    while len(answers) > _REMEMBERED:
        answers.popitem(last=False)


def routed(model: PreTrainedModel, support: Support) -> tuple[Route, tuple[str, ...]]:
    """The route of a supported model, and the modules that it corrects."""
    return support.route, _position_modules(model) if support.route is Route.POSITION_HOOK else ()


def _position_modules(model: PreTrainedModel) -> tuple[str, ...]:
    """Names of the modules whose outputs `Route.POSITION_HOOK` corrects in `model`."""
    key = _key(model)
    names = _POSITION_MODULES.get(key, ())
    if not names and (names := find_position_modules(model)):
        _remember(_POSITION_MODULES, key, names)
    return names


def path_traits(model: Any) -> PathTraits:
    """What the probe of `is_supported` found out besides the route."""
    return _TRAITS.get(_key(unwrap(model)), PathTraits())


def _probed(model: PreTrainedModel, asked: PreTrainedModel | None = None) -> tuple[Support, bool]:
    """The answer of the probes, and whether it is final.

    Args:
        model: that is run.
        asked: that the answer is for, if it is another one: its sizes and its attention count.
    """
    asked = asked or model
    reasons, final, why = [], True, ""
    if why_steps := _ONE_BY_ONE.get(model.config.model_type, ""):
        found = probe_order(model, why_steps=why_steps)
        return Support(found.route is not Route.REFUSE, found.route, found.reason), found.final
    if structure := own_structure(asked.config):
        named = ", ".join(f"{name}={size}" for name, size in structure.items())
        why = f"; its config names {named}: attention that may count in cache slots, farther than a probe can see"
    for route, names in () if structure else _masked_routes(model):
        error, sure = probe_masks(model, route, names)
        if error is None and _compat.continues_by_itself(model):
            error, sure = probe_continuing(model, route, names)
        if error is None:
            proof = _PROVEN + _PROVEN_BY[route].format(", ".join(names)) + _attention_hint(asked)
            if route.told_positions and not heeds_gaps(model):
                _remember(_TRAITS, _key(model), PathTraits(in_step=True))
                proof += "; rows of a batch grow in step, since it does not look past padding behind its cache"
            return Support(True, route, proof), final
        reasons.append(error)
        final = final and sure
    if not _keeps_order(model):
        error, sure = probe_paths(model)
        if error is None and _compat.continues_by_itself(model) and not _compat.is_encoder_decoder(model):
            error, sure = probe_continuing(model, Route.PATHS)
        if error is None:
            return Support(True, Route.PATHS, _PROVEN_PATHS + why), final
        reasons.append(error)
        final = final and sure
    if _is_order_bound(model):
        found = probe_order(model)
        final = final and found.final
        _remember(_TRAITS, _key(model), found.traits)
        if found.route is not Route.REFUSE:
            return Support(True, found.route, found.reason + why), final
        reasons.append(found.reason)
    said = "; and path by path, ".join(dict.fromkeys(reasons))
    fault = without_baseline(model)
    return _refuse(f"{fault}; {said}" if fault else said), final


def _masked_routes(model: PreTrainedModel) -> Iterator[tuple[Route, tuple[str, ...]]]:
    """The routes by one row that `model` may take, the cheapest first, with the modules they correct."""
    if _keeps_order(model):
        return
    if _may_take_masks(model):
        yield Route.MASK, ()
    if _compat.is_encoder_decoder(model):
        return
    if has_bias_functions(model):
        yield Route.ALIBI, ()
    if names := _position_modules(model):
        yield Route.POSITION_HOOK, names


def _may_take_masks(model: PreTrainedModel) -> bool:
    """Whether siblings can be given equal positions."""
    if _compat.is_encoder_decoder(model) or _compat.has_alibi(model):
        return False
    return _compat.accepts_position_ids(model)


def require_support(model: Any, name: str) -> Support:
    """The answer of `is_supported`; raise `UnsupportedModelError` with the reason if the model cannot take a tree.

    Args:
        model: the model.
        name: what the message calls it.
    """
    support = is_supported(model)
    if not support.ok:
        raise UnsupportedModelError(
            f"{name} ({type(unwrap(model)).__name__}) cannot take a tree: {support.reason}"
            + (". Generate without tree_config" if isinstance(unwrap(model), PreTrainedModel) else "")
        )
    return support


def _attention_hint(model: PreTrainedModel) -> str:
    own = _compat.attention_implementation(model)
    if own in _compat.MASK_IMPLEMENTATIONS:
        return ""
    return f" under sdpa; the model runs {own!r}, so calls need TreeConfig(attention='sdpa')"


def _key(model: PreTrainedModel) -> tuple[Any, ...]:
    base = getattr(type(model), "_treespec_base", type(model))
    # Layers may have been replaced by others, quantised ones say, without a word in the config.
    parts = frozenset(type(module) for module in model.modules() if module is not model)
    dtype = _compat.working_dtype(model)
    config = model.config.to_json_string(use_diff=False)
    # All places of the weights are looked at only where the first says nothing: a key is made several times a call.
    device = model.device.type
    where = device, _compat.weights_place(model) if device == "meta" else "", is_twin(model)
    return base, parts, config, dtype, where, _compat.attention_implementation(model)


def _static_reason(model: PreTrainedModel) -> str | None:
    """Why the model is out without running it, or None."""
    if not model.can_generate():
        return "the model cannot generate"
    if (streams := _compat.token_streams(model)) > 1:
        return f"each of its steps reads {streams} tokens at once, and a tree has one in each node"
    if _compat.overrides_generate(model):
        return "its class brings a generate() of its own, which does not run that of transformers"
    if _compat.overrides_sampling(model):
        return "its class brings a decoding loop of its own"
    if fault := _compat.cache_fault(model):
        return f"generate() cannot make a cache for its config: {fault}"
    return None


def _keeps_order(model: PreTrainedModel) -> bool:
    """Whether no mask could keep siblings apart: a recurrent state or a cache of its own kind mixes all that is read.

    Layers of classes that nobody named are tried under masks first.
    """
    if _compat.is_stateful(model) or not _compat.supports_dynamic_cache(model):
        return True
    return any(
        layer_kind(layer) is None and (_compat.is_linear_attention(layer) or is_named(type(layer)))
        for layer in getattr(_compat.make_cache(model.config), "layers", [])
    )


def _is_order_bound(model: PreTrainedModel) -> bool:
    """Whether the state can only be kept and given back as a whole, as far as its cache tells."""
    return _keeps_order(model) or is_order_bound(_compat.make_cache(model.config))
