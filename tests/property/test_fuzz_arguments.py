"""Random arguments of generate(): the result of plain decoding or its error, or a refusal before any work."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from arguments import Example, Kept, assistant, examples
from cases import FAST, SLOW
from hf_treespec import TreeConfig, TreeSpecError, _compat, is_supported
from hf_treespec.verify import GumbelNoise, text_streams
from tiny import MARGIN, fingerprint, gumbel_multinomial, prompt, shown_tokens, stock, treed, vocabulary

SEED = 3
# Where transformers keeps the length of the last static cache of a model.
LAST_STATIC = "_previous_max_cache_length"


@contextmanager
def silent() -> Iterator[None]:
    """Nonsense is answered by warnings as well as by errors."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


class Outcome:
    """What a call returned or raised, and how many forwards of the target it took."""

    def __init__(self, model: Any, ids: Tensor, call: dict[str, Any], helper: Any = None) -> None:
        self.value: Any = None
        self.error: Exception | None = None
        self.forwards = 0
        self.call = call
        hooks = [m.register_forward_pre_hook(self._count) for m in {id(m): m for m in (model, helper) if m}.values()]
        try:
            self.value = model.generate(ids, **call)
        # Whatever it is, the other call must raise the same.
        except Exception as error:
            self.error = error
        finally:
            for hook in hooks:
                hook.remove()

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    @property
    def ids(self) -> Tensor:
        return self.value if isinstance(self.value, Tensor) else self.value.sequences


def rows_of(example: Example, call: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
    """Real ids of the rows as sampling sees them, and how many: what the noise of the reference is keyed by."""
    mask = call.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        mask = prompt(example.family, example.batch)[1]
        if call.get("pad_token_id", 0) != 0:
            mask = torch.ones_like(mask)
    several = call.get("num_return_sequences", 1)
    several = several if isinstance(several, int) and several > 0 else 1
    mask, ids = ((mask != 0).long().repeat_interleave(several, 0), example.ids.repeat_interleave(several, 0))
    return shown_tokens(ids, mask), mask.sum(-1).tolist()


def plain(example: Example) -> Outcome:
    call = example.call()
    with gumbel_multinomial(SEED, *rows_of(example, call), vocabulary(example.family)):
        return Outcome(stock(example.family), example.ids, call)


def with_tree(example: Example) -> Outcome:
    call, helper = example.call(), assistant(example)
    call["tree_config"] = example.tree
    if helper is not None:
        call["assistant_model"] = helper
        # The probe of an unknown model is no forward of the call.
        is_supported(helper)
    return Outcome(treed(example.family), example.ids, call, helper if isinstance(helper, torch.nn.Module) else None)


def close(example: Example, row: int, column: int) -> bool:
    """Whether plain decoding had two tokens to choose from at this place."""
    call = example.call() | {"return_dict_in_generate": True, "output_scores": True}
    texts, lengths = rows_of(example, call)
    with gumbel_multinomial(SEED, texts, lengths, vocabulary(example.family)):
        out = stock(example.family).generate(example.ids, **call)
    scores = out.scores[column - example.ids.shape[1]][row].double()
    if call.get("do_sample"):
        position = lengths[row] + column - example.ids.shape[1]
        scores = scores + GumbelNoise(SEED, len(scores), streams=text_streams(texts)).at(row, position)
    best = scores.topk(2).values
    return float(best[0] - best[1]) < MARGIN


def assert_equal(example: Example, one: Outcome, two: Outcome) -> None:
    assert type(one.value) is type(two.value)
    if not torch.equal(one.ids, two.ids):
        assert one.ids.dtype == two.ids.dtype and len(one.ids) == len(two.ids)
        width = min(one.ids.shape[1], two.ids.shape[1])
        differ = (one.ids[:, :width] != two.ids[:, :width]).nonzero()
        assert len(differ) and close(example, *map(int, differ[0])), (one.ids.tolist(), two.ids.tolist())
        return
    if not isinstance(one.value, Tensor):
        assert sorted(one.value) == sorted(two.value)
        for kind in ("scores", "logits"):
            a, b = one.value.get(kind), two.value.get(kind)
            assert (a is None) == (b is None) and len(a or ()) == len(b or ())
            if a and "logits_processor" not in example.arguments:
                # What is as good as forbidden is noise under SynthID.
                a, b = (torch.stack(steps).clamp(min=-15.0) for steps in (a, b))
                torch.testing.assert_close(b, a, atol=2e-3, rtol=2e-3)
        cache, other = (_compat.cache_from_outputs(out.value) for out in (one, two))
        assert _compat.cache_length(cache) == _compat.cache_length(other)
    streamer = two.call.get("streamer")
    if isinstance(streamer, Kept):
        assert streamer.puts == one.call["streamer"].puts


@torch.no_grad()
def warm(model: Any) -> Any:
    """A model without the traces that transformers itself leaves: hooks for inner states, the last static cache."""
    vars(model).pop(LAST_STATIC, None)
    with silent():
        model(torch.tensor([[3, 4]]), output_hidden_states=True, output_attentions=True)
    return model


def check(example: Example) -> None:
    target, helper = treed(example.family), assistant(example)
    models = [warm(model) for model in (target, helper) if isinstance(model, torch.nn.Module)]
    before = [fingerprint(model) for model in models]
    masks = [_compat.mask_function_of(name) for name in _compat.MASK_IMPLEMENTATIONS]
    with silent():
        one, two = plain(example), with_tree(example)
    for model in models:
        vars(model).pop(LAST_STATIC, None)
    assert [fingerprint(model) for model in models] == before
    assert [_compat.mask_function_of(name) for name in _compat.MASK_IMPLEMENTATIONS] == masks
    report = f"plain: {one.error!r} after {one.forwards} forwards, ours: {two.error!r} after {two.forwards}\n{example}"
    if isinstance(two.error, TreeSpecError):
        assert two.forwards == 0, f"refused midway; {report}"
    elif one.error is not None:
        assert type(two.error) is type(one.error), report
    else:
        assert two.error is None, report
        assert_equal(example, one, two)


@settings(FAST, max_examples=25)
@given(example=examples())
def test_arguments(example: Example) -> None:
    check(example)


@pytest.mark.slow
@settings(SLOW, max_examples=500)
@given(example=examples())
def test_arguments_at_length(example: Example) -> None:
    check(example)


# Calls that once crashed, or gave something else than plain decoding.
FOUND: dict[str, Example] = {
    "assistant_that_is_no_model": Example(
        "llama", 1, {"max_new_tokens": 4}, "text", TreeConfig(fallback="off", seed=3)
    ),
}


@pytest.mark.parametrize("name", list(FOUND))
def test_found(name: str) -> None:
    check(FOUND[name])


def test_examples_have_sense() -> None:
    """Most of what is drawn must be served, or little would be tested."""
    served = refused = failed = 0

    @settings(FAST, max_examples=60)
    @given(example=examples())
    def count(example: Example) -> None:
        nonlocal served, refused, failed
        with silent():
            two = with_tree(example)
        served += two.error is None
        refused += isinstance(two.error, TreeSpecError)
        failed += two.error is not None and not isinstance(two.error, TreeSpecError)

    count()
    total = served + refused + failed
    assert served > 0.4 * total and refused > 0.05 * total and failed > 0.05 * total, (served, refused, failed)
