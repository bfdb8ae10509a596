"""Random whole calls of generate(), for hypothesis: model input, sampling, processors, tree source and limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import Tensor

import hf_treespec.engine.loop
from hf_treespec import TreeConfig
from hf_treespec.engine.round import RoundRunner
from sources import MAKERS, Source, drafting
from tiny import draft, prompt, treed, vocabulary

_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]
# The fast set draws the same examples each time; the slow one looks further.
FAST = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    # No explanation of failures: it calls the test hundreds of times.
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=_CHECKS,
)
FEW = settings(FAST, max_examples=4)
SLOW = settings(FAST, max_examples=150, derandomize=False, print_blob=True)

SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.9, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.4},
    {"temperature": 0.7, "min_p": 0.02, "renormalize_logits": True},
    {"typical_p": 0.9, "top_k": 0},
)
# Some look at the row of logits only, some at the text, some at its length; all give ended rows their own pace.
PROCESSORS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2, "bad_words_ids": [[5], [7, 9], [20, 21]]},
    {"min_new_tokens": 9, "suppress_tokens": [11, 12, 13]},
    {"sequence_bias": [[[15], 1.5], [[16, 17], -9.0]], "begin_suppress_tokens": [8, 9, 10]},
    {"forced_eos_token_id": 9, "encoder_repetition_penalty": 1.2},
)
# About every ninth token ends a row.
ENDS: tuple[list[int] | None, ...] = (None, [5, 6, 7, 9, 14, 23, 31, 40, 52])
# Sources of the library that need no model.
OWN = ("ngram", "suffix", "recycle", "lookahead")
KINDS = (*sorted(MAKERS), "model", *OWN)


@dataclass(frozen=True)
class Case:
    """One call; `family` comes from the test."""

    batch: int
    prompt_seed: int
    new: int
    sampling: dict[str, Any]
    processors: dict[str, Any]
    eos: list[int] | None
    kind: str
    source_seed: int
    config: TreeConfig
    batched: bool = field(default=False)

    def prompt(self, family: str) -> tuple[Tensor, Tensor]:
        return prompt(family, self.batch, self.prompt_seed)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of generate(), those of the tree left out."""
        out = {"max_new_tokens": self.new, "do_sample": bool(self.sampling), **self.sampling, **self.processors}
        if "min_new_tokens" in out:
            out["min_new_tokens"] = min(out["min_new_tokens"], self.new)
        return out if self.eos is None else {**out, "eos_token_id": self.eos}

    def run(self, family: str, ids: Tensor, mask: Tensor, truth: list[list[int]], **more: Any) -> Any:
        """The call with its tree, on the enabled model."""
        config = self.config.replace(draft=self.kind) if self.kind in OWN else self.config
        call = {"attention_mask": mask, "tree_config": config, **self.arguments, **more}
        if self.kind == "model":
            call["assistant_model"] = draft(family)
        with self.injected(family, truth):
            return treed(family).generate(ids, **call)

    @contextmanager
    def injected(self, family: str, truth: list[list[int]]) -> Iterator[Source | None]:
        """The tree source of the case in place; None for the library's own."""
        with pytest.MonkeyPatch.context() as patch:
            if self.batched:
                runner = partial(_batched, RoundRunner)
                patch.setattr(hf_treespec.engine.loop, "RoundRunner", runner)
            if self.kind not in MAKERS:
                yield None
                return
            source = Source(MAKERS[self.kind], seed=self.source_seed, vocab=vocabulary(family), truth=truth)
            with drafting(source):
                yield source


def _batched(runner: Any, **arguments: Any) -> Any:
    """Choose at all nodes at once, as on devices where a transfer is dear."""
    return runner(**{**arguments, "batched_choice": True})


@st.composite
def tree_configs(draw: st.DrawFn) -> TreeConfig:
    nodes, depth, children = draw(
        st.sampled_from([(1, 1, 1), (4, 2, 3), (9, 9, 1), (16, 8, 4), (24, 3, 24), (40, 12, 40), (40, 20, 2)])
    )
    return TreeConfig(
        max_nodes=nodes,
        max_depth=depth,
        max_children=children,
        growth=draw(st.sampled_from(["best_first", "static", "dynamic"])),
        seed=draw(st.integers(0, 2**63 - 1)),
        fallback="off",
    )


@st.composite
def cases(draw: st.DrawFn, *, sampled: bool | None = None, kinds: tuple[str, ...] = KINDS) -> Case:
    """Any call.

    Args:
        draw: from hypothesis.
        sampled: whether to sample; None for either.
        kinds: tree sources to choose from.
    """
    sampled = draw(st.booleans()) if sampled is None else sampled
    processors = draw(st.sampled_from(PROCESSORS))
    return Case(
        batch=draw(st.sampled_from([1, 3])),
        prompt_seed=draw(st.integers(0, 99)),
        new=draw(st.integers(1, 24)),
        sampling=draw(st.sampled_from(SAMPLING)) if sampled else {},
        processors=processors,
        eos=draw(st.sampled_from(ENDS)),
        kind=draw(st.sampled_from(kinds)),
        source_seed=draw(st.integers(0, 2**32)),
        config=draw(tree_configs()),
        batched=not processors and draw(st.booleans()),
    )
