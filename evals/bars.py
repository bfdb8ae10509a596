"""The figures that a release must show, on SmolLM2-135M: same text, tokens a round, overhead, cost of a bad draft.

    python evals/bars.py --data DIR [--out evals/results] [--parts text,wrong]

DIR holds HumanEval.jsonl.gz, gsm8k_test.jsonl and mt_bench.jsonl. Everything goes through the public API; forwards of
the target are counted by one hook for every method alike.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_treespec import TreeConfig, enable
from real_model import load_smollm2
from tables import machine_facts, write_table

NEW_TOKENS = 96
SEED = 1
SETS: dict[str, tuple[str, Callable[[dict[str, Any]], str], bool]] = {
    "humaneval": ("HumanEval.jsonl.gz", lambda row: row["prompt"], False),
    "gsm8k": ("gsm8k_test.jsonl", lambda row: row["question"], True),
    "mt_bench": ("mt_bench.jsonl", lambda row: row["turns"][0], True),
}


def read_prompts(data: Path, name: str, count: int) -> list[tuple[str, bool]]:
    """The first `count` prompts of a set, and whether they go through the chat template."""
    file, text, chat = SETS[name]
    opener = gzip.open if file.endswith(".gz") else open
    with opener(data / file, "rt", encoding="utf-8") as lines:
        return [(text(json.loads(line)), chat) for line, _ in zip(lines, range(count), strict=False)]


def encode(tokenizer: Any, text: str, chat: bool) -> dict[str, torch.Tensor]:
    if not chat:
        return dict(tokenizer(text, return_tensors="pt"))
    messages = [{"role": "user", "content": text}]
    return dict(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    )


class Forwards:
    """Counts forwards of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.count = 0
        model.register_forward_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1


@contextmanager
def timed(row: dict[str, Any], forwards: Forwards) -> Iterator[None]:
    before, start = forwards.count, time.perf_counter()
    yield
    row["seconds"] = round(time.perf_counter() - start, 4)
    row["forwards"] = forwards.count - before


def run(model: Any, inputs: dict[str, torch.Tensor], forwards: Forwards, **kwargs: Any) -> dict[str, Any]:
    """One call: new tokens, seconds, forwards, tokens a round after the first forward."""
    row: dict[str, Any] = {}
    with timed(row, forwards):
        out = model.generate(**inputs, max_new_tokens=NEW_TOKENS, **kwargs)
    row["tokens"] = out[0, inputs["input_ids"].shape[1] :].tolist()
    row["new_tokens"] = len(row["tokens"])
    return row


def part_text(model: Any, tokenizer: Any, data: Path, count: int) -> list[dict[str, Any]]:
    """Equality at T=0 and T=1, and tokens a round and seconds against prompt lookup; methods take turns."""
    forwards = Forwards(model)
    tree = TreeConfig(draft="ngram", max_nodes=16, fallback="off", seed=SEED)
    rows = []
    for name in SETS:
        for index, (text, chat) in enumerate(read_prompts(data, name, count)):
            inputs = encode(tokenizer, text, chat)
            greedy = {"do_sample": False}
            sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0}
            calls = {
                "plain": greedy,
                "prompt_lookup": {**greedy, "prompt_lookup_num_tokens": 10},
                "tree": {**greedy, "tree_config": tree},
                "tree_auto": {**greedy, "tree_config": tree.replace(fallback="auto")},
                "plain_t1": {**sampled, "tree_config": tree.replace(max_nodes=0)},
                "tree_t1": {**sampled, "tree_config": tree},
            }
            done = {}
            for method, kwargs in calls.items():
                row = run(model, inputs, forwards, **kwargs)
                stats = model.treespec_stats if "tree_config" in kwargs else None
                if stats is not None:
                    row["overhead"] = round(stats.overhead_fraction, 4)
                    for field in (
                        "target_seconds",
                        "draft_seconds",
                        "verify_seconds",
                        "commit_seconds",
                        "round_seconds",
                    ):
                        row[field] = round(getattr(stats, field), 4)
                done[method] = row
            for method, row in done.items():
                reference = done["plain_t1" if method.endswith("t1") else "plain"]
                row["equal"] = row["tokens"] == reference["tokens"]
                kept = {key: value for key, value in row.items() if key != "tokens"}
                rows.append({"part": "text", "set": name, "prompt": index, "method": method, **kept})
            print(f"{name} {index}: " + ", ".join(f"{m} {r['forwards']}" for m, r in done.items()), file=sys.stderr)
    return rows


