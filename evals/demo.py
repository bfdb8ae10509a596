"""One prompt on the real model, plainly and with tree speculation: same text, fewer forwards (`make demo`)."""

from __future__ import annotations

import argparse
import logging
import platform
import sys
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import transformers
from transformers import TextStreamer

import hf_treespec
from hf_treespec import TreeConfig, disable, enable
from real_model import RealModelError, load_smollm2, progress_bars_on_terminals_only

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
PROMPT = f"Rewrite this Python class and rename it to `Queue`. Keep everything else.\n\n```python\n{CLASS}```"
REPETITIONS = 3


@dataclass
class Side:
    """One way of decoding: what it produced and how long each timed run took."""

    name: str
    tree_config: TreeConfig | None
    tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    tokens_per_round: float = 1.0
    seconds: list[float] = field(default_factory=list)

    def run(self, model: Any, inputs: Any, max_new_tokens: int, streamer: TextStreamer | None = None) -> float:
        # Plain is the model as loaded: not even our class is in its path.
        enable(model) if self.tree_config else disable(model)
        extra = {"tree_config": self.tree_config} if self.tree_config else {}
        start = time.perf_counter()
        out = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer, **extra)
        elapsed = time.perf_counter() - start
        self.tokens = out[0, inputs["input_ids"].shape[1] :].tolist()
        if self.tree_config:
            stats = model.treespec_stats
            self.rounds, self.tokens_per_round = stats.rounds, stats.tokens_per_round
        else:
            # The first token is the prefill's on both sides; each later one costs a forward here.
            self.rounds = len(self.tokens) - 1
        return elapsed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--max-nodes", type=int, default=16, help="drafted nodes of a tree")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("real_model").setLevel(logging.INFO)

    progress_bars_on_terminals_only()
    try:
        model, tokenizer = load_smollm2()
    except RealModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    plain = Side("plain generate", None)
    tree = Side("tree speculation", TreeConfig(draft="ngram", max_nodes=arguments.max_nodes))
    describe(model, inputs, arguments)

    # The streamed runs come first and are not timed: they warm up both sides.
    for side in (plain, tree):
        print(f"--- {side.name}, streamed")
        side.run(model, inputs, arguments.max_new_tokens, TextStreamer(tokenizer, skip_prompt=True))
        print()
    print(f"--- timing: {REPETITIONS} runs of each, in turn, not streamed", flush=True)
    for _ in range(REPETITIONS):
        for side in (plain, tree):
            side.seconds.append(side.run(model, inputs, arguments.max_new_tokens))
    report(plain, tree)
    return 0 if plain.tokens == tree.tokens else 1


def describe(model: Any, inputs: Any, arguments: argparse.Namespace) -> None:
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(
        f"hf_treespec {hf_treespec.__version__}, transformers {transformers.__version__}, "
        f"torch {torch.__version__}, Python {platform.python_version()}\n"
        f"model: SmolLM2-135M-Instruct ({millions:.0f}M parameters), {model.dtype}, {model.device}, "
        f"{torch.get_num_threads()} threads\n"
        f"prompt: edit a short class, {inputs['input_ids'].shape[1]} tokens; greedy, "
        f"at most {arguments.max_new_tokens} new tokens\n"
        f"draft: n-grams of the prompt and the text so far, trees of {arguments.max_nodes} nodes\n"
        "note: the answer repeats much of the prompt, which suits n-grams; text without repeats gains little\n"
    )


def report(plain: Side, tree: Side) -> None:
    ratios = sorted(slow / fast for slow, fast in zip(plain.seconds, tree.seconds, strict=True))
    print(f"\n{'':18}{'tokens':>8}{'forwards':>10}{'tokens/round':>14}{'seconds (min-max)':>24}{'tokens/s':>10}")
    for side in (plain, tree):
        middle = median(side.seconds)
        spread = f"{middle:.2f} ({min(side.seconds):.2f}-{max(side.seconds):.2f})"
        print(
            f"{side.name:18}{len(side.tokens):>8}{side.rounds:>10}{side.tokens_per_round:>14.2f}"
            f"{spread:>24}{len(side.tokens) / middle:>10.1f}"
        )
    same = "yes" if plain.tokens == tree.tokens else "NO"
    print(f"\nidentical text: {same}")
    print(f"speed-up: {median(ratios):.2f}x (median of {len(ratios)} pairs, {ratios[0]:.2f}-{ratios[-1]:.2f})")


if __name__ == "__main__":
    sys.exit(main())
