"""Draft sources beside one another on the eval sets: tokens a round, by depth and by source, tokens/s, equal text.

    python evals/sources.py --data DIR --draft HEAD --work FOLDER [--sources plain,ngram,head,head+ngram]

DIR holds HumanEval.jsonl.gz, gsm8k_test.jsonl and mt_bench.jsonl. `head` is the checkpoint of --draft, any other name
one that `TreeConfig(draft=...)` takes. All arms of a prompt run one after the other, in an order that changes from
prompt to prompt. Each prompt is one line in --work, so that a killed run goes on where it was; several processes
(`torchrun`, `accelerate launch`) share the prompts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from bars import SETS, encode, read_prompts
from hf_treespec import TreeConfig, enable, load_draft
from hf_treespec.train import BrokenRunError, OtherRunError, ShardWriter, claim, read_shards
from real_model import load_smollm2, progress_bars_on_terminals_only
from tables import machine_facts, write_table

_SEED = 1


def arguments_of(temperature: float) -> dict[str, Any]:
    """Of `generate`."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0}


def config_of(source: str, nodes: int) -> TreeConfig:
    """Of the arm; `plain` is the loop without a tree, on the same noise."""
    usual = TreeConfig(max_nodes=nodes, fallback="off", seed=_SEED)
    if source == "plain":
        return usual.replace(max_nodes=0, draft="ngram")
    parts = tuple("model" if part == "head" else part for part in source.split("+"))
    return usual.replace(draft=parts if len(parts) > 1 else parts[0])


def measured(model: Any, inputs: Any, head: Any, source: str, temperature: float, options: Any) -> dict[str, Any]:
    """One call."""
    extra = {"assistant_model": head} if "head" in source.split("+") else {}
    config = config_of(source, options.nodes)
    start = time.perf_counter()
    out = model.generate(
        **inputs, max_new_tokens=options.new_tokens, tree_config=config, **arguments_of(temperature), **extra
    )
    seconds = time.perf_counter() - start
    stats = model.treespec_stats
    return {
        "tokens": out[0, inputs["input_ids"].shape[1] :].tolist(),
        "seconds": round(seconds, 4),
        **{name: getattr(stats, name) for name in ("round_tokens", "rounds", "drafted_nodes")},
        "round_seconds": round(stats.round_seconds, 4),
        "draft_seconds": round(stats.draft_seconds, 4),
        **{name: getattr(stats, name) for name in ("accepted_by_depth", "accepted_by_source", "drafted_by_source")},
    }


def units(options: Any) -> Iterator[tuple[str, str, int, float, str, bool]]:
    """Key, set, place, temperature, text and whether it is chat; the sets take turns, so that a part is balanced."""
    sets = {name: read_prompts(options.data, name, options.prompts) for name in SETS}
    for place in range(options.prompts):
        for name, prompts in sets.items():
            for temperature in options.temperatures:
                if place < len(prompts):
                    yield f"{name}.{place:04d}.{temperature:g}", name, place, temperature, *prompts[place]


