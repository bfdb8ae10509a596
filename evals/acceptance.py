"""How much each rule of verification accepts on a real pair of models, against the optimum of its own draws.

    python evals/acceptance.py --data DIR [--draft drop:16-22] [--out evals/results]

DIR holds HumanEval.jsonl.gz, gsm8k_test.jsonl and mt_bench.jsonl. The target is SmolLM2-135M-Instruct in float32, the
draft the target without some of its layers, or another of evals/drafts.py. *Nodes*: contexts of text that the target
has sampled; per temperature and number of children what a rule accepts there, and the bound for its draws
(evals/optima.py). *Trees*: the tokens that whole rounds of generate() accept, and what they accept in the mean over
the coins; at temperature 0, where every rule is the coupled one, greedily.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

import optima
from bars import SETS, encode, read_prompts
from drafts import make_draft
from expected import SettingsError
from hf_treespec import TreeConfig, enable
from real_model import load_smollm2
from tables import machine_facts, write_table

TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.5, 2.0)
CHILDREN = (1, 2, 4, 8)
NEW_TOKENS = 48
SEED = 1
# Draws of the noise, and of rejected children, behind the two figures that have no closed form.
NOISE_DRAWS, CHILD_DRAWS = 64, 20
RULES = ("coupled", "naive", "rrs", "kseq", "rrsw", "traversal", "block", "hybrid", "hybrid-joint")


@torch.no_grad()
def contexts(
    target: Any, draft: Any, tokenizer: Any, data: Path, prompts: int, each: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Raw logits of target and draft at contexts of text that the target has sampled at temperature 1."""
    torch.manual_seed(SEED)
    for name in SETS:
        for text, chat in read_prompts(data, name, prompts):
            inputs = encode(tokenizer, text, chat)
            width = inputs["input_ids"].shape[1]
            whole = target.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=NEW_TOKENS)
            logits = [model(whole).logits[0, width - 1 : -1].double() for model in (target, draft)]
            places = torch.linspace(0, len(logits[0]) - 1, each).round().long().unique()
            yield from zip(logits[0][places], logits[1][places], strict=True)


def law(logits_V: Tensor, temperature: float) -> Tensor:
    return (logits_V / temperature).softmax(-1)


def at_zero(target_V: Tensor, draft_V: Tensor) -> Iterator[tuple[str, int, float, float]]:
    """Greedy decoding: every rule accepts if the target's token is among the children."""
    rank = int((draft_V > draft_V[target_V.argmax()]).sum())
    for k in CHILDREN:
        for rule in ("coupled", "naive", "rrsw", "hybrid", "hybrid-2"):
            yield rule, k, float(rank < k), float(rank < k)


def at_node(p: Tensor, q: Tensor, dice: torch.Generator) -> Iterator[tuple[str, int, float, float]]:
    """(rule, k, accepted, optimum of its draws)."""
    coupled = optima.accepted_coupled(p, q, CHILDREN, NOISE_DRAWS, dice)
    bounds = optima.optimum_distinct(p, q, CHILDREN)
    for place, (k, distinct) in enumerate(zip(CHILDREN, bounds, strict=True)):
        iid = optima.optimum_iid(p, q, k)
        top = optima.accepted_top(p, q, k)
        yield "coupled", k, coupled[place], distinct
        yield "naive", k, top, top
        yield "rrs", k, optima.accepted_rrs(p, q, k), iid
        yield "kseq", k, optima.accepted_kseq(p, q, k), iid
        yield "rrsw", k, optima.accepted_in_turn(p, q, k, k, CHILD_DRAWS, dice), distinct
        hybrid = optima.accepted_in_turn(p, q, k, 1, 1, dice)
        yield "hybrid", k, hybrid, optima.optimum_hybrid(p, q, k, 1)
        if k > 1:
            accepted = optima.accepted_in_turn(p, q, k, 2, CHILD_DRAWS, dice)
            yield "hybrid-2", k, accepted, optima.optimum_hybrid(p, q, k, 2)


