"""One call of generate() two ways: by transformers alone, and with a tree on top."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_treespec import TreeConfig, TreeStats, _compat
from sources import MAKERS, Source, drafting
from tiny import assert_same_text, cache_argument, prompt, real_texts, reference, stock, treed

CHAINS_OF_4 = TreeConfig(max_nodes=4, max_depth=4, max_children=1, fallback="off", seed=3)
BUSHES = TreeConfig(max_nodes=24, max_depth=6, max_children=4, fallback="off", seed=3)
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95}
GREEDY: dict[str, Any] = {"do_sample": False}


class Pair(NamedTuple):
    """Outcome of a call.

    Attributes:
        expected: what transformers returned.
        actual: what the call with a tree returned.
        plain: extra arguments of the first, made by `fresh`.
        tree: extra arguments of the second.
        source: the source of the trees.
        stats: of the second.
    """

    expected: Any
    actual: Any
    plain: dict[str, Any]
    tree: dict[str, Any]
    source: Source
    stats: TreeStats


def ids_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.sequences


def twice(
    ids: Tensor,
    mask: Tensor,
    *,
    family: str = "llama",
    models: tuple[PreTrainedModel, PreTrainedModel] | None = None,
    maker: str = "half_right",
    config: TreeConfig = BUSHES,
    truth: Tensor | None = None,
    fresh: Callable[[], dict[str, Any]] = dict,
    **arguments: Any,
) -> Pair:
    """Run the call both ways and compare the sequences.

    Args:
        ids: prompt.
        mask: its mask.
        family: of the shared models.
        models: a stock model and an enabled one, instead of the shared ones.
        maker: one of `sources.MAKERS`.
        config: of the tree; its seed is the noise of both.
        truth: text that the source believes in; default what transformers returned.
        fresh: makes arguments with a state of their own, once for each of the two.
        arguments: of generate().
    """
    plain_model, tree_model = models or (stock(family), treed(family))
    seed = config.seed or 0
    plain, tree = fresh(), fresh()
    expected = reference(plain_model, ids, mask, seed=seed, **arguments, **plain)
    rows = mask.repeat_interleave(len(ids_of(expected)) // len(mask), 0)
    known = real_texts(ids_of(expected) if truth is None else truth, rows)
    source = Source(MAKERS[maker], seed=1, vocab=int(plain_model.config.vocab_size), truth=known)
    with drafting(source):
        call = {"do_sample": False, **arguments, **tree}
        actual = tree_model.generate(ids, attention_mask=mask, tree_config=config, **call)
    assert type(actual) is type(expected)
    assert_same_text(ids_of(expected), ids_of(actual), width=ids.shape[1])
    return Pair(expected, actual, plain, tree, source, tree_model.treespec_stats)


@functools.cache
def distinct_prompt(family: str, count: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """A prompt after which the first `count` greedy tokens of each row are all different, its mask, and the text."""
    chosen: dict[int, Tensor] = {}
    for seed in range(200):
        ids, mask = prompt(family, batch, seed)
        text = reference(stock(family), ids, mask, max_new_tokens=count)
        for row in range(batch):
            if len(set(text[row, ids.shape[1] :].tolist())) == count:
                chosen.setdefault(row, ids[row])
        if len(chosen) == batch:
            ids = torch.stack([chosen[row] for row in range(batch)])
            text = reference(stock(family), ids, mask, max_new_tokens=count + 6)
            assert all(len(set(row[ids.shape[1] :][:count].tolist())) == count for row in text)
            return ids, mask, text
    raise AssertionError(f"{family} repeats itself within {count} tokens after every prompt tried")


def goes_on_behind_a_cache(
    models: tuple[PreTrainedModel, PreTrainedModel],
    ids: Tensor,
    mask: Tensor,
    same: Callable[[DynamicCache, DynamicCache, Tensor], None],
    **arguments: Any,
) -> None:
    """Two calls in a row over caches that are passed in, one for transformers and one for trees.

    Args:
        models: a stock model and an enabled one.
        ids: prompt.
        mask: its mask.
        same: holds the second cache against the first.
        arguments: of generate().
    """
    ours, theirs = (DynamicCache(config=models[0].config) for _ in range(2))
    for _ in range(2):
        made = iter([theirs, ours])
        pair = twice(
            ids, mask, models=models, fresh=lambda made=made: cache_argument(next(made)), max_new_tokens=8,
            return_dict_in_generate=True, **arguments,
        )  # fmt: skip
        assert _compat.cache_from_outputs(pair.actual) is ours
        same(theirs, ours, mask)
        ids = pair.expected.sequences
        mask = torch.cat([mask, mask.new_ones(len(mask), 8)], 1)