def run(options: Any, state: PartialState) -> None:
    """All units that are not done."""
    model, tokenizer = load_smollm2(dtype=getattr(torch, options.dtype))
    model = enable(model)
    head = None if options.draft is None else load_draft(options.draft).to(model.dtype)
    done = read_shards(options.work)
    with ShardWriter(options.work, state.process_index) as shard:
        for number, (key, name, place, temperature, text, chat) in enumerate(units(options)):
            if number % state.num_processes != state.process_index or key in done:
                continue
            inputs = encode(tokenizer, text, chat)
            arms = list(options.sources)
            random.Random(key).shuffle(arms)
            rows = {arm: measured(model, inputs, head, arm, temperature, options) for arm in arms}
            texts = {arm: row.pop("tokens") for arm, row in rows.items()}
            first = next(iter(texts.values()))
            about = {"set": name, "prompt": place, "temperature": temperature}
            shard.write({"key": key, **about, "equal": all(text == first for text in texts.values()), "arms": rows})
            if state.is_main_process:
                told = ", ".join(
                    f"{arm} {row['round_tokens'] / max(1, row['rounds']):.2f}" for arm, row in rows.items()
                )
                print(f"{key}: {told}", file=sys.stderr, flush=True)


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each temperature, arm and set, and one of the mean over the sets."""
    rows = []
    for temperature in sorted({record["temperature"] for record in records}):
        mine = [record for record in records if record["temperature"] == temperature]
        for arm in sorted({arm for record in mine for arm in record["arms"]}):
            of_sets = []
            for name in SETS:
                calls = [record["arms"][arm] for record in mine if record["set"] == name and arm in record["arms"]]
                if not calls:
                    continue
                rounds = sum(call["rounds"] for call in calls)
                depths = max(len(call["accepted_by_depth"]) for call in calls)
                by_depth = [
                    sum(call["accepted_by_depth"][depth] for call in calls if depth < len(call["accepted_by_depth"]))
                    for depth in range(depths)
                ]
                sources = sorted({source for call in calls for source in call["accepted_by_source"]})
                of_sets.append(
                    {
                        "temperature": temperature,
                        "arm": arm,
                        "set": name,
                        "prompts": len(calls),
                        "tokens_per_round": sum(call["round_tokens"] for call in calls) / rounds,
                        "tokens_per_second": sum(call["round_tokens"] for call in calls)
                        / sum(call["round_seconds"] for call in calls),
                        "nodes_per_round": sum(call["drafted_nodes"] for call in calls) / rounds,
                        "draft_share": sum(call["draft_seconds"] for call in calls)
                        / sum(call["round_seconds"] for call in calls),
                        "accepted_by_depth": " ".join(f"{hits / rounds:.3f}" for hits in by_depth),
                        "accepted_by_source": " ".join(
                            f"{source}:{sum(call['accepted_by_source'].get(source, 0) for call in calls) / rounds:.3f}"
                            for source in sources
                        ),
                        "equal": f"{sum(r['equal'] for r in mine if r['set'] == name)}/{len(calls)}",
                    }
                )
            rows += of_sets
            if len(of_sets) == len(SETS):
                means = {
                    field: sum(row[field] for row in of_sets) / len(of_sets)
                    for field in ("tokens_per_round", "tokens_per_second", "nodes_per_round", "draft_share")
                }
                prompts = sum(row["prompts"] for row in of_sets)
                rows.append({"temperature": temperature, "arm": arm, "set": "mean", "prompts": prompts, **means})
    for row in rows:
        row.update({field: round(value, 4) for field, value in row.items() if isinstance(value, float)})
    return rows


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens a round by set, a panel for each temperature."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    temperatures = sorted({row["temperature"] for row in rows})
    sets = [*SETS, "mean"]
    figure, panels = pyplot.subplots(1, len(temperatures), figsize=(5 * len(temperatures), 3.6), squeeze=False)
    for panel, temperature in zip(panels[0], temperatures, strict=True):
        arms = sorted({row["arm"] for row in rows} - {"plain"})
        for offset, arm in enumerate(arms):
            mine = {
                row["set"]: row["tokens_per_round"]
                for row in rows
                if row["arm"] == arm and row["temperature"] == temperature
            }
            width = 0.8 / len(arms)
            places = [place + (offset - (len(arms) - 1) / 2) * width for place in range(len(sets))]
            panel.bar(places, [mine.get(name, 0.0) for name in sets], width * 0.95, label=arm)
        panel.set_xticks(range(len(sets)), sets)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_title(f"T = {temperature:g}")
    panels[0][0].set_ylabel("tokens a round")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="checkpoint of a draft head")
    parser.add_argument("--work", type=Path, required=True, help="folder for the calls as they end")
    parser.add_argument("--out", type=Path, help="folder for the CSV and the plot; none are written without it")
    parser.add_argument("--name", default="sources", help="of those files")
    parser.add_argument(
        "--sources", type=lambda text: text.split(","), default=["plain", "ngram", "head", "head+ngram"]
    )
    parser.add_argument("--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=40, help="of each set")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    if options.draft is None and any("head" in source.split("+") for source in options.sources):
        parser.error("--sources names head: pass its checkpoint as --draft")
    progress_bars_on_terminals_only()
    # A process may wait for a slower one for longer than half an hour, the default.
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=30))
    told = {name: getattr(options, name) for name in ("sources", "new_tokens", "nodes", "dtype")}
    told["draft"] = None if options.draft is None else str(options.draft)
    try:
        if state.is_main_process:
            claim(options.work, hashlib.sha256(json.dumps(told).encode()).hexdigest(), told, fresh=False)
        state.wait_for_everyone()
        run(options, state)
        state.wait_for_everyone()
        records = list(read_shards(options.work).values())
    except (OtherRunError, BrokenRunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not state.is_main_process:
        return 0
    rows = summary(records)
    if options.out is not None:
        facts = machine_facts(model="SmolLM2-135M-Instruct", dtype=options.dtype, nodes=options.nodes)
        write_table(options.out / f"{options.name}.csv", rows, facts)
        plot(rows, options.out / f"{options.name}.png")
    for row in rows:
        print(" ".join(f"{key}={value}" for key, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