def nodes_part(
    target: Any, draft: Any, tokenizer: Any, data: Path, prompts: int, each: int
) -> Iterator[list[dict[str, Any]]]:
    """Single nodes of text; all rows at once."""
    found: dict[tuple[float, str, int], list[tuple[float, float]]] = defaultdict(list)
    apart: dict[float, list[float]] = defaultdict(list)
    dice = torch.Generator().manual_seed(SEED)
    for place, (target_V, draft_V) in enumerate(contexts(target, draft, tokenizer, data, prompts, each)):
        for temperature in TEMPERATURES:
            if temperature:
                p, q = law(target_V, temperature), law(draft_V, temperature)
                apart[temperature].append(float((p - q).abs().sum()) / 2)
                rows = at_node(p, q, dice)
            else:
                apart[0.0].append(float(target_V.argmax() != draft_V.argmax()))
                rows = at_zero(target_V, draft_V)
            for rule, k, accepted, optimum in rows:
                found[temperature, rule, k].append((accepted, optimum))
        print(f"node {place + 1}", file=sys.stderr, end="\r")
    out = []
    for (temperature, rule, k), values in sorted(found.items()):
        accepted, optimum = (mean(column) for column in zip(*values, strict=True))
        spread = stdev(a for a, _ in values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        out.append(
            {
                "temperature": temperature,
                "rule": rule,
                "children": k,
                "nodes": len(values),
                "accepted": round(accepted, 4),
                "standard_error": round(spread, 4),
                "optimum": round(optimum, 4),
                "of_optimum": round(accepted / optimum, 4) if optimum else 1.0,
                "total_variation": round(mean(apart[temperature]), 4),
            }  # fmt: skip
        )
    yield out


def trees_part(target: Any, draft: Any, tokenizer: Any, data: Path, prompts: int) -> Iterator[list[dict[str, Any]]]:
    """Whole rounds of generate(), 12 nodes, depth up to 4; all rows so far whenever there is another one."""
    out: list[dict[str, Any]] = []
    texts = [(text, chat) for name in SETS for text, chat in read_prompts(data, name, prompts)]
    for temperature in TEMPERATURES:
        for rule in RULES if temperature else ("coupled",):
            config = TreeConfig(
                max_nodes=12,
                max_depth=4,
                max_children=4,
                growth="static",
                verification=rule,
                fallback="off",
                seed=SEED,
            )
            how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
            each: list[tuple[int, int, float]] = []
            for text, chat in texts:
                target.generate(
                    **encode(tokenizer, text, chat), **how, max_new_tokens=NEW_TOKENS, assistant_model=draft,
                    tree_config=config,
                )  # fmt: skip
                stats = target.treespec_stats
                each.append((stats.row_rounds, stats.accepted_tokens, stats.expected_accepted))
            out.append(tree_row(temperature, rule, each))
            print(out[-1], file=sys.stderr)
            yield out


def tree_row(temperature: float, rule: str, each: list[tuple[int, int, float]]) -> dict[str, Any]:
    """What rounds of all texts accept; `each` has (rounds, accepted, expected over the coins) of a text.

    The coupled rule throws no coins. Standard errors are those of a ratio of sums over texts.
    """
    rounds, accepted, expected = (sum(column) for column in zip(*each, strict=True))

    def error(column: int) -> float:
        ratio = sum(one[column] for one in each) / rounds
        apart = [one[column] - ratio * one[0] for one in each]
        return math.sqrt(math.fsum(x * x for x in apart) * len(each) / max(1, len(each) - 1)) / rounds

    coins = rule != "coupled"
    return {
        "temperature": temperature,
        "rule": rule,
        "rounds": rounds,
        "accepted_a_round": round(accepted / rounds, 3),
        "standard_error": round(error(1), 3),
        "expected_a_round": round(expected / rounds, 3) if coins else "",
        "expected_error": round(error(2), 3) if coins else "",
    }


def plot_trees(rows: list[dict[str, Any]], path: Path) -> None:
    """Accepted tokens of a round against temperature, from the rows of the CSV alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 4))
    greedy = [row for row in rows if not row["temperature"]]
    for rule in RULES:
        # Greedily every rule is the coupled one.
        mine = greedy + [row for row in rows if row["rule"] == rule and row["temperature"]]
        values = [
            row["expected_a_round"] if row["expected_a_round"] != "" else row["accepted_a_round"] for row in mine
        ]
        axes.plot([row["temperature"] for row in mine], values, marker="o", label=rule)
    axes.set_xlabel("temperature")
    axes.set_ylabel("tokens accepted in a round of 12 nodes")
    axes.legend(fontsize=8, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_nodes(rows: list[dict[str, Any]], path: Path) -> None:
    """Acceptance against temperature, for one and four children, from the rows of the CSV alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axes, k in zip(panels, (1, 4), strict=True):
        for rule in ("coupled", "rrsw", "hybrid", "kseq", "naive"):
            mine = [row for row in rows if row["rule"] == rule and row["children"] == k]
            axes.plot([r["temperature"] for r in mine], [r["accepted"] for r in mine], marker="o", label=rule)
        axes.set_title(f"{k} {'child' if k == 1 else 'children'}")
        axes.set_xlabel("temperature")
    panels[0].set_ylabel("accepted at a node")
    panels[1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--draft", default="drop:16-22", help="see evals/drafts.py")
    parser.add_argument("--prompts", type=int, default=12, help="prompts of each set")
    parser.add_argument("--positions", type=int, default=3, help="contexts of each text")
    parser.add_argument("--parts", default="nodes,trees")
    arguments = parser.parse_args()
    parts = set(arguments.parts.split(","))
    if not parts <= {"nodes", "trees"}:
        parser.error(f"--parts {arguments.parts}: expected nodes, trees or both, with a comma between")
    if missing := [name for name, _, _ in SETS.values() if not (arguments.data / name).is_file()]:
        parser.error(f"--data {arguments.data}: {', '.join(missing)} not there")
    for name in ("prompts", "positions"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: expected at least 1")
    target, tokenizer = load_smollm2()
    try:
        draft = make_draft(arguments.draft, target, SEED)
    except SettingsError as error:
        parser.error(f"--draft {arguments.draft}: {error}")
    if draft is None:
        parser.error(f"--draft {arguments.draft}: expected a model, whose law can be compared")
    target = enable(target)
    machine = machine_facts(model="SmolLM2-135M-Instruct", draft=arguments.draft, dtype="float32")
    tasks: dict[str, Callable[[], Iterator[list[dict[str, Any]]]]] = {
        "nodes": lambda: nodes_part(target, draft, tokenizer, arguments.data, arguments.prompts, arguments.positions),
        "trees": lambda: trees_part(target, draft, tokenizer, arguments.data, max(1, arguments.prompts // 6)),
    }
    for name in sorted(parts):
        for rows in tasks[name]():
            write_table(arguments.out / f"acceptance-{name}.csv", rows, machine)
        (plot_nodes if name == "nodes" else plot_trees)(rows, arguments.out / f"acceptance-{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
