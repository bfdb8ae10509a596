"""A set of layers that a model can draft without, searched on prompts of the user's own.

Every set is tried in calls of `generate`: what it is good for is what it saves there. A round costs one forward of
the target and one of the draft for each level of the tree, and a forward of the draft costs the share of the layers
that it runs. The tokens a round that were counted, over that cost, are the gain over plain decoding, which is 1.

Draft & Verify (Zhang et al. 2023) searches by Bayesian optimisation; here a few blocks and early exits are tried, and
the best of them is changed a layer or two at a time for as long as trials are left.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hf_treespec.api.enable import disable, enable, is_enabled
from hf_treespec.api.layer_drafts import layers_of
from hf_treespec.api.support import require_support, unwrap
from hf_treespec.config import TreeConfig
from hf_treespec.errors import UnsupportedModelError
from hf_treespec.stats import TreeStats

__all__ = ["LayerSkip", "find_layer_skip"]

# Attempts to change a set into one that was not tried yet.
_ATTEMPTS = 200
_BLOCKS = (6, 4, 3, 2)


class LayerSkip(NamedTuple):
    """A set of skipped layers and what it was worth on the prompts.

    Attributes:
        skip: numbers of the layers.
        layers: how many the model has.
        depth: of trees at which the gain is largest.
        gain: tokens of a round with trees of that depth over its cost in forwards of the target.
        tokens_per_round: counted at the depth that was searched with.
        config: to generate with.
    """

    skip: tuple[int, ...]
    layers: int
    depth: int
    gain: float
    tokens_per_round: float
    config: TreeConfig


def find_layer_skip(
    model: Any,
    prompts: Sequence[Mapping[str, Any]],
    *,
    tree_config: TreeConfig | None = None,
    trials: int = 60,
    max_new_tokens: int = 48,
    seed: int = 0,
    report: Callable[[LayerSkip], None] | None = None,
    **call: Any,
) -> LayerSkip:
    """Search a set of layers to draft without; the same arguments find the same set.

    Args:
        model: a causal LM of a masked route. If it is not enabled, it is for the length of the search.
        prompts: inputs of `generate`, one call each; more and longer ones cost time and keep the set from fitting
            them alone.
        tree_config: sizes of the trees; its `max_depth` is the largest that is considered.
        trials: sets to try, each with one call a prompt.
        max_new_tokens: of each call.
        seed: of the search.
        report: called with every set that was tried.
        call: further arguments of `generate`; greedy by default.

    Returns:
        The set with the largest gain.

    Raises:
        UnsupportedModelError: if no set could be read without.
        ValueError: without prompts or trials, or for a model of one layer.
    """
    if not prompts or trials < 1:
        raise ValueError(f"{len(prompts)} prompts and trials={trials}: expected at least one of each")
    inner = unwrap(model)
    require_support(inner, "the model")
    tree = (tree_config or TreeConfig()).replace(draft="layer_skip", fallback="off")
    count = len(layers_of(inner).names)
    if count < 2:
        raise ValueError(f"{type(inner).__name__} has {count} layer: expected two at least, to leave one out")
    arguments = {"do_sample": False, "max_new_tokens": max_new_tokens, **call}
    before = is_enabled(inner)
    enable(inner)
    try:
        tried: dict[frozenset[int], LayerSkip] = {}
        failure: UnsupportedModelError | None = None
        for skip in _sets(count, tried, random.Random(seed)):
            if len(tried) == trials:
                break
            try:
                tried[skip] = _tried(inner, prompts, tree, sorted(skip), count, arguments)
            except UnsupportedModelError as error:
                failure = error
                tried[skip] = LayerSkip(tuple(sorted(skip)), count, 1, 0.0, 0.0, tree)
            if report is not None:
                report(tried[skip])
    finally:
        if not before:
            disable(inner)
    best = max(tried.values(), key=lambda one: one.gain)
    if not best.gain and failure is not None:
        raise failure
    return best


def _sets(count: int, tried: Mapping[frozenset[int], LayerSkip], dice: random.Random) -> Iterator[frozenset[int]]:
    """Sets to try, each once, the later ones by what the earlier ones came to."""
    for part in _BLOCKS:
        width = max(1, count // part)
        for first in ((count - width) // 2, count - width):
            block = frozenset(range(first, first + width))
            if block not in tried:
                yield block
    for _ in range(_ATTEMPTS * count):
        best = max(tried, key=lambda skip: tried[skip].gain)
        changed = best ^ frozenset(dice.sample(range(count), dice.choice((1, 1, 2))))
        if changed and len(changed) < count and changed not in tried:
            yield changed


def _tried(
    model: Any,
    prompts: Sequence[Mapping[str, Any]],
    tree: TreeConfig,
    skip: list[int],
    count: int,
    arguments: Mapping[str, Any],
) -> LayerSkip:
    config = tree.replace(draft_options={**tree.draft_options, "layer_skip": {"skip": skip}})
    done: list[TreeStats] = []
    for inputs in prompts:
        model.generate(**inputs, tree_config=config, **arguments)
        done.append(model.treespec_stats)
    rounds = sum(stats.row_rounds for stats in done) or 1
    share = (count - len(skip)) / count
    expected, gains = 1.0, []
    for depth in range(tree.max_depth):
        expected += (
            sum(stats.accepted_by_depth[depth] for stats in done if depth < len(stats.accepted_by_depth)) / rounds
        )
        gains.append(expected / (1 + share * (depth + 1)))
    depth = gains.index(max(gains)) + 1
    return LayerSkip(
        skip=tuple(skip),
        layers=count,
        depth=depth,
        gain=gains[depth - 1],
        tokens_per_round=sum(stats.round_tokens for stats in done) / rounds,
        config=config.replace(max_depth=depth, fallback="auto"),
    )
