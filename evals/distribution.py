"""Does the text follow the target's law? The verdict on real texts, on your own model.

    python evals/distribution.py --config configs/evals/smollm2.yaml
    python evals/distribution.py --config configs/evals/smollm2.yaml --inject M07
    python evals/distribution.py --config configs/evals/smollm2-bugs.yaml --inject all
    accelerate launch --num_processes 2 evals/distribution.py --config configs/evals/smollm2.yaml
    torchrun --nproc-per-node 2 evals/distribution.py --config configs/evals/smollm2.yaml

Texts are generated under every rule, and the target reads each of them once more: its conditional laws are the null
hypothesis, so no reference samples are needed. docs/lossless.md says what is tested and what the verdict means.

Writes shards (a line for each finished unit), results.json, results.csv and results.png into --out. --inject all, or
several bugs with commas between, do so for each bug in a folder of its name, with more prompts until it is caught, and
write injected.csv beside them. A killed run goes on where it was when it is started again, a finished one goes on with
more prompts if --limit is larger; processes share the prompts among themselves.

Exit codes: 0 everything as it should be: lossless rules pass, and what is known to be wrong (--inject, typical-lossy)
is caught; 1 a rule that claims to be lossless fails; 2 bad settings, or a folder of another run; 3 something wrong was
not caught, or too little was tested; 4 an unexpected error. Launchers of several processes make 1 of each but 0.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import hf_treespec
from drafts import load_target
from expected import SettingsError
from hf_treespec.train import BrokenRunError, OtherRunError, ShardWriter, claim, read_shards
from injection import as_table, bugs_named, inject_each
from promptsource import Prompt, PromptSource
from real_model import RealModelError, progress_bars_on_terminals_only
from settings import FREE, Arm, Settings
from tables import machine_facts, write_table
from units import Bench, flaw
from verdict import Verdict, judge

__all__ = ["main"]

RESULTS = ("results.json", "results.csv", "results.png")
UNEXPECTED = 4
# For how long a process waits for one that is slower; without it, half an hour on CPUs, ten minutes on GPUs.
PATIENCE = timedelta(days=30)


def units(settings: Settings, prompts: Iterator[Prompt]) -> Iterator[tuple[str, str, Arm, Prompt]]:
    """All units as (key, kind, arm, prompt), prompt by prompt."""
    for prompt in prompts:
        for arm in settings.arms():
            yield f"{prompt.index:06d} text {arm.name}", "text", arm, prompt
        if prompt.index < settings.of_joint("prompts"):
            for arm in [*settings.arms(), *settings.stock_arms()]:
                yield f"{prompt.index:06d} joint {arm.name}", "joint", arm, prompt


def work(bench: Bench, tokenizer: Any, folder: Path, state: Any, *, quiet: bool) -> dict[int, str]:
    """Do this process's share of the units that are not done yet.

    Returns:
        The digests of all prompts, by their places.
    """
    settings = bench.settings
    source = PromptSource.of(settings.prompts)
    done = read_shards(folder, flaw)
    if state.is_main_process and (told := ready(settings, source.limit, done)):
        print(f"{folder}: {told}", file=sys.stderr)
    checked: set[tuple[Any, ...]] = set()
    digests: dict[int, str] = {}

    def mine() -> Iterator[Prompt]:
        for prompt in source.prompts(tokenizer):
            if not 0 <= min(prompt.ids) <= max(prompt.ids) < bench.readable:
                raise SettingsError(f"prompts: row {prompt.index}: the model reads ids from 0 to {bench.readable - 1}")
            digests[prompt.index] = prompt.digest
            if prompt.index % state.num_processes == state.process_index:
                yield prompt

    with writing(folder):
        writer = ShardWriter(folder, state.process_index)
    with writer as out:
        for key, kind, arm, prompt in units(settings, mine()):
            if key in done:
                if done[key].get("digest") != prompt.digest:
                    raise OtherRunError(f"{folder}: prompt {prompt.index} is another one now")
                continue
            if (shaping := tuple(arm.sampling.values())) not in checked:
                bench.check_null(arm, prompt)
                checked.add(shaping)
            found = bench.text(arm, prompt) if kind == "text" else bench.joint(arm, prompt)
            told = {"key": key, "kind": kind, "arm": arm.name, "prompt": prompt.index, "digest": prompt.digest}
            out.write({**told, **found})
            if not quiet:
                print(f"[{state.process_index}] {key}", file=sys.stderr, flush=True)
    if not digests:
        raise SettingsError("prompts: there are none")
    return digests


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Names the folder where the disk refuses.

    Raises:
        SettingsError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise SettingsError(f"--out: {folder}: {error}") from error


def ready(settings: Settings, limit: int, done: Mapping[str, Mapping[str, Any]]) -> str:
    """How much of a run an earlier one has left, in words; "" if nothing."""
    found = sum(1 for record in done.values() if not limit or record["prompt"] < limit)
    if not found:
        return ""
    arms, joints = len(settings.arms()), min(limit, settings.of_joint("prompts"))
    units_of = limit * arms + joints * (arms + len(settings.stock_arms()))
    return f"goes on with an earlier run: {found} units are done" + (f", of {units_of} at most" if limit else "")


def run(settings: Settings, folder: Path, state: Any, *, fresh: bool, quiet: bool) -> Verdict:
    """Run, or go on, judge all that the settings ask for, and write what was found."""
    source = PromptSource.of(settings.prompts)
    target, tokenizer = load_target(settings.model, settings.dtype)
    bench = Bench(settings, target.to(state.device))
    made_with = bench.made_with()
    if state.is_main_process:
        about = {**asdict(settings), **made_with}
        claim(folder, settings.fingerprint(source.digest(), made_with), about, fresh=fresh, free=FREE)
        if fresh:
            with writing(folder):
                for name in RESULTS:
                    (folder / name).unlink(missing_ok=True)
    state.wait_for_everyone()
    with warnings.catch_warnings():
        # That a lossy rule is lossy is what a run is about.
        warnings.simplefilter("ignore", hf_treespec.TreeSpecWarning)
        prompts = work(bench, tokenizer, folder, state, quiet=quiet)
    state.wait_for_everyone()
    # An earlier run of the folder may have gone further, or over prompts that are there no more.
    every = read_shards(folder, flaw).values()
    verdict = judge(settings, [one for one in every if prompts.get(one["prompt"]) == one["digest"]])
    if verdict.rows and state.is_main_process:
        with writing(folder):
            write_results(folder, settings, verdict)
    return verdict


def run_bugs(
    settings: Settings, bugs: Sequence[str], folder: Path, state: Any, *, fresh: bool, quiet: bool
) -> tuple[str, int]:
    """Bugs in turn, each in a folder of its name; what was found, and the exit code."""
    begun: set[str] = set()

    def one(told: Settings) -> Verdict:
        first = told.inject not in begun
        begun.add(told.inject)
        verdict = run(told, folder / told.inject, state, fresh=fresh and first, quiet=quiet)
        if state.is_main_process and not quiet:
            print(verdict.line, file=sys.stderr, flush=True)
        return verdict

    facts = {name: getattr(settings, name) for name in ("model", "dtype", "seed", "family")}
    rows = []
    for row in inject_each(settings, bugs, one):
        rows.append(row)
        if state.is_main_process:
            with writing(folder):
                write_table(folder / "injected.csv", rows, machine_facts(**facts))
    return as_table(rows, bugs)


def write_results(folder: Path, settings: Settings, verdict: Verdict) -> None:
    """results.json, results.csv and results.png."""
    machine = machine_facts()
    told = {
        "verdict": verdict.line,
        "code": verdict.code,
        "arms": verdict.arms,
        "settings": asdict(settings),
        **machine,
    }
    (folder / "results.json").write_text(json.dumps(told, indent=2, default=list) + "\n")
    write_table(folder / "results.csv", verdict.rows, {**machine, "model": settings.model, "seed": settings.seed})
    plot(folder / "results.csv", folder / "results.png")


def plot(table: Path, picture: Path) -> None:
    """p-values of all tests, arm by arm, from the CSV alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with open(table, newline="") as file:
        rows: list[Mapping[str, str]] = list(csv.DictReader(file))
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.3 * len(arms)))
    for test in dict.fromkeys(row["test"] for row in rows):
        mine = [row for row in rows if row["test"] == test]
        axes.scatter(
            [max(float(row["p"]), 1e-20) for row in mine], [arms.index(row["arm"]) for row in mine], s=16, label=test
        )
    for fallen in (row for row in rows if row["rejected"] == "True"):
        axes.scatter(
            max(float(fallen["p"]), 1e-20), arms.index(fallen["arm"]), s=70, facecolors="none", edgecolors="red"
        )
    axes.set_xscale("log")
    axes.set_yticks(range(len(arms)), arms, fontsize=7)
    axes.set_xlabel("p-value (red: rejected)")
    axes.legend(fontsize=6, ncols=2, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="settings in YAML, see evals/settings.py")
    parser.add_argument("--out", type=Path, help="folder of the results; default evals/results/distribution")
    parser.add_argument(
        "--inject", help="run with a known bug: M01 to M25, see evals/mutants.py; several with commas between, or all"
    )
    parser.add_argument(
        "--rules", type=lambda text: [one.strip() for one in text.split(",")], help="rules, with commas between"
    )
    parser.add_argument("--limit", type=int, help="prompts")
    parser.add_argument("--new-tokens", type=int, help="of a text, at most")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--fresh", action="store_true", help="drop what an earlier run left in --out")
    parser.add_argument("--quiet", action="store_true", help="no line for each unit")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, or go on, and judge; returns the exit code."""
    told = parse(arguments)
    progress_bars_on_terminals_only()
    from accelerate import PartialState

    # Without this, accelerate takes processes on CPUs for one process each.
    asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    state = PartialState(cpu=asked or not torch.accelerator.is_available(), timeout=PATIENCE)
    if state.num_processes == 1 and "MASTER_ADDR" in os.environ:
        print(
            "accelerate started one process: on CPUs it starts several through MPI only; "
            "torchrun --nproc-per-node 2 does without",
            file=sys.stderr,
        )
    try:
        changes = {name: getattr(told, name) for name in ("inject", "rules", "new_tokens", "seed")}
        bugs = bugs_named(told.inject) if told.inject is not None else []
        several = len(bugs) > 1
        settings = Settings.read(told.config, {**changes, "inject": bugs[0] if len(bugs) == 1 else None})
        if told.limit is not None:
            settings = replace(settings, prompts={**settings.prompts, "limit": told.limit})
        PromptSource.of(settings.prompts)
        folder = told.out or Path("evals/results/distribution", settings.inject)
        how = {"fresh": told.fresh, "quiet": told.quiet}
        if several:
            line, code = run_bugs(settings, bugs, folder, state, **how)
        else:
            verdict = run(settings, folder, state, **how)
            line, code = verdict.line, verdict.code
    except (SettingsError, OtherRunError, BrokenRunError, RealModelError, hf_treespec.TreeSpecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception:
        # 1 would say that a lossless rule fails.
        traceback.print_exc()
        return UNEXPECTED
    if not state.is_main_process:
        return 0
    print(line)
    return code


if __name__ == "__main__":
    sys.exit(main())
