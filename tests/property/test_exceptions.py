"""An exception anywhere in a call leaves everything restored, and a passed-in cache with a committed prefix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from cases import FAST, SLOW, tree_configs
from hf_treespec import TreeConfig, _compat
from sources import Source, drafting, half_right
from tiny import (
    FAMILIES,
    WIDTH,
    assert_same_cache,
    assert_same_text,
    cache_argument,
    draft,
    fingerprint,
    first_block,
    margins,
    plain_cache,
    prompt,
    real_texts,
    reference,
    stock,
    treed,
    vocabulary,
)

families = pytest.mark.parametrize("family", FAMILIES)
POINTS = ("target", "draft", "source", "processor", "criterion", "streamer")
NEW = 16


class Burst(Exception):
    """Raised by a fuse; nothing else may come out of the call."""


class Fuse(LogitsProcessor, StoppingCriteria, BaseStreamer):
    """Raises at its call number `at`, whatever it stands in for."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def burn(self, *_: Any) -> None:
        self.calls += 1
        if self.calls > self.at:
            raise Burst

    put = burn

    def end(self) -> None:
        pass


class FusedProcessor(Fuse):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.burn()
        return scores


class FusedCriterion(Fuse):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.burn()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class FusedSource(Source):
    fuse: Fuse

    def propose(self, rows: Any, limits: Any) -> Any:
        self.fuse.burn()
        return super().propose(rows, limits)


@contextmanager
def fused(family: str, point: str, at: int, truth: list[list[int]], seed: int) -> Iterator[dict[str, Any]]:
    """Arguments of a call that bursts at `point`, with the hooks for it in place."""
    source = FusedSource(half_right, seed=seed, vocab=vocabulary(family), truth=truth)
    source.fuse = Fuse(at if point == "source" else 10**9)
    hook = None
    arguments: dict[str, Any] = {}
    if point == "draft":
        hook = first_block(draft(family)).register_forward_pre_hook(Fuse(at).burn)
        arguments["assistant_model"] = draft(family)
    elif point == "target":
        hook = first_block(treed(family)).register_forward_pre_hook(Fuse(at).burn)
    elif point == "processor":
        arguments["logits_processor"] = [FusedProcessor(at)]
    elif point == "criterion":
        arguments["stopping_criteria"] = [FusedCriterion(at)]
    elif point == "streamer":
        arguments["streamer"] = Fuse(at)
    try:
        if point == "draft":
            yield arguments
        else:
            with drafting(source):
                yield arguments
    finally:
        if hook is not None:
            hook.remove()


def check_burst(
    family: str, point: str, at: int, batch: int, sampled: bool, config: TreeConfig, seed: int, read: int
) -> None:
    """One interrupted call, then the same call again on what the interrupted one left.

    Args:
        family: of the model.
        point: where the exception comes from.
        at: calls of that point before it.
        batch: rows.
        sampled: whether to sample.
        config: of the tree.
        seed: of prompt and trees.
        read: tokens of the prompt that the passed-in cache holds already.
    """
    ids, mask = prompt(family, batch, seed % 100)
    model = treed(family)
    call = {"max_new_tokens": NEW, "do_sample": sampled, **({"temperature": 0.9, "top_k": 20} if sampled else {})}
    text = reference(stock(family), ids, mask, seed=config.seed or 0, **call)
    truth = real_texts(text, mask)
    margin = margins(model, ids, mask, seed=config.seed or 0, **call)
    cache = plain_cache(stock(family), ids, mask, read)
    before = fingerprint(model), fingerprint(draft(family))
    masks = [_compat.mask_function_of(name) for name in _compat.MASK_IMPLEMENTATIONS]

    burst = False
    with fused(family, point, at, truth, seed) as arguments:
        whole = {"attention_mask": mask, "tree_config": config, **call, **arguments, **cache_argument(cache)}
        try:
            out = model.generate(ids, **whole)
            assert_same_text(text, out, margin)
        except Burst:
            burst = True
    assert (fingerprint(model), fingerprint(draft(family))) == before
    assert [_compat.mask_function_of(name) for name in _compat.MASK_IMPLEMENTATIONS] == masks

    length = _compat.cache_length(cache)
    assert read <= length <= text.shape[1] - 1
    if not burst:
        assert length == text.shape[1] - 1
    elif not (point == "target" and at == 0) and not (point == "streamer" and at == 0):
        assert length >= WIDTH, "the prompt had been read when the exception came"
    assert_same_cache(plain_cache(stock(family), text, mask, length), cache, mask)

    # What is left is good enough to go on from.
    known = text[:, : max(WIDTH, length + 1)]
    wide = torch.cat([mask, mask.new_ones(batch, known.shape[1] - WIDTH)], 1)
    rest = {**call, "max_new_tokens": text.shape[1] - known.shape[1]}
    if rest["max_new_tokens"]:
        # The noise follows the prompt, which is another one now.
        text = reference(stock(family), known, wide, seed=config.seed or 0, **rest)
        margin = margins(model, known, wide, seed=config.seed or 0, **rest)
        source = Source(half_right, seed=seed, vocab=vocabulary(family), truth=real_texts(text, wide))
        with drafting(source):
            out = model.generate(known, attention_mask=wide, tree_config=config, **rest, **cache_argument(cache))
        assert_same_text(text, out, margin, width=known.shape[1])
        assert_same_cache(plain_cache(stock(family), text, mask, text.shape[1] - 1), cache, mask)


BURSTS = {
    "point": st.sampled_from(POINTS),
    "at": st.integers(0, 12),
    "batch": st.sampled_from([1, 3]),
    "sampled": st.booleans(),
    "config": tree_configs(),
    "seed": st.integers(0, 2**32),
    "read": st.sampled_from([0, 1, 6, WIDTH - 1]),
}


BUSHES = TreeConfig(max_nodes=16, max_depth=6, max_children=3, seed=1, fallback="off")


@families
@FAST
@given(**BURSTS)
# In the middle of the prefill, when the layers disagree about what they hold.
@example(point="target", at=0, batch=1, sampled=False, config=BUSHES, seed=0, read=0)
@example(point="target", at=0, batch=3, sampled=False, config=BUSHES, seed=1, read=6)
# When rows have advanced unevenly, behind a user's rectangular cache.
@example(point="target", at=3, batch=3, sampled=False, config=BUSHES, seed=2, read=0)
@example(point="source", at=3, batch=3, sampled=True, config=BUSHES, seed=3, read=6)
@example(point="draft", at=4, batch=3, sampled=False, config=BUSHES, seed=4, read=0)
def test_exception_leaves_a_committed_prefix(family: str, **burst: Any) -> None:
    check_burst(family, **burst)


@pytest.mark.slow
@families
@SLOW
@given(**BURSTS)
def test_exception_leaves_a_committed_prefix_at_length(family: str, **burst: Any) -> None:
    check_burst(family, **burst)
