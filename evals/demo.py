"""Three prompts on the real model, plainly and with tree speculation: same text, fewer forwards (`make demo`)."""

from __future__ import annotations

import argparse
import logging
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import TextStreamer

import hf_treespec
from hf_treespec import TreeConfig, disable, enable, load_draft
from real_model import RealModelError, load_smollm2, progress_bars_on_terminals_only

DRAFT_HEAD = Path(__file__).parent / "demo_draft"
CLASS = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, value):
        self.items.append(value)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("peek at an empty stack")
        return self.items[-1]
"""
PROMPTS = {
    "edit": f"Rewrite this Python class and rename it to `Queue`. Keep everything else.\n\n```python\n{CLASS}```",
    "sum": "A baker makes 12 trays of 8 rolls each morning and sells 75 of the rolls. How many rolls are left after "
    "a week of 5 days? Explain each step.",
    "chat": "Why do leaves change their colour in autumn? Write a few short paragraphs for a child of ten.",
}
PLAIN = "plain"


@dataclass
class Side:
    """One way to decode one prompt: what it gave, and the time of each timed run."""

    config: TreeConfig | None
    tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    seconds: list[float] = field(default_factory=list)

    def run(self, model: Any, head: Any, inputs: Any, new_tokens: int, streamer: TextStreamer | None = None) -> float:
        # Plain is the model as loaded: not even our class is in its path.
        enable(model) if self.config else disable(model)
        extra = {} if self.config is None else {"tree_config": self.config, "assistant_model": head}
        start = time.perf_counter()
        out = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, streamer=streamer, **extra)
        elapsed = time.perf_counter() - start
        self.tokens = out[0, inputs["input_ids"].shape[1] :].tolist()
        # The first token is the prefill's on both sides; plainly each later one costs a forward.
        self.rounds = model.treespec_stats.rounds if self.config else len(self.tokens) - 1
        return elapsed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-nodes", type=int, default=16, help="drafted nodes of a tree, at most")
    parser.add_argument("--draft", default="head+ngram+recycle", help="head, ngram, recycle, ..., joined by +")
    parser.add_argument("--head", default=DRAFT_HEAD, help="folder of the draft head")
    parser.add_argument("--repetitions", type=int, default=3, help="timed runs of each side and prompt")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("real_model").setLevel(logging.INFO)
    progress_bars_on_terminals_only()
    sources = arguments.draft.split("+")
    try:
        config = TreeConfig(draft=_named(sources), max_nodes=arguments.max_nodes)
        head = load_draft(arguments.head) if "head" in sources else None
        model, tokenizer = load_smollm2()
    except (RealModelError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    describe(model, arguments)
    inputs = {name: encoded(tokenizer, text) for name, text in PROMPTS.items()}
    sides = {name: {PLAIN: Side(None), "tree": Side(config)} for name in PROMPTS}
    for name, both in sides.items():
        # Not timed: it warms up both, and costs of rounds are learnt.
        print(f"--- {name}: {PROMPTS[name].partition(chr(10))[0]}", flush=True)
        both[PLAIN].run(model, head, inputs[name], 8)
        both["tree"].run(
            model, head, inputs[name], arguments.max_new_tokens, TextStreamer(tokenizer, skip_prompt=True)
        )
        for number in range(arguments.repetitions):
            for side in both.values():
                side.seconds.append(side.run(model, head, inputs[name], arguments.max_new_tokens))
            told = ", ".join(f"{kind} {side.seconds[-1]:.2f} s" for kind, side in both.items())
            print(f"    timed run {number + 1} of {arguments.repetitions}: {told}", flush=True)
        print()
    report(sides)
    return 0 if all(both[PLAIN].tokens == both["tree"].tokens for both in sides.values()) else 1


def _named(sources: Sequence[str]) -> str | tuple[str, ...]:
    parts = tuple("model" if part == "head" else part for part in sources)
    return parts if len(parts) > 1 else parts[0]


def encoded(tokenizer: Any, text: str) -> Any:
    """A message as the model's chat template has it."""
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def describe(model: Any, arguments: argparse.Namespace) -> None:
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(
        f"hf_treespec {hf_treespec.__version__}, transformers {transformers.__version__}, "
        f"torch {torch.__version__}, Python {platform.python_version()}\n"
        f"model: SmolLM2-135M-Instruct ({millions:.0f}M parameters), {model.dtype}, {model.device}, "
        f"{torch.get_num_threads()} threads; greedy, at most {arguments.max_new_tokens} new tokens\n"
        f"draft: {arguments.draft}, trees of at most {arguments.max_nodes} nodes, as many as pay here\n"
    )


def report(sides: dict[str, dict[str, Side]]) -> None:
    """A line for each prompt and side, and the ratio of the sums of all medians."""
    print(f"{'prompt':8}{'decoding':10}{'tokens':>7}{'forwards':>10}{'tokens/round':>14}{'seconds (min-max)':>22}"
          f"{'tokens/s':>10}{'speed-up':>10}")  # fmt: skip
    totals = dict.fromkeys((PLAIN, "tree"), 0.0)
    for name, both in sides.items():
        for kind, side in both.items():
            middle = median(side.seconds)
            totals[kind] += middle
            spread = f"{middle:.2f} ({min(side.seconds):.2f}-{max(side.seconds):.2f})"
            ratio = median(plain / own for plain, own in zip(both[PLAIN].seconds, side.seconds, strict=True))
            print(
                f"{name:8}{kind:10}{len(side.tokens):>7}{side.rounds:>10}"
                f"{(len(side.tokens) - 1) / max(1, side.rounds):>14.2f}{spread:>22}"
                f"{len(side.tokens) / middle:>10.1f}{ratio:>9.2f}x"
            )
    same = sum(both[PLAIN].tokens == both["tree"].tokens for both in sides.values())
    print(f"\nidentical text: {same} of {len(sides)} prompts")
    print(f"speed-up over all: {totals[PLAIN] / totals['tree']:.2f}x")


if __name__ == "__main__":
    sys.exit(main())
