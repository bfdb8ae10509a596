"""What appending a tree to a cache and committing a path of it cost, by the length of the context.

    python evals/cache_costs.py [--contexts 128,256,512,1024,2048,4096,8192] [--out evals/results]

Storage alone, without a model: every layer is given the states of a tree, as its attention would, then a path of it is
committed and the cache cut back to its context. Caches and contexts take turns in one run, in another order each time.
A DynamicCache copies its text at every append. A TreeCache does not; with 8 bits and one buffer for all layers it
dequantises the text for attention at every append; `read_us` is what that takes when it is done once more.
Writes cache-costs.csv, a row for each repeat, and cache-costs.png, from its medians.
"""

from __future__ import annotations

import argparse
import csv
import platform
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import DynamicCache, LlamaConfig

import hf_treespec
from hf_treespec import TreeCache
from hf_treespec.cache import RowCache

KINDS: dict[str, Callable[[LlamaConfig], Any]] = {
    "dynamic": lambda config: DynamicCache(config=config),
    "dense": TreeCache,
    "int8": lambda config: TreeCache(config, storage="int8"),
    "int8_per_layer": lambda config: TreeCache(config, storage="int8", buffers="per_layer"),
    "fp8": lambda config: TreeCache(config, storage="fp8"),
}
SEED = 1


def settle(device: torch.device) -> float:
    """The time once the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def one_round(cache: Any, tree: torch.Tensor, path: Sequence[int]) -> dict[str, float]:
    """Microseconds of an append and a commit in all layers; the cache is left as it was."""
    rows = RowCache(cache, [int(cache.get_seq_length())] * tree.shape[0])
    with rows.transaction() as transaction:
        begin = settle(tree.device)
        for layer in range(len(cache.layers)):
            cache.update(tree, tree, layer)
        appended = settle(tree.device)
        transaction.commit([list(path)] * tree.shape[0])
        committed = settle(tree.device)
    read = 0.0
    if isinstance(cache, TreeCache):
        begin_read = settle(tree.device)
        for layer in cache.layers:
            for slots in layer.slots.values():
                slots.read(0, layer.physical)
        read = settle(tree.device) - begin_read
    cache.crop(-len(path))
    return {
        "append_us": (appended - begin) * 1e6,
        "read_us": read * 1e6,
        "commit_us": (committed - appended) * 1e6,
    }


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    config = LlamaConfig(num_hidden_layers=arguments.layers)
    torch.manual_seed(SEED)
    shape = (arguments.batch, arguments.heads, arguments.nodes, arguments.head_size)
    tree = torch.randn(shape, device=device, dtype=dtype)
    # Every second node: all but the root move.
    path = range(0, min(arguments.nodes, 2 * arguments.accepted), 2)
    order = random.Random(SEED)
    caches = {}
    for context in arguments.contexts:
        prompt = torch.randn((*shape[:2], context, shape[3]), device=device, dtype=dtype)
        for kind in arguments.kinds:
            caches[kind, context] = KINDS[kind](config)
            for layer in range(arguments.layers):
                caches[kind, context].update(prompt, prompt, layer)
    rows = []
    for repeat in range(-arguments.warmup, arguments.repeats):
        turns = list(caches)
        order.shuffle(turns)
        for kind, context in turns:
            figures = one_round(caches[kind, context], tree, path)
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
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=17, help="slots of a tree, the root among them")
    parser.add_argument("--accepted", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.kinds) - set(KINDS):
        parser.error(f"--kinds: {', '.join(sorted(unknown))}: expected some of {', '.join(KINDS)}")
    rows = measure(arguments)
    setting = {
        **{name: getattr(arguments, name) for name in ("layers", "batch", "heads", "head_size", "nodes", "dtype")},
        "device": arguments.device,
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_treespec": hf_treespec.__version__,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    table = arguments.out / "cache-costs.csv"
    with open(table, "w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *setting])
        writer.writeheader()
        writer.writerows(
            {**{k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, **setting} for row in rows
        )
    plot(table, table.with_suffix(".png"))
    for field in ("append_us", "read_us", "commit_us"):
        print(field)
        for kind, of in medians(rows, field).items():
            print(f"  {kind:15}", *(f"{context}: {value:.0f}" for context, value in of.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
