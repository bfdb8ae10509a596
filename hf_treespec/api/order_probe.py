"""The proof of the path batch on state that depends on the order of the tokens, on the user's own model.

Nothing is known of such a model beforehand: not where its state lies, nor whether it goes on right when it is given
several tokens behind a cached prefix, nor what padding does to that. So two rounds and a step after them are compared
with plain decoding of the same tokens one by one: for one row, for a batch with padding, or else with roots alone.

Shapes: B rows, P prompt tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_treespec import _compat
from hf_treespec.api.probe import FAILURES, RIGHT_NODES, Sample, compare, evaluation
from hf_treespec.attention import attention_for_probes, counted_by_depth, tree_masks
from hf_treespec.cache import tensor_places
from hf_treespec.engine import OrderedForward, Prompt, cache_of, make_target, state_kwargs
from hf_treespec.routes import PathTraits, Route
from hf_treespec.tree import TokenTree

__all__ = ["Finding", "probe_continuing", "probe_order", "without_baseline"]

_EXCUSE = "its state does not go on right behind the tokens of a path"


class Finding(NamedTuple):
    """What the probe found.

    Attributes:
        route: how trees enter the model; `Route.REFUSE` if not even plain steps could be repeated.
        reason: what the answer rests on, or why it is no.
        traits: for the engine.
        final: whether another try could not end otherwise.
    """

    route: Route
    reason: str
    traits: PathTraits
    final: bool


def probe_order(model: PreTrainedModel, *, why_steps: str = "") -> Finding:
    """Compare rounds on the model's own state with plain decoding of the same tokens one by one.

    Args:
        model: the model.
        why_steps: why several tokens are not tried at once, if that is known.
    """
    with _unchanged_modules(model):
        try:
            with evaluation(model):
                traits, own = _own_state(model)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            reason = f"the probe forward raised {type(error).__name__}: {error}"
            return Finding(Route.REFUSE, reason, PathTraits(), final=False)
        route = Route.OWN_STATE if own else Route.PATHS
        off, final = (why_steps, True) if why_steps else _compared(model, route, traits, batch=1)
        if off is None:
            padded, sure = _compared(model, route, traits, batch=2)
            return Finding(
                route,
                _REASON[padded is None] + (f" ({padded})" if padded else ""),
                replace(traits, alone=padded is not None),
                final=sure,
            )
        steps, sure = _compared(model, Route.STEPS, traits, batch=2)
        if steps is not None:
            return Finding(Route.REFUSE, f"{off}; and one by one, {steps}", traits, final=final and sure)
        reason = f"several tokens behind its cache are not read as one by one, so calls are decoded plainly: {off}"
        return Finding(Route.STEPS, reason, traits, final=final)


def probe_continuing(
    model: PreTrainedModel, route: Route, position_names: Sequence[str] = ()
) -> tuple[str | None, bool]:
    """Compare rounds with plain decoding, for a class that continues the arguments of its forwards by its own rule.

    What the rule says may change with every token; the other probes of a route read tokens without such arguments.

    Args:
        model: the model.
        route: one that passed its own probe, and keeps a cache of transformers.
        position_names: see `find_position_modules`, for `Route.POSITION_HOOK`.

    Returns:
        As `compare`.
    """
    with ExitStack() as stack:
        if route.masked:
            stack.enter_context(attention_for_probes(model))
        stack.enter_context(tree_masks())
        stack.enter_context(counted_by_depth(model, route, position_names))

        def rounds(sample: Sample) -> Tensor:
            return _rounds(model, sample, route, PathTraits(), 1, None)[0]

        def plain(sample: Sample, path: tuple[int, ...]) -> Tensor:
            return _plain(model, sample, (*path, *_rest(sample)), PathTraits(), 1)[0]

        return compare(
            model, rounds, plain, "its own _update_model_kwargs_for_generation changes what each step reads"
        )


@torch.no_grad()
def without_baseline(model: PreTrainedModel) -> str | None:
    """Why there is no plain decoding behind a cache that a tree could be equal to; None if there is one."""
    if _compat.is_encoder_decoder(model):
        return None
    sample = Sample(0)
    ids = torch.tensor([(*sample.prompt, *sample.right)], device=model.device)
    try:
        with evaluation(model), _unchanged_modules(model):
            steps, _ = _plain(model, sample, sample.right, PathTraits(), 1)
            whole = torch.cat([_prompt(model, sample, 1)[0], ids[:, -len(sample.right) :]], dim=1)
            inputs = _compat.prepare_inputs(model, whole, use_cache=False)
            inputs.pop("logits_to_keep", None)
            at_once = model(**inputs, return_dict=True).logits[0, -len(sample.right) :].double()
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        return f"plain decoding behind its cache raises {type(error).__name__}: {error}"
    if _compat.rereads_all(model, whole):
        return "it keeps nothing between its forwards: plain decoding reads the whole text at every step"
    # Some give the last logits alone.
    size, off = float(at_once.abs().max()), float((steps[-len(at_once) :] - at_once).abs().max())
    dtype = _compat.working_dtype(model)
    if off <= (_BASELINE_TOLERANCE if dtype in _STATE_TOLERANCE else _LOW_PRECISION_TOLERANCE) * size:
        return None
    return (
        f"plain decoding behind its cache does not give the logits of the whole text: they are off by {off:.3g} where "
        f"the largest is {size:.3g}, so that there is nothing right that trees could be equal to"
    )


# Share of the largest logit from which a cache is no help but a fault.
_BASELINE_TOLERANCE = 0.01
# The tensors of a state, by a name each.
_State = dict[str, Tensor]
# Share of the largest value of a tensor by which rounding may change it, by the dtype of the weights.
_STATE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 0.1
_REASON = {
    True: "two rounds on its state, kept and repeated per path, equal plain steps, alone and in a padded batch",
    False: "two rounds on its state, kept and repeated per path, equal plain steps; calls of several rows or with "
    "padding are decoded plainly, because there they do not",
}


def _compared(model: PreTrainedModel, route: Route, traits: PathTraits, *, batch: int) -> tuple[str | None, bool]:
    """See `compare`; for `Route.STEPS` the trees are roots.

    The states are compared as well: logits may hardly tell that what lies further back was forgotten.
    """
    steps = route is Route.STEPS
    ours: list[_State] = []
    theirs: _State = {}

    def rounds(sample: Sample) -> Tensor:
        runs = [_rounds(model, sample, route, traits, batch, stem) for stem in ([None] if steps else [False, True])]
        ours[:] = [state for _, state in runs]
        return torch.cat([logits for logits, _ in runs])

    def plain(sample: Sample, path: tuple[int, ...]) -> Tensor:
        logits, state = _plain(model, sample, (*path, *_rest(sample)), traits, batch)
        if path == sample.right:
            theirs.update(state)
        return logits if steps else torch.cat([logits, logits])

    error, final = compare(model, rounds, plain, _EXCUSE)
    if error is None:
        error = next((reason for state in ours if (reason := _differing(model, theirs, state))), None)
    return error, final


def _differing(model: PreTrainedModel, wanted: _State, found: _State) -> str | None:
    """Where two states are further apart than rounding explains, or None."""
    dtype = _compat.working_dtype(model)
    allowed = _STATE_TOLERANCE.get(dtype, _LOW_PRECISION_TOLERANCE)
    if wanted.keys() != found.keys():
        return "in a probe its state had other parts after a path than after plain steps"
    for place, one in wanted.items():
        two = found[place]
        if one.shape != two.shape:
            return f"in a probe {place} of its state had another shape after a path than after plain steps: {_EXCUSE}"
        if one.numel() and one.is_floating_point():
            size, off = float(one.abs().max()), float((one.double() - two.double()).abs().max())
            if not off <= allowed * size:
                return (
                    f"in a probe {place} of its state was off by {off:.3g} after a path, where {allowed * size:.3g} "
                    f"is allowed: {_EXCUSE}"
                )
    return None


def _rest(sample: Sample) -> tuple[int, int, int]:
    """What is read behind the path of the first round: a chain that is accepted whole, then a root."""
    return sample.next, sample.prompt[-1], sample.prompt[0]


def _prompt(model: PreTrainedModel, sample: Sample, batch: int) -> tuple[Tensor, Tensor | None]:
    """int64 `[B, P]` and its mask; about half of the first of several rows is padding.

    The prompt is so long that what a model forgets or takes together has begun to be forgotten or taken together. Its
    own kinds of layers may do so by the hundred.
    """
    layers = getattr(_compat.make_cache(model.config), "layers", [])
    repeats = 28 if any(_compat.is_foreign(layer) for layer in layers) else 4
    ids = torch.tensor([sample.prompt * repeats] * batch, device=model.device)
    if batch == 1:
        return ids, None
    mask = torch.ones_like(ids)
    mask[0, : ids.shape[1] // 2 - 1] = 0
    return ids, mask


def _state(model: PreTrainedModel, carried: dict[str, Any], traits: PathTraits) -> _State:
    """Copies: modules are used again."""
    own = [(f"{path}.{name}", getattr(model.get_submodule(path), name)) for path, name in traits.attributes]
    every = enumerate([*tensor_places(carried), *((name, value) for name, value in own if value is not None)])
    return {f"{place} ({number})": tensor.clone() for number, (place, tensor) in every}


def _plain(
    model: PreTrainedModel, sample: Sample, tokens: Sequence[int], traits: PathTraits, batch: int
) -> tuple[Tensor, _State]:
    """Logits `[4 B, V]` behind the path and behind each of the rest, and the state after them."""
    ids, mask = _prompt(model, sample, batch)
    kwargs = _compat.start_kwargs(model, ids, mask)
    outputs = _compat.prefill(model, ids, _compat.default_config(), kwargs)
    logits = []
    for token in tokens:
        ids = torch.cat([ids, ids.new_full((batch, 1), token)], dim=1)
        outputs, kwargs = _compat.plain_step(model, outputs, ids, kwargs)
        logits.append(outputs.logits[:, -1].double())
    carried = {**state_kwargs(model, kwargs), **_compat.carried_state(model, outputs)}
    return torch.cat(logits[-1 - len(_rest(sample)) :]), _state(model, carried, traits)


def _rounds(
    model: PreTrainedModel, sample: Sample, route: Route, traits: PathTraits, batch: int, stem: bool | None
) -> tuple[Tensor, _State]:
    """The same by rounds."""
    ids, mask = _prompt(model, sample, batch)
    kwargs = _compat.start_kwargs(model, ids, mask)
    outputs = _compat.prefill(model, ids, _compat.default_config(), kwargs)
    cache, carried = cache_of(model, route, kwargs, outputs)
    kwargs = _compat.continued_kwargs(model, outputs, kwargs)
    prompt = Prompt.of(ids, {"attention_mask": mask}, _compat.default_config())
    rows, forward = make_target(model, route, traits, kwargs, cache, carried, prompt)
    if isinstance(forward, OrderedForward):
        forward.stems.forced = stem
    chain = TokenTree.chain(_rest(sample)[:2])
    if route is Route.STEPS:
        roots = [TokenTree.root_only(token) for token in (*sample.right, *_rest(sample))]
        steps: list[tuple[TokenTree, Sequence[int]]] = [(root, (0,)) for root in roots]
    else:
        steps = [(sample.tree, RIGHT_NODES), (chain, (0, 1)), (TokenTree.root_only(_rest(sample)[2]), (0,))]
    logits, ahead = [], 1
    for tree, accepted in steps:
        with rows.transaction() as transaction:
            at_nodes = forward([tree] * batch, [ahead] * batch)
            transaction.commit([accepted] * batch)
        ahead += len(accepted)
        logits += [at_nodes[:, node].double() for node in (accepted if tree is not sample.tree else accepted[-1:])]
    # Of an ordinary cache, whoever made it, the cache is all.
    held = carried or {_compat.cache_kwarg(model): cache}
    return torch.cat(logits[-1 - len(_rest(sample)) :]), _state(model, held, traits)


def _own_state(model: PreTrainedModel) -> tuple[PathTraits, bool]:
    """Where the state lies, and whether any of it lies outside of a transformers cache.

    Read off by comparing forwards of one row and of two. Of what a decoding forward changes in the modules only
    tensors that have one row per batch row count: tables that are made anew as the text grows do not.
    """
    changed, shapes = [], []
    carried: dict[str, Any] = {}
    for batch in (1, 2):
        ids, mask = _prompt(model, Sample(0), batch)
        with torch.no_grad():
            kwargs = _compat.start_kwargs(model, ids, mask)
            outputs = _compat.prefill(model, ids, _compat.default_config(), kwargs)
            before = dict(_tensors(model))
            versions = {name: tensor._version for name, tensor in before.items()}
            outputs, kwargs = _compat.plain_step(model, outputs, torch.cat([ids, ids[:, :1]], dim=1), kwargs)
        carried = {**state_kwargs(model, kwargs), **_compat.carried_state(model, outputs)}
        shapes.append([(place, tensor.shape) for place, tensor in tensor_places(carried)])
        changed.append(
            {
                name
                for name, tensor in _tensors(model)
                if (tensor is not before.get(name) or tensor._version != versions[name])
                and tensor.shape[:1] == (batch,)
            }
        )
    axes = {}
    for (place, one), (_, two) in zip(*shapes, strict=True):
        differ = [axis for axis, sizes in enumerate(zip(one, two, strict=True)) if sizes == (1, 2)]
        if differ != [0] and one:
            axes[place] = differ[0] if differ else None
    found = changed[0] & changed[1]
    inside = bool(carried) and all(isinstance(value, _compat.Cache) for value in carried.values())
    return PathTraits(tuple(sorted(found)), tuple(sorted(axes.items()))), bool(found) or not inside


def _tensors(model: nn.Module) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Buffers and plain attributes of all modules that are tensors, by module name and attribute."""
    for path, module in model.named_modules():
        for name, value in (*module._buffers.items(), *module.__dict__.items()):
            if isinstance(value, Tensor):
                yield (path, name), value


@contextmanager
def _unchanged_modules(model: nn.Module) -> Iterator[None]:
    """Give all modules their buffers and plain attributes back, with what they held."""
    saved = [(module, dict(module.__dict__), dict(module._buffers)) for module in model.modules()]
    contents = {id(tensor): (tensor, tensor.clone(), tensor._version) for _, tensor in _tensors(model)}
    try:
        yield
    finally:
        for module, attributes, buffers in saved:
            for name, value in attributes.items():
                if module.__dict__.get(name) is not value:
                    module.__dict__[name] = value
            module._buffers.update(buffers)
        for tensor, content, version in contents.values():
            if tensor._version != version:
                tensor.copy_(content)
