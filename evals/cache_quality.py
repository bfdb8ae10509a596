"""What 8-bit caches do to a text: perplexity and greedy decoding over them, against a dense cache.

    python evals/cache_quality.py --data DIR [--prompts 12] [--parts perplexity,greedy,tree] [--out evals/results]

DIR holds HumanEval.jsonl.gz, gsm8k_test.jsonl and mt_bench.jsonl. The model is SmolLM2-135M-Instruct. *Perplexity*: of
whole texts (HumanEval prompts with their solutions, MT-bench questions of both turns, gsm8k questions with their
answers), read in one forward that sees every state as the cache gives it back. *Greedy*: new tokens over each storage
until the first that differs from the dense one's. *Tree*: text with n-gram trees against text without, over the same
storage, token by token, greedy and sampled; in float32 they may part only where the two best tokens are close.
Writes cache-quality.csv, a row for each text, and cache-quality.png; prints the summary.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import inspect
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bars import SETS, encode, read_prompts
from hf_treespec import TreeCache, TreeConfig, enable
from real_model import load_smollm2
from tables import machine_facts, write_table

STORAGES = ("dense", "int8", "fp8")
PARTS = ("perplexity", "greedy", "tree")
# Largest loss of perplexity that is fine, as a share.
BARS = {"int8": 0.005, "fp8": 0.01}
SEED = 1
WHOLE: dict[str, Callable[[dict[str, Any]], str]] = {
    "humaneval": lambda row: row["prompt"] + row["canonical_solution"],
    "gsm8k": lambda row: f"{row['question']}\n{row['answer']}",
    "mt_bench": lambda row: "\n\n".join(row["turns"]),
}


def read_texts(data: Path, name: str, count: int) -> list[str]:
    """The first `count` whole texts of a set."""
    file = SETS[name][0]
    opener = gzip.open if file.endswith(".gz") else open
    with opener(data / file, "rt", encoding="utf-8") as lines:
        return [WHOLE[name](json.loads(line)) for line, _ in zip(lines, range(count), strict=False)]


@torch.no_grad()
def loss(model: Any, ids: torch.Tensor, storage: str) -> float:
    """Sum of the losses of all tokens but the first, in nats."""
    cache = TreeCache(model.config, storage=storage)
    # "cache" since transformers 5.24.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    logits = model(input_ids=ids, use_cache=True, **{name: cache}).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))


def part_perplexity(model: Any, tokenizer: Any, data: Path, count: int) -> list[dict[str, Any]]:
    rows = []
    for name in WHOLE:
        for index, text in enumerate(read_texts(data, name, count)):
            ids = tokenizer(text, return_tensors="pt").input_ids.to(model.device)
            for storage in STORAGES:
                nats = loss(model, ids, storage)
                rows.append(
                    {"part": "perplexity", "set": name, "text": index, "storage": storage}
                    | {"tokens": ids.shape[1] - 1, "nats": round(nats, 6)}
                )
            print(f"perplexity {name} {index}", file=sys.stderr)
    return rows


def new_tokens(model: Any, inputs: dict[str, torch.Tensor], count: int, **call: Any) -> list[int]:
    out = model.generate(**inputs, max_new_tokens=count, **call)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def same(one: Sequence[int], two: Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    pairs = zip(one, two, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))


def part_greedy(model: Any, tokenizer: Any, data: Path, count: int, new: int) -> list[dict[str, Any]]:
    plain = TreeConfig(max_nodes=0)
    rows = []
    for name in SETS:
        for index, (text, chat) in enumerate(read_prompts(data, name, count)):
            inputs = encode(tokenizer, text, chat)
            texts = {
                kind: new_tokens(model, inputs, new, do_sample=False, tree_config=plain.replace(kv_cache=kind))
                for kind in STORAGES
            }
            for kind, tokens in texts.items():
                rows.append(
                    {"part": "greedy", "set": name, "text": index, "storage": kind, "tokens": len(texts["dense"])}
                    | {"common": same(tokens, texts["dense"]), "equal": tokens == texts["dense"]}
                )
            print(f"greedy {name} {index}", file=sys.stderr)
    return rows


def part_tree(model: Any, tokenizer: Any, data: Path, count: int, new: int) -> list[dict[str, Any]]:
    tree = TreeConfig(draft="ngram", max_nodes=16, fallback="off", seed=SEED)
    modes: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "sampled": {"do_sample": True, "temperature": 1.0, "top_k": 0},
    }
    rows = []
    for name in SETS:
        for index, (text, chat) in enumerate(read_prompts(data, name, count)):
            inputs = encode(tokenizer, text, chat)
            for kind in STORAGES:
                for mode, call in modes.items():
                    config = tree.replace(kv_cache=kind)
                    plain = new_tokens(model, inputs, new, tree_config=config.replace(max_nodes=0), **call)
                    ours = new_tokens(model, inputs, new, tree_config=config, **call)
                    rows.append(
                        {"part": "tree", "set": name, "text": index, "storage": kind, "mode": mode}
                        | {"tokens": len(plain), "common": same(ours, plain), "equal": ours == plain}
                        | {"rounds": model.treespec_stats.rounds}
                    )
            print(f"tree {name} {index}", file=sys.stderr)
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}

    def of(part: str, storage: str, name: str | None = None) -> list[dict[str, Any]]:
        return [
            row for row in rows if row["part"] == part and row["storage"] == storage and name in (None, row["set"])
        ]

    def perplexity(mine: Sequence[dict[str, Any]]) -> float:
        return math.exp(sum(float(row["nats"]) for row in mine) / sum(int(row["tokens"]) for row in mine))

    for storage in STORAGES:
        for name in (None, *SETS):
            if mine := of("perplexity", storage, name):
                change = perplexity(mine) / perplexity(of("perplexity", "dense", name)) - 1
                out.setdefault(f"perplexity:{name or 'all'}", {})[storage] = {
                    "perplexity": round(perplexity(mine), 4),
                    "loss": round(change, 6),
                    **({"within": change <= BARS[storage]} if storage in BARS else {}),
                }
        for part in ("greedy", "tree"):
            if mine := of(part, storage):
                out.setdefault(part, {})[storage] = {
                    "equal": f"{sum(row['equal'] in (True, 'True') for row in mine)}/{len(mine)}",
                    "common": round(sum(int(r["common"]) for r in mine) / sum(int(r["tokens"]) for r in mine), 4),
                }
    return out


def plot(table: Path, picture: Path) -> None:
    """Loss of perplexity and share of greedy tokens before the first difference, from the CSV alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with open(table, newline="") as file:
        figures = summary(list(csv.DictReader(file)))
    losses = {key.split(":")[1]: value for key, value in figures.items() if key.startswith("perplexity:")}
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.4))
    for offset, storage in enumerate(BARS):
        places = [place + offset * 0.4 for place in range(len(losses))]
        panels[0].bar(places, [100 * value[storage]["loss"] for value in losses.values()], 0.35, label=storage)
        panels[0].axhline(100 * BARS[storage], color=f"C{offset}", linewidth=0.8, linestyle="--")
    panels[0].set_xticks([place + 0.2 for place in range(len(losses))], list(losses))
    panels[0].set_ylabel("loss of perplexity, percent")
    if losses:
        panels[0].legend(fontsize=8)
    shares = figures.get("greedy", {})
    panels[1].bar(list(shares), [value["common"] for value in shares.values()])
    panels[1].set_ylabel("greedy tokens before the first difference")
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--prompts", type=int, default=12, help="texts of each set")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args(argv)
    parts = arguments.parts.split(",")
    if set(parts) - set(PARTS):
        parser.error(f"--parts {arguments.parts}: expected some of {', '.join(PARTS)}, with commas between")
    model, tokenizer = load_smollm2(dtype=getattr(torch, arguments.dtype))
    enable(model)
    data, count, new = arguments.data, arguments.prompts, arguments.new_tokens
    rows: list[dict[str, Any]] = []
    if "perplexity" in parts:
        rows += part_perplexity(model, tokenizer, data, count)
    if "greedy" in parts:
        rows += part_greedy(model, tokenizer, data, count, new)
    if "tree" in parts:
        rows += part_tree(model, tokenizer, data, count, new)
    machine = machine_facts(model="SmolLM2-135M-Instruct", dtype=arguments.dtype)
    table = arguments.out / "cache-quality.csv"
    write_table(table, rows, machine)
    plot(table, table.with_suffix(".png"))
    print(json.dumps({**machine, **summary(rows)}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
