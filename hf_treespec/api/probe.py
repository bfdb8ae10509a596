"""A small tree on the user's own model, compared with its paths: the proof that a route holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_treespec import _compat
from hf_treespec.api.layer_trial import (
    check_states,
    forget_layers,
    has_unnamed_layers,
    read_behind,
    try_layers,
    unknown_classes,
)
from hf_treespec.api.outliers import without_shared_outliers
from hf_treespec.attention import (
    ModuleCalls,
    attention_for_probes,
    counted_by_depth,
    position_modules,
    recorded_calls,
    tree_masks,
)
from hf_treespec.cache import PathCache, RowCache
from hf_treespec.engine import PathForward, Prompt, TargetForward
from hf_treespec.errors import TreeSpecError
from hf_treespec.routes import Route
from hf_treespec.tree import TokenTree

__all__ = [
    "FAILURES",
    "RIGHT_NODES",
    "Sample",
    "compare",
    "evaluation",
    "find_position_modules",
    "probe_masks",
    "probe_paths",
]

# A chain beside the path of the last node, which skips it: a model that counts its distances in cache slots is far off
# even if its attention hardly depends on them.
_CHAIN = (3, 1, 4, 2) * 3
RIGHT_NODES = (0, len(_CHAIN) + 1, len(_CHAIN) + 3)


class Sample:
    """Tokens of one comparison; other shifts give other tokens in the same places.

    Root 2 has the children 3, which begins the chain, and 1, which has the children 4 and 3.
    """

    def __init__(self, shift: int) -> None:
        def moved(tokens: Sequence[int]) -> tuple[int, ...]:
            return tuple(token + shift for token in tokens)

        last = len(_CHAIN) + 1
        self.prompt = moved((4, 3, 1, 2, 3, 1))
        self.tree = TokenTree(moved((2, *_CHAIN, 1, 4, 3)), (*range(-1, len(_CHAIN)), 0, last, last))
        self.right = moved((2, 1, 3))
        self.wrong = moved((2, 3, 3))
        # Read after the commit of the right path.
        self.next = 2 + shift
        self.ids_needed = 5 + shift


# A model may be as good as blind to a wrong ancestor among some tokens: then others are tried.
_SHIFTS = (0, 5, 11, 20)
_TELLING = 1e-2
# Error allowed, as a share of what one wrong ancestor changes.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-2}
_LOW_PRECISION_TOLERANCE = 0.2
# Rounding errors of the largest logit that are no error of the mask, and the share at which nothing would be proven.
_ROUNDINGS = 8
_MOST_ROUNDING = 0.25
# What a forward may raise that is not built for what the probe asks of it.
FAILURES = (
    RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, KeyError, IndexError, AssertionError,
)  # fmt: skip


@contextmanager
def evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Dropout off for the probe, module by module as it was afterwards."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def probe_masks(
    model: PreTrainedModel, route: Route = Route.MASK, position_names: Sequence[str] = ()
) -> tuple[str | None, bool]:
    """Compare a tree forward under a tree mask, and a step after its commit, with plain decoding along a path.

    Cache layers of unknown classes are tried first; what the commit leaves in them must be plain decoding's too.

    Args:
        model: the model.
        route: one of the masked routes.
        position_names: see `find_position_modules`, for `Route.POSITION_HOOK`.

    Returns:
        None if they agree, else the reason why the model cannot take a tree; and whether that is final: an exception
        may have come from the state of the machine.
    """
    excuse = "it does not build its masks or positions from the mask registry and position_ids"
    unknown = unknown_classes(model)
    with ExitStack() as stack:

        def tree_logits(sample: Sample) -> Tensor:
            if reason := try_layers(model):
                raise TreeSpecError(reason)
            stack.enter_context(attention_for_probes(model))
            stack.enter_context(tree_masks())
            stack.enter_context(counted_by_depth(model, route, position_names))
            return _tree_logits(model, sample, route)

        def path_logits(sample: Sample, path: tuple[int, ...]) -> Tensor:
            return _path_logits(model, sample, path)[0]

        # Of layers that nobody knows one sample says too little.
        error, final = compare(model, tree_logits, path_logits, excuse, thorough=has_unnamed_layers(model))
    if error is not None:
        forget_layers(unknown)
    return error, final


def probe_paths(model: PreTrainedModel) -> tuple[str | None, bool]:
    """Compare a path batch, and a step after its commit, with plain forwards; see `probe_masks`.

    An encoder is not run: random states stand in for what it read, since its inputs may be of any kind.
    """
    encoder: dict[str, Any] = {}
    unknown = unknown_classes(model)

    def plain(sample: Sample, path: tuple[int, ...]) -> Tensor:
        encoder.update(_compat.encoder_states(model))
        ids = _ids(model, (*sample.prompt, *path, sample.next))
        inputs = _compat.prepare_inputs(model, ids, use_cache=False, **encoder)
        return model(**inputs, return_dict=True).logits[0, [-2, -2, -1]].double()  # type: ignore[no-any-return]

    def batch(sample: Sample) -> Tensor:
        if not _compat.is_encoder_decoder(model) and (reason := try_layers(model)):
            raise TreeSpecError(reason)
        return _batch_logits(model, sample, _compat.encoder_states(model))

    error, final = compare(model, batch, plain, "it does not read the paths of a tree as batch rows alike")
    if error is not None:
        forget_layers(unknown)
    return error, final


@torch.no_grad()
def find_position_modules(model: PreTrainedModel) -> tuple[str, ...]:
    """Names of the modules that make embeddings of positions from the length of the cache; none if that fails.

    A few tiny forwards tell, see `position_modules`. One of them reads the padding id: positions that skip padding
    cannot be corrected by depth, and pass for no positions here.
    """
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    pad = pad if isinstance(pad, int) and 0 <= pad < _compat.embedding_rows(model) else 0
    prompt = (4, 3, 1, 2, 3)

    def calls(tokens: tuple[int, ...], *, length: int) -> ModuleCalls:
        cache = _compat.make_cache(model.config)
        read_behind(model, prompt[:length], cache, first=0)
        with recorded_calls(model, len(tokens)) as record:
            read_behind(model, tokens, cache, first=length)
        return record

    try:
        with evaluation(model), without_shared_outliers(model):
            base, other = calls((2, 3, 1), length=4), calls((3, pad, 4), length=4)
            return position_modules(base, other, calls((2, 3, 1), length=5))
    except torch.OutOfMemoryError:
        raise
    except FAILURES:
        # What keeps the model from being read is told by the probes of other routes.
        return ()


@torch.no_grad()
def compare(
    model: PreTrainedModel,
    tree_logits: Callable[[Sample], Tensor],
    plain: Callable[[Sample, tuple[int, ...]], Tensor],
    excuse: str,
    *,
    thorough: bool = False,
) -> tuple[str | None, bool]:
    """Compare logits of trees with those of plain forwards along the right path, by what the wrong one changes.

    Args:
        model: the model.
        tree_logits: float64 logits of some nodes of a sample.
        plain: the same of a plain forward along a path.
        excuse: what a difference means.
        thorough: whether every telling sample must agree, not the first alone.

    Returns:
        None if they agree, else the reason; and whether that is final.
    """
    rows = _compat.embedding_rows(model)
    samples = [sample for sample in map(Sample, _SHIFTS) if sample.ids_needed <= rows]
    if not samples:
        return f"its vocabulary of {rows} ids is too small for the probe", True
    dtype = _compat.working_dtype(model)
    seen: list[tuple[float, float, float]] = []
    try:
        with evaluation(model), without_shared_outliers(model):
            for sample in samples:
                tree = tree_logits(sample)
                right, wrong = (plain(sample, path) for path in (sample.right, sample.wrong))
                scale, size = float((right - wrong).abs().max()), float(right.abs().max())
                seen.append((scale, size, float((tree - right).abs().max())))
                if not scale <= _TELLING * size and not thorough:
                    break
    except torch.OutOfMemoryError:
        raise  # says nothing about the model
    except TreeSpecError as error:
        return f"the probe was refused: {error}", True  # by what the model builds its masks for
    except FAILURES as error:
        return f"the probe forward raised {type(error).__name__}: {error}", False
    telling = [one for one in seen if not one[0] <= _TELLING * one[1]]
    for scale, size, off in telling or [max(seen)]:
        # Sharp attention may leave a wrong ancestor so little to change that rounding is no small share of it.
        rounding = _ROUNDINGS * torch.finfo(dtype).eps * size
        share = _TOLERANCE.get(dtype, _LOW_PRECISION_TOLERANCE)
        allowed = max(share * scale, min(rounding, _MOST_ROUNDING * scale))
        if not off <= allowed:
            return (
                f"in a probe its logits at a tree node are off by {off:.3g} from the node's own path, where "
                f"{allowed:.3g} is allowed ({scale:.3g} is what a wrong ancestor changes): {excuse}"
            ), True
    return None, True


def _ids(model: PreTrainedModel, tokens: tuple[int, ...]) -> Tensor:
    return torch.tensor([tokens], device=model.device)


def _tree_logits(model: PreTrainedModel, sample: Sample, route: Route) -> Tensor:
    """Logits `[2, V]`: at a tree node, and of the token after it once its path has been committed."""
    cache = _compat.make_cache(model.config)
    read_behind(model, sample.prompt, cache, first=0)
    rows = RowCache(cache, [len(sample.prompt)])
    last = torch.tensor([[len(sample.prompt) - 1]], device=model.device)
    forward = TargetForward(model, rows, last, None, {"use_cache": True}, route=route)
    with rows.transaction() as transaction:
        at_node = forward([sample.tree], [1])[0, -1]
        transaction.commit([RIGHT_NODES])
    check_states(cache, lambda: _path_logits(model, sample, sample.right, ahead=False)[1])
    with rows.transaction():
        after = forward([TokenTree.root_only(sample.next)], [1 + len(RIGHT_NODES)])[0, -1]
    return torch.stack([at_node, after]).double()


def _path_logits(
    model: PreTrainedModel, sample: Sample, path: tuple[int, ...], *, ahead: bool = True
) -> tuple[Tensor, _compat.Cache]:
    """Logits `[2, V]` at the end of a path and of the token after it, if `ahead`; and the cache after all that.

    Token by token, as plain decoding reads it: some models look ahead in what they are given at once.
    """
    cache = _compat.make_cache(model.config)
    read_behind(model, sample.prompt, cache, first=0)
    tokens = (*path, sample.next) if ahead else path
    for place, token in enumerate(tokens, len(sample.prompt)):
        after = read_behind(model, (token,), cache, first=place)
        if place == len(sample.prompt) + len(path) - 1:
            at_node = after
    return torch.stack([at_node[0, -1], after[0, -1]]).double(), cache


def _batch_logits(model: PreTrainedModel, sample: Sample, encoder: dict[str, Any]) -> Tensor:
    """Logits `[3, V]`: at a tree node, read both ways, and of the token after it once its path has been committed."""
    cache, width = _compat.generation_cache(model), len(sample.prompt)
    kwargs = {"use_cache": True, **encoder}
    ids = _ids(model, sample.prompt)
    inputs = _compat.prepare_inputs(model, ids, **{_compat.cache_kwarg(model): cache}, **kwargs)
    model(**inputs, return_dict=True)
    rows = PathCache(cache, [width])
    prompt = Prompt.of(ids, {}, _compat.default_config(), encoder_decoder=_compat.is_encoder_decoder(model))
    forward = PathForward(model, rows, prompt, kwargs)
    logits = []
    for stem in (False, True):
        forward.stems.forced = stem
        with rows.transaction() as transaction:
            logits.append(forward([sample.tree], [1])[0, -1])
            if stem:
                transaction.commit([RIGHT_NODES])
    with rows.transaction():
        logits.append(forward([TokenTree.root_only(sample.next)], [1 + len(RIGHT_NODES)])[0, -1])
    return torch.stack(logits).double()
