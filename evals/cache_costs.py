"""What appending a tree to a cache and committing a path of it cost, by the length of the context.

    python evals/cache_costs.py [--contexts 128,256,512,1024,2048,4096,8192] [--out evals/results]

A random Llama, whose last layer adds next to nothing so that the layers before it draft well, goes on behind caches
that are filled with random states. Every update of the cache by a whole tree is timed by itself; commits are those of
`treespec_stats`. Caches and contexts take turns in one run, in another order each time. A DynamicCache copies its text
at every append. A TreeCache does not; with 8 bits and one buffer for all layers it dequantises the text for attention.
Writes cache-costs.csv, a row for each call, and cache-costs.png, from its medians.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_treespec import TreeCache, TreeConfig, enable
from tables import machine_facts, write_table

KINDS: dict[str, Callable[[LlamaConfig], Any]] = {
    "dynamic": lambda config: DynamicCache(config=config),
    "dense": TreeCache,
    "int8": lambda config: TreeCache(config, storage="int8"),
    "int8_per_layer": lambda config: TreeCache(config, storage="int8", buffers="per_layer"),
    "fp8": lambda config: TreeCache(config, storage="fp8"),
}
SEED = 1
VOCAB = 512
# Tokens of the prompt that the cache does not hold yet.
UNREAD = 4


class TimedUpdates:
    """Stands in for the `update` of a cache and adds up the time of those by a whole tree.

    Args:
        cache: shadowed on the instance.
        slots: tokens of an update that counts.
    """

    def __init__(self, cache: Any, slots: int) -> None:
        self.seconds, self.calls = 0.0, 0
        self._update, self._slots = cache.update, slots
        cache.update = self

    def __call__(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if keys.shape[2] != self._slots:
            return self._update(keys, values, *args, **kwargs)
        begin = settle(keys.device)
        shown = self._update(keys, values, *args, **kwargs)
        self.seconds += settle(keys.device) - begin
        self.calls += 1
        return shown


def settle(device: torch.device) -> float:
    """The time once the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def build(arguments: argparse.Namespace) -> Any:
    """A random model in which the last layer hardly matters."""
    torch.manual_seed(SEED)
    width = arguments.heads * arguments.head_size
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.heads,
        head_dim=arguments.head_size,
        max_position_embeddings=max(arguments.contexts) + arguments.new_tokens + 1,
        initializer_range=0.2,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(arguments.device, getattr(torch, arguments.dtype)).eval()
    with torch.no_grad():
        for part in (model.model.layers[-1].self_attn.o_proj, model.model.layers[-1].mlp.down_proj):
            part.weight.mul_(1e-3)
    return enable(model)


def filled(model: Any, kind: str, context: int) -> Any:
    """A cache that holds so many random tokens."""
    cache, config = KINDS[kind](model.config), model.config
    shape = (1, config.num_key_value_heads, context, config.head_dim)
    states = torch.randn(shape, device=model.device, dtype=model.dtype)
    for layer in range(config.num_hidden_layers):
        cache.update(states, states, layer)
    return cache


def one_call(model: Any, kind: str, context: int, config: TreeConfig, new: int) -> dict[str, Any]:
    """Microseconds that a round takes to append its tree and to commit, and what was accepted."""
    torch.manual_seed(SEED)
    cache = filled(model, kind, context - UNREAD)
    ids = torch.randint(0, VOCAB, (1, context), device=model.device)
    timed = TimedUpdates(cache, config.max_nodes + 1)
    model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=new, pad_token_id=0, tree_config=config)
    stats = model.treespec_stats
    rounds = timed.calls / model.config.num_hidden_layers
    return {
        "append_us": timed.seconds / rounds * 1e6,
        "commit_us": stats.commit_seconds / stats.rounds * 1e6,
        "tokens_per_round": stats.tokens_per_round,
    }


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    model = build(arguments)
    options = {"early_exit": {"layer": arguments.layers - 1}}
    config = TreeConfig(
        draft="early_exit", draft_options=options, max_nodes=arguments.nodes, max_children=2, max_depth=5,
        growth="static", fallback="off", seed=SEED,
    )  # fmt: skip
    order = random.Random(SEED)
    rows = []
    for repeat in range(-1, arguments.repeats):
        turns = [(kind, context) for kind in arguments.kinds for context in arguments.contexts]
        order.shuffle(turns)
        for kind, context in turns:
            figures = one_call(model, kind, context, config, arguments.new_tokens)
            # The first time warms up.
            if repeat >= 0:
                rows.append({"kind": kind, "context": context, "repeat": repeat, **figures})
    return rows


def medians(rows: Sequence[dict[str, Any]], field: str) -> dict[str, dict[int, float]]:
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        values[row["kind"]][int(row["context"])].append(float(row[field]))
    return {kind: {context: median(v) for context, v in sorted(of.items())} for kind, of in values.items()}


def plot(table: Path, picture: Path) -> None:
    """Append and commit by context, from the CSV alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for axes, field in zip(panels, ("append_us", "commit_us"), strict=True):
        for kind, of in medians(rows, field).items():
            axes.plot(list(of), list(of.values()), marker="o", label=kind)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens in the cache")
        axes.set_ylabel(f"{field.removesuffix('_us')}, microseconds a round")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=numbers, default=[128, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=16, help="of a tree, the root not counted")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.kinds) - set(KINDS):
        parser.error(f"--kinds: {', '.join(sorted(unknown))}: expected some of {', '.join(KINDS)}")
    rows = measure(arguments)
    setting = {name: getattr(arguments, name) for name in ("layers", "heads", "head_size", "nodes", "dtype", "device")}
    rounded = [{k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    table = arguments.out / "cache-costs.csv"
    write_table(table, rounded, machine_facts(**setting))
    plot(table, table.with_suffix(".png"))
    for field in ("append_us", "commit_us", "tokens_per_round"):
        print(field)
        for kind, of in medians(rows, field).items():
            print(f"  {kind:15}", *(f"{context}: {value:.1f}" for context, value in of.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
