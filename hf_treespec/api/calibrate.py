"""Calibration: what rounds cost on this machine, and what a draft is worth on prompts of the user's own."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hf_treespec import _compat
from hf_treespec.api.calibration import Calibration, Timing, best_size
from hf_treespec.api.enable import disable, enable, is_enabled
from hf_treespec.api.support import require_support, unwrap
from hf_treespec.config import TreeConfig
from hf_treespec.control import SizePolicy, keep_measured
from hf_treespec.engine import SizedTrees, Trial, on_trial, take_measured
from hf_treespec.errors import TreeConfigError, UnsupportedModelError
from hf_treespec.routes import Route

__all__ = ["calibrate"]

_SIZES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_DEPTH = 16  # of the trees that are timed: deep enough for 64 nodes, shallow enough for the end of any text
_ATTEMPTS = 8  # random texts, should they end early


def calibrate(
    model: Any,
    *,
    prompts: Sequence[Mapping[str, Any]] = (),
    draft_model: Any = None,
    tree_config: TreeConfig | None = None,
    max_nodes: int = 64,
    contexts: Sequence[int] = (128, 1024),
    batches: Sequence[int] = (1,),
    repeats: int = 5,
    max_new_tokens: int = 64,
    keep: bool = True,
    report: Callable[[str], None] | None = None,
    **call: Any,
) -> Calibration:
    """Measure what rounds take, by tree size, length of the text and batch, and how often a draft is right.

    The cost of the target is that of whole rounds over random tokens, without drafting. The draft is run on the
    prompts, with trees of several depths; with it comes a config. All is kept in the file of costs, see
    `hf_treespec.control.cache_folder`, from which later calls of `generate` begin; they never write to it. Calls of
    this model that began before take it up, too.

    Args:
        model: the target, enabled or not; it is given back as it was.
        prompts: inputs of `generate`, one prompt each; without them nothing is drafted and there is no config.
        draft_model: as `assistant_model` of `generate`.
        tree_config: how to draft; its sizes bound those of the config that is made. Default: `TreeConfig` with
            `max_nodes` nodes.
        max_nodes: the largest tree to time.
        contexts: tokens of the texts.
        batches: rows.
        repeats: rounds of each size.
        max_new_tokens: of each prompt.
        keep: whether to write the file of costs.
        report: told what is measured next.
        call: further arguments of `generate` on the prompts, such as `do_sample` and `temperature`.

    Returns:
        What was found; `save` writes it to a folder.

    Raises:
        TreeConfigError: naming the argument that cannot work, before anything is measured; or sizes that could not
            be timed.
        UnsupportedModelError: for a model that takes no trees, or reads one token a forward only.
    """
    inner = unwrap(model)
    support = require_support(inner, "the model")
    if support.route is Route.STEPS:
        raise UnsupportedModelError(
            f"{type(inner).__name__} reads one token a forward: no tree pays, whatever it costs"
        )
    sizes = [size for size in _SIZES if size <= max_nodes]
    if max_nodes not in sizes:
        sizes.append(max_nodes)
    _check(inner, max_nodes=max_nodes, contexts=contexts, batches=batches, repeats=repeats, rounds=len(sizes))
    tell = report or (lambda step: None)
    own = TreeConfig(max_nodes=max_nodes) if tree_config is None else tree_config
    _check_prompts(prompts, own)
    trees = TreeConfig(
        max_nodes=max_nodes, max_depth=_DEPTH, max_children=4, fallback="off", kv_cache=own.kv_cache,
        attention=own.attention,
    )  # fmt: skip
    with _enabled(model):
        timings, trial = [], Trial()
        for batch in dict.fromkeys(batches):
            for context in dict.fromkeys(contexts):
                tell(f"costs: batch {batch}, context {context}")
                timings += _timed(model, inner, sizes, repeats, (batch, context), trees, support.route.by_paths, trial)
        setting = trial.setting
        assert setting is not None
        drafted: dict[str, Any] = {}
        if prompts:
            arguments = {"max_new_tokens": max_new_tokens, **call}
            drafted = _drafted(model, prompts, draft_model, own, arguments, timings, tell)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = Calibration(setting=setting, timings=tuple(timings), measured=now, **{"draft": "", **drafted})
    if keep:
        keep_measured(found.curves())
        take_measured(inner, found.curves())
    return found


def _check(model: Any, *, max_nodes: int, contexts: Any, batches: Any, repeats: int, rounds: int) -> None:
    for name, value in (("max_nodes", max_nodes), ("repeats", repeats)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise TreeConfigError(f"calibrate({name}={value!r}): expected a positive integer")
    for name, values in (("contexts", contexts), ("batches", batches)):
        if not values or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in values):
            raise TreeConfigError(f"calibrate({name}={values!r}): expected positive integers")
    limit = _compat.max_positions(model)
    room = _rounds(rounds, repeats)
    if limit is not None and max(contexts) + room > limit:
        raise TreeConfigError(
            f"calibrate(contexts={list(contexts)!r}): the model reads {limit} positions, of which the rounds take "
            f"{room}; expected {max(limit - room, 0)} at most"
        )


def _check_prompts(prompts: Any, config: TreeConfig) -> None:
    for number, prompt in enumerate(prompts):
        ids = prompt.get("input_ids") if isinstance(prompt, Mapping) else None
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[0] != 1 or not ids.shape[1]:
            got = f"of shape {list(ids.shape)}" if isinstance(ids, torch.Tensor) else f"{type(ids).__name__}"
            if not isinstance(prompt, Mapping):
                got = f"none in a {type(prompt).__name__}"
            raise TreeConfigError(
                f"calibrate(prompts=...): input_ids of prompts[{number}] are {got}; expected a mapping with the "
                "input_ids of one row, [1, tokens]"
            )
    if prompts and not config.max_nodes:
        raise TreeConfigError(
            "calibrate(tree_config=...) with prompts: its max_nodes is 0: nothing is drafted on them; expected "
            "at least 1, or no prompts"
        )


def _rounds(sizes: int, repeats: int) -> int:
    """Tokens that timing may take: one a round, and room for the deepest tree behind the last of them."""
    return sizes * (repeats + 1) + _DEPTH + 2


@contextmanager
def _enabled(model: Any) -> Iterator[None]:
    before = is_enabled(model)
    enable(model)
    try:
        yield
    finally:
        if not before:
            disable(model)


def _timed(
    model: Any,
    inner: Any,
    sizes: Sequence[int],
    repeats: int,
    shape: tuple[int, int],
    config: TreeConfig,
    by_paths: bool,
    trial: Trial,
) -> list[Timing]:
    batch, context = shape
    vocab = min(_compat.vocabulary_size(inner), _compat.embedding_rows(inner))
    source = SizedTrees(sizes, repeats, by_paths=by_paths, vocab_size=vocab)
    trial.source, room = source, _rounds(len(sizes), repeats)
    for seed in range(_ATTEMPTS + 1):
        if not source.rounds_left:
            break
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocab, (batch, context), generator=generator).to(inner.device)
        # To hold the end off takes time of its own in every round: it is done where nothing else helps.
        held: dict[str, int] = {"min_new_tokens": room} if seed == _ATTEMPTS else {}
        with on_trial(trial), _compat.quiet_transformers():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=room, tree_config=config,
                **held,
            )  # fmt: skip
        source.end()
    if missing := source.missing:
        raise TreeConfigError(
            f"calibrate(max_nodes={max(sizes)}, contexts=[{context}], batches=[{batch}]): rounds of {missing} nodes "
            f"could not be timed, as {_ATTEMPTS + 1} texts of random tokens ended, or left no room for such trees, "
            f"before; expected room for {room} tokens behind the context and for trees that large"
        )
    return [
        Timing(batch=batch, context=context, nodes=nodes, seconds=tuple(seconds))
        for nodes, seconds in sorted(source.seconds.items())
    ]


def _drafted(
    model: Any,
    prompts: Sequence[Mapping[str, Any]],
    draft_model: Any,
    config: TreeConfig,
    arguments: Mapping[str, Any],
    timings: Sequence[Timing],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Acceptance, level costs and the config that follows from them."""
    depths = [depth for depth in (1, 2, 4, 8, 16, 32) if depth < config.max_depth]
    # Most calls reach the full depth, which alone tells of all of them.
    cycle = [config.max_depth, *(one for depth in depths for one in (depth, config.max_depth))]
    trial = Trial()
    for number, prompt in enumerate(prompts):
        tell(f"draft: prompt {number + 1} of {len(prompts)}")
        own = config.replace(fallback="off", max_depth=cycle[number % len(cycle)])
        with on_trial(trial):
            model.generate(**prompt, **arguments, assistant_model=draft_model, tree_config=own)
    samples, hits = _summed(trial.policies, config)
    levels: dict[int, float] = {}
    for policy in trial.policies:
        # Calls under a rule of independent draws leave nothing to each other.
        levels |= policy.costs.drafting.known()
    context = sum(int(prompt["input_ids"].shape[1]) for prompt in prompts) // len(prompts)
    context += int(arguments["max_new_tokens"]) // 2
    near = min(timings, key=lambda one: (one.batch, abs(one.context - context)))
    target = {
        one.nodes: one.median
        for one in timings
        if (one.batch, one.context) == (near.batch, near.context) and one.nodes <= config.max_nodes
    }
    shares = np.divide(hits, samples, out=np.zeros_like(hits), where=samples > 0)
    ordered = np.minimum.accumulate(shares, 1)
    nodes, depth, gain = best_size(ordered.tolist(), target, levels)
    return {
        "draft": trial.policies[-1].draft,
        "levels": levels,
        "samples": samples.tolist(),
        "hits": hits.tolist(),
        "context": context,
        "config": config.replace(max_nodes=nodes, max_depth=depth),
        "gain": gain,
    }


def _summed(policies: Sequence[SizePolicy], config: TreeConfig) -> tuple[Any, Any]:
    shape = max(1, min(config.max_depth, config.max_nodes)), config.max_children
    samples, hits = np.zeros(shape), np.zeros(shape)
    for policy in policies:
        one = policy.acceptance
        samples[: one.shape[0], : one.shape[1]] += one.samples_DJ
        hits[: one.shape[0], : one.shape[1]] += one.hits_DJ
    return samples, hits
