"""The methods of a benchmark, and the rounds in which they are measured in turn.

Every method is one call of `generate` on the same model object, timed and counted by the same code.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_treespec import TreeConfig, TreeStats, disable, enable
from hf_treespec.cli.rows import Row, first_difference, tokens_per_round
from hf_treespec.draft import DraftHead

__all__ = [
    "REFERENCE",
    "Bench",
    "Method",
    "count_forwards",
    "counting_seconds",
    "make_methods",
]

REFERENCE = "no-tree"
_LOOKUP_TOKENS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way of decoding.

    Args:
        name: what rows call it.
        reference: name of the method whose text it must equal; None where equality is not promised.
        config: of the tree; None for the methods of transformers.
        lookup: whether it is transformers' prompt lookup.
        assisted: whether it gets the draft model.
    """

    name: str
    reference: str | None = None
    config: TreeConfig | None = None
    lookup: bool = False
    assisted: bool = False


def make_methods(configs: dict[str, TreeConfig], *, has_draft: bool, sampled: bool) -> list[Method]:
    """All methods that the settings allow: plain, those of transformers, and one tree method per config.

    Args:
        configs: per name of a tree method.
        has_draft: whether a draft model was given.
        sampled: whether the temperature is above 0. Then plain sampling is another stream of random numbers, and what
            a tree must equal is the plain loop on its own noise, which becomes one more method.
    """
    reference = None if sampled else "plain"
    methods = [Method(name="plain"), Method(name="prompt_lookup", reference=reference, lookup=True)]
    if has_draft:
        methods.append(Method(name="assisted", reference=reference, assisted=True))
    if sampled:
        methods.append(Method(name=REFERENCE, config=TreeConfig(max_nodes=0)))
    for name, config in configs.items():
        methods.append(
            Method(
                name=name,
                reference=REFERENCE if sampled else "plain",
                config=config,
                assisted=has_draft and (config.with_model or config.draft == "auto"),
            )
        )
    return methods


class _Counter:
    """A forward hook that counts. It must cost nothing beside a forward, so it does no more than that."""

    def __init__(self) -> None:
        self.forwards = 0

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        self.forwards += 1


@contextmanager
def count_forwards(module: nn.Module) -> Iterator[_Counter]:
    """Count the calls of a module; the hook is gone afterwards, whatever happens."""
    counter = _Counter()
    handle = module.register_forward_pre_hook(counter)
    try:
        yield counter
    finally:
        handle.remove()


def counting_seconds(calls: int = 2_000) -> float:
    """What counting adds to one forward, measured on a module that does nothing; the smallest of five tries."""
    module, nothing = nn.Identity(), torch.empty(0)

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            module(nothing)
        return (time.perf_counter() - start) / calls

    without = min(seconds() for _ in range(5))
    with count_forwards(module):
        return max(min(seconds() for _ in range(5)) - without, 0.0)


@dataclass(frozen=True, slots=True)
class _Call:
    tokens: list[int]
    seconds: float
    forwards: int
    draft_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What stays the same in all calls.

    Args:
        model: the target.
        draft: the draft model or head, None for none.
        methods: in their natural order.
        arguments: of every call of `generate`.
        seed: from which the seeds of the calls are derived.
        constants: fields that all rows share.
    """

    model: PreTrainedModel
    draft: PreTrainedModel | DraftHead | None
    methods: Sequence[Method]
    arguments: dict[str, Any]
    seed: int
    constants: dict[str, Any]

    def warm_up(self, inputs: dict[str, Tensor], advance: Callable[[], object]) -> None:
        """Run every method once, untimed."""
        for method in self.methods:
            self._call(method, inputs, self.seed)
            advance()

    def rounds(
        self, name: str, prompts: Sequence[dict[str, Tensor]], repeats: int, advance: Callable[[], object]
    ) -> Iterator[list[Row]]:
        """For each repeat, for each prompt, every method in an order that rotates.

        A slow spell of the machine so falls on all methods of a round, and none always runs first or after the same
        neighbour.

        Args:
            name: of the set.
            prompts: inputs of `generate`.
            repeats: how often all is done.
            advance: called after each measurement.

        Yields:
            The rows of one round, in the natural order of the methods.
        """
        count = len(self.methods)
        for repeat in range(repeats):
            for index, inputs in enumerate(prompts):
                # Greedy text ignores it. When sampling, every repeat is another text.
                seed = (self.seed + 1_000_003 * index + repeat) % (1 << 63)
                calls: dict[str, tuple[int, _Call]] = {}
                start = (repeat * len(prompts) + index) % count
                for order in range(count):
                    method = self.methods[(start + order) % count]
                    calls[method.name] = order, self._call(method, inputs, seed)
                    advance()
                place = {"set": name, "prompt": index, "repeat": repeat, "seed": seed}
                yield [self._row(method, calls, place, int(inputs["input_ids"].shape[1])) for method in self.methods]

    def _call(self, method: Method, inputs: dict[str, Tensor], seed: int) -> _Call:
        model: Any = self.model
        # Plain is the model as loaded: not even our class is in its path. With that goes what sources keep between
        # calls, so that no method knows a text from an earlier run of it.
        if method.config is None:
            disable(model)
        else:
            enable(model)
        arguments = dict(self.arguments)
        if method.config is not None:
            arguments["tree_config"] = method.config.replace(seed=seed)
        if method.lookup:
            arguments["prompt_lookup_num_tokens"] = _LOOKUP_TOKENS
        if method.assisted:
            arguments["assistant_model"] = self.draft
        device = model.device
        on_device = {key: value.to(device) for key, value in inputs.items()}
        torch.manual_seed(seed)
        with count_forwards(model) as counter:
            _synchronise(device)
            start = time.perf_counter()
            output: Tensor = model.generate(**on_device, **arguments)
            _synchronise(device)
            seconds = time.perf_counter() - start
        stats: TreeStats | None = model.treespec_stats if method.config is not None else None
        tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
        return _Call(tokens, seconds, counter.forwards, None if stats is None else stats.draft_seconds)

    def _row(
        self, method: Method, calls: dict[str, tuple[int, _Call]], place: dict[str, Any], prompt_tokens: int
    ) -> Row:
        order, call = calls[method.name]
        difference = None
        if method.reference is not None:
            difference = first_difference(call.tokens, calls[method.reference][1].tokens)
        return Row(
            method=method.name,
            order=order,
            seconds=call.seconds,
            prompt_tokens=prompt_tokens,
            new_tokens=len(call.tokens),
            target_forwards=call.forwards,
            tokens_per_round=tokens_per_round(len(call.tokens), call.forwards),
            draft_seconds=call.draft_seconds,
            text_equal=None if method.reference is None else difference is None,
            first_difference=difference,
            reference=method.reference,
            config=None if method.config is None else _one_line(method.config.replace(seed=place["seed"])),
            **place,
            **self.constants,
        )


def _one_line(config: TreeConfig) -> str:
    # Line breaks inside a cell are legal in CSV, and trouble in every tool that reads it by lines.
    return json.dumps(config.to_dict())


def _synchronise(device: torch.device) -> None:
    # Kernels are only queued when `generate` has returned; the clock must wait for them.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
