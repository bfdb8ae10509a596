"""A row of the contract, the three ways of running it, and what each of them comes to.

A row is a call of generate() and what is to be looked at afterwards. It is run by plain generate() of a model that was
never enabled, by the assisted decoding of transformers, and by hf_treespec; plain decoding is what the others should
equal.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_treespec import TreeConfig, enable
from tiny import build, gumbel_multinomial, perturbed, prompt, shown_tokens, stock, treed

SEED = 3
TREE = TreeConfig(max_nodes=12, max_depth=4, max_children=3, fallback="off", seed=SEED)
PLAIN, STOCK, OURS = "plain", "stock", "ours"
# Errors by which a call is turned away. Any other class is an accident, and so is any error after the first forward.
REFUSALS = (ValueError, NotImplementedError)


class Ignored(Exception):
    """Raised by a row that finds that an argument had no effect."""


@dataclass(frozen=True)
class Row:
    """One row of the contract.

    Args:
        section: of the contract.
        name: unique; what the table says.
        call: makes the call on a side and returns what is to be equal.
        note: for the table.
        also: the item of section 0 that the row is about.
        truth: what the call should give where plain decoding itself is wrong.
        sampled: draws: assisted decoding has draws of its own from the same law.
    """

    section: str
    name: str
    call: Callable[[Side], Any]
    note: str = ""
    also: str = ""
    truth: Callable[[], Any] | None = None
    sampled: bool = False


@dataclass(frozen=True)
class Verdict:
    """What a side came to.

    Attributes:
        word: "equal", "refused", "wrong", "error", "ignored" or "other draws".
        why: the error, if there was one.
    """

    word: str
    why: str = ""


class Side:
    """One way of decoding.

    Args:
        name: PLAIN, STOCK or OURS.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.forwards = 0

    @property
    def ours(self) -> bool:
        return self.name == OURS

    def model(self, family: str = "llama", **changes: Any) -> PreTrainedModel:
        """The shared model of a family, or a new one with another config."""
        if changes:
            return self.on(build(family, **changes))
        return treed(family) if self.ours else stock(family)

    def on(self, model: PreTrainedModel) -> PreTrainedModel:
        """A model of the row's own, as this side wants it."""
        return enable(model) if self.ours else model

    def speculation(self, model: PreTrainedModel, helper: Any, config: TreeConfig) -> dict[str, Any]:
        """The arguments that make the call speculate."""
        if self.name == PLAIN:
            return {}
        if helper == "lookup":
            return {"tree_config": config} if self.ours else {"prompt_lookup_num_tokens": 3}
        if helper in ("perturbed", "twin"):
            # New for each call: assisted decoding writes into the settings of its assistant.
            scale = 0.05 if helper == "perturbed" else 0.0
            helper = perturbed(model, scale)
            if self.ours:
                helper.__class__ = getattr(type(helper), "_treespec_base", type(helper))
        return {"assistant_model": helper, **({"tree_config": config} if self.ours else {})}

    def generate(
        self,
        ids: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        family: str = "llama",
        batch: int = 1,
        model: Any = None,
        helper: Any = "perturbed",
        config: TreeConfig = TREE,
        **call: Any,
    ) -> Any:
        """Call generate() this side's way.

        Args:
            ids: prompt; None for one of the family's own with its mask.
            mask: its mask, or None to pass none.
            family: of the shared models.
            batch: of the family's own prompt.
            model: what to call, if it is not the shared model of the family.
            helper: "perturbed" or "twin" for a copy of the model, "lookup" to speculate from the text, or a model.
            config: of the tree.
            call: other arguments.
        """
        model = self.model(family) if model is None else model
        if ids is None and "inputs" not in call and "inputs_embeds" not in call and "input_features" not in call:
            ids, mask = prompt(family, batch)
        call = {"do_sample": False, **call, **self.speculation(model, helper, config)}
        if ids is not None:
            call["input_ids"] = ids
        if mask is not None:
            call["attention_mask"] = mask
        if "max_length" not in call and "generation_config" not in call:
            call.setdefault("max_new_tokens", 14)
        with ExitStack() as stack:
            if call["do_sample"] and self.name == PLAIN and call.get("num_beams", 1) == 1:
                stack.enter_context(self._coupled(model, ids, mask, call.get("num_return_sequences", 1)))
            stack.enter_context(self._counting(model))
            return model.generate(**call)

    def _coupled(self, model: Any, ids: Tensor, mask: Tensor, several: int) -> AbstractContextManager[None]:
        """Plain sampling with the noise of hf_treespec."""
        rows, texts = mask.repeat_interleave(several, 0), ids.repeat_interleave(several, 0)
        vocab = int(model.config.vocab_size)
        return gumbel_multinomial(SEED, shown_tokens(texts, rows), rows.sum(-1).tolist(), vocab)

    @contextmanager
    def _counting(self, model: Any) -> Iterator[None]:
        def count(*_: Any) -> None:
            self.forwards += 1

        hook = model.register_forward_pre_hook(count)
        try:
            yield
        finally:
            hook.remove()


@dataclass(frozen=True)
class _Outcome:
    """Value or error of one side."""

    value: Any = None
    error: Exception | None = None
    forwards: int = 0


def _observe(row: Row, name: str) -> _Outcome:
    side = Side(name)
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _Outcome(row.call(side), forwards=side.forwards)
        # The verdict on a side is what it raises, whatever that is.
        except Exception as error:
            return _Outcome(error=error, forwards=side.forwards)


def _first_words(error: Exception) -> str:
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= 90 else text[:90].rsplit(" ", 1)[0] + " ..."


def _verdict(outcome: _Outcome, reference: _Outcome | None, sampled: bool) -> Verdict:
    """The verdict on an outcome; plain decoding has no reference, unless the row knows the truth."""
    error = outcome.error
    if isinstance(error, Ignored):
        return Verdict("ignored", str(error))
    if error is not None:
        unknown = isinstance(error, TypeError) and "unexpected keyword" in str(error)
        clean = outcome.forwards == 0 and (isinstance(error, REFUSALS) or unknown)
        if not clean and reference is not None and type(error) is type(reference.error):
            return Verdict("equal", f"raises as plain does: {_first_words(error)}")
        return Verdict("refused" if clean else "error", _first_words(error))
    if reference is None or (reference.error is None and same(reference.value, outcome.value)):
        return Verdict("equal")
    return Verdict("other draws" if sampled else "wrong")


def run(row: Row) -> dict[str, Verdict]:
    """The verdicts on a row by side. Plain decoding is its own reference, unless the row knows the truth."""
    level = logging.getLogger("transformers").level
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    try:
        plain = _observe(row, PLAIN)
        truth = plain if row.truth is None else _Outcome(row.truth())
        return {
            PLAIN: _verdict(plain, None if row.truth is None else truth, False),
            STOCK: _verdict(_observe(row, STOCK), truth, row.sampled),
            OURS: _verdict(_observe(row, OURS), truth, False),
        }
    finally:
        logging.getLogger("transformers").setLevel(level)


def same(one: Any, two: Any) -> bool:
    """Whether two observations are equal: numbers of a forward up to rounding, all else exactly."""
    if isinstance(one, Tensor):
        if not isinstance(two, Tensor) or one.shape != two.shape or one.dtype != two.dtype:
            return False
        if not one.is_floating_point():
            return torch.equal(one, two)
        tolerance = 2e-2 if one.dtype in (torch.bfloat16, torch.float16) else 1e-3
        return torch.allclose(one, two, atol=tolerance, rtol=tolerance, equal_nan=True)
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    return bool(one == two)