def random_draft(model: Any) -> Any:
    """An assistant that knows nothing: one tiny random layer over the target's vocabulary."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=model.config.vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        initializer_range=1.0,
    )
    return LlamaForCausalLM(config).eval()


def part_wrong(model: Any, tokenizer: Any, data: Path, count: int, repeats: int) -> list[dict[str, Any]]:
    """A tree that is all wrong against plain decoding, in turn, fallback off and on."""
    draft = random_draft(model).to(model.dtype)
    forwards = Forwards(model)
    wrong = TreeConfig(draft="model", max_nodes=16, max_children=16, max_depth=1, growth="static", fallback="off")
    calls: dict[str, dict[str, Any]] = {
        "plain": {},
        "wrong_tree": {"assistant_model": draft, "tree_config": wrong},
        "wrong_tree_fallback": {"assistant_model": draft, "tree_config": wrong.replace(fallback="auto")},
    }
    rows = []
    prompts = [(name, text, chat) for name in SETS for text, chat in read_prompts(data, name, count)]
    for repeat in range(repeats + 1):
        for index, (name, text, chat) in enumerate(prompts):
            inputs = encode(tokenizer, text, chat)
            tokens = {}
            for method, kwargs in calls.items():
                row = run(model, inputs, forwards, do_sample=False, **kwargs)
                tokens[method] = row.pop("tokens")
                row["equal"] = tokens[method] == tokens["plain"]
                if repeat:  # the first round warms up
                    rows.append(
                        {"part": f"wrong_{str(model.dtype)[6:]}", "set": name, "prompt": index, "method": method}
                        | {"repeat": repeat, **row}
                    )
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in SETS:
        of = {m: [r for r in rows if r["part"] == "text" and r["set"] == name and r["method"] == m] for m in METHODS}
        if of["tree"]:
            out[name] = {
                m: round(sum(r["new_tokens"] - 1 for r in rs) / max(1, sum(r["forwards"] - 1 for r in rs)), 3)
                for m, rs in of.items()
            }
            seconds = {m: sum(r["seconds"] for r in rs) for m, rs in of.items()}
            out[f"{name}:speed-up"] = {
                m: round(seconds["plain"] / seconds[m], 3) for m in ("prompt_lookup", "tree", "tree_auto")
            }
    for method in ("tree", "tree_auto", "tree_t1"):
        texts = [r for r in rows if r["part"] == "text" and r["method"] == method]
        if texts:
            seconds = {k: sum(r[k] for r in texts) for k in texts[0] if k.endswith("_seconds")}
            out[method] = {
                "equal": f"{sum(r['equal'] for r in texts)}/{len(texts)}",
                "overhead": round(1 - seconds["target_seconds"] / seconds["round_seconds"], 4),
                "split": {k: round(v / seconds["round_seconds"], 4) for k, v in seconds.items()},
            }
    for part in sorted({r["part"] for r in rows if r["part"].startswith("wrong")}):
        mine = [r for r in rows if r["part"] == part]
        for method in ("wrong_tree", "wrong_tree_fallback"):
            pairs = [(r, p) for r in mine for p in mine if r["method"] == method and p["method"] == "plain"]
            ratios = [
                r["seconds"] / p["seconds"]
                for r, p in pairs
                if (r["set"], r["prompt"], r["repeat"]) == (p["set"], p["prompt"], p["repeat"])
            ]
            equal = [r["equal"] for r in mine if r["method"] == method]
            out[f"{part}:{method}"] = {
                "ratio": round(median(ratios), 3),
                "min": round(min(ratios), 3),
                "max": round(max(ratios), 3),
                "equal": f"{sum(equal)}/{len(equal)}",
            }
    return out


METHODS = ("plain", "prompt_lookup", "tree", "tree_auto", "plain_t1", "tree_t1")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Tokens a round per set, from the rows of the CSV alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = summary(rows)
    methods = ("prompt_lookup", "tree", "tree_t1")
    names = [name for name in SETS if name in figures]
    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    for offset, method in enumerate(methods):
        axes.bar([i + (offset - 1) * 0.27 for i in range(len(names))], [figures[n][method] for n in names], 0.25)
    axes.set_xticks(range(len(names)), names)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("tokens a round")
    axes.set_title("SmolLM2-135M, float32, 16 nodes, no draft model")
    axes.legend(["plain decoding", "HF prompt lookup, T=0", "n-gram tree, T=0", "n-gram tree, T=1"], fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--parts", default="text,wrong")
    parser.add_argument("--prompts", type=int, default=12, help="prompts of each set")
    parser.add_argument("--repeats", type=int, default=3, help="timed repeats of the wrong-tree part")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="data types of the wrong-tree part")
    arguments = parser.parse_args()
    parts = set(arguments.parts.split(","))
    if parts - {"text", "wrong"}:
        parser.error(f"--parts {arguments.parts}: expected text, wrong or both, with a comma between")
    rows: list[dict[str, Any]] = []
    if "text" in parts:
        model, tokenizer = load_smollm2()
        rows += part_text(enable(model), tokenizer, arguments.data, arguments.prompts)
    if "wrong" in parts:
        for dtype in arguments.dtypes.split(","):
            model, tokenizer = load_smollm2(dtype=getattr(torch, dtype))
            few = max(1, arguments.prompts // 6)
            rows += part_wrong(enable(model), tokenizer, arguments.data, few, arguments.repeats)
    machine = machine_facts(model="SmolLM2-135M-Instruct")
    name = "bars-" + "-".join(sorted(parts))
    write_table(arguments.out / f"{name}.csv", rows, machine)
    if "text" in parts:
        plot(rows, arguments.out / f"{name}.png")
    print(json.dumps({**machine, **summary(rows)}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
