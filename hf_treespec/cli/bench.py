"""`treespec bench`: trees against plain decoding and against what transformers has, in interleaved rounds."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_treespec.cli.faults import UsageFault, faults_reported, one_line
from hf_treespec.cli.options import (
    AttnOption,
    ChatOption,
    DeviceOption,
    DraftModelOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    TemperatureOption,
    read_config,
    sampling_arguments,
    to_json,
)

if TYPE_CHECKING:
    from torch import Tensor

    from hf_treespec.cli.measure import Bench
    from hf_treespec.cli.promptsets import PromptSet
    from hf_treespec.cli.rows import Row
    from hf_treespec.config import TreeConfig

__all__ = ["bench"]

SCHEMA_VERSION = 1


def bench(
    model: ModelArgument,
    sets: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="NAME=SOURCE",
            help="Prompts: a .jsonl or .jsonl.gz file with a field prompt, question or turns, or "
            "hf:DATASET:CONFIG:SPLIT:FIELD. Repeatable.",
        ),
    ],
    draft_model: DraftModelOption = None,
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", help="A TreeConfig to measure, as JSON or YAML. Repeatable. Default: the defaults."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Prompts of each set.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=2, help="Length limit.")] = 128,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="How often every prompt is run.")] = 3,
    temperature: TemperatureOption = 0.0,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Untimed runs of each method.")] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, max=(1 << 62), help="Of sampling.")] = 0,
    chat: ChatOption = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Where the measurements go, one row a call.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="A PNG, drawn from the --csv file.")] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    attn: AttnOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure plain decoding, prompt lookup, assisted generation and trees on the same prompts, in turn.

    Tokens a round are (new tokens - 1) / (target forwards - 1), counted alike for all. The speed-up is the ratio of
    total seconds, with a 95 % interval over prompts. Texts are compared token by token.
    """
    with faults_reported():
        settings = {
            "sets": sets,
            "limit": limit,
            "max_new_tokens": max_new_tokens,
            "repeats": repeats,
            "temperature": temperature,
            "warmup": warmup,
            "seed": seed,
        }
        _check_outputs(csv, plot)
        arguments = {"max_new_tokens": max_new_tokens, **sampling_arguments(temperature)}
        configs = _read_configs(config or [], has_draft=draft_model is not None)
        prompt_sets = _read_sets(sets, limit)
        load = {"dtype": dtype, "device": device, "attention": attn}
        runner, prompts = _prepare(model, draft_model, configs, prompt_sets, arguments, settings, load, chat)
        rows = _measure(runner, prompts, settings, csv)
        if csv is not None and plot is not None:
            from hf_treespec.cli.plot import plot_from_csv

            plot_from_csv(csv, plot)
    typer.echo(_report(rows, settings, as_json))


def _check_outputs(csv: Path | None, plot: Path | None) -> None:
    """Before an hour of measuring, not after it."""
    for argument, path in (("--csv", csv), ("--plot", plot)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UsageFault(argument, f"{path}: expected a file in a folder that exists")
    if plot is None:
        return
    if csv is None:
        raise UsageFault("--plot", "is drawn from the file of --csv; give that too")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageFault("--plot", "needs matplotlib: pip install -e '.[cli]' in the checkout") from error


def _read_configs(paths: list[Path], *, has_draft: bool) -> dict[str, TreeConfig]:
    """Configs by the name of their method."""
    from hf_treespec.config import TreeConfig

    if not paths:
        return {"treespec": TreeConfig()}
    configs: dict[str, TreeConfig] = {}
    for path in paths:
        config = read_config(path)
        if config.with_model and not has_draft:
            raise UsageFault(f"--config {path}", f"draft={config.draft!r} needs --draft-model")
        # A folder's config has the same file name as any other's.
        name = f"treespec:{path.name if path.is_dir() else path.stem}"
        if name in configs:
            raise UsageFault(f"--config {path}", f"a second config called {name!r}; rename the file")
        configs[name] = config
    return configs


def _read_sets(specs: list[str], limit: int | None) -> list[PromptSet]:
    from hf_treespec.cli.promptsets import load_set

    sets: dict[str, PromptSet] = {}
    for spec in specs:
        loaded = load_set(spec, limit)
        if loaded.name in sets:
            raise UsageFault(f"--set {spec}", f"a second set called {loaded.name!r}")
        sets[loaded.name] = loaded
    return list(sets.values())


def _prepare(
    name: str,
    draft_name: str | None,
    configs: dict[str, TreeConfig],
    sets: list[PromptSet],
    arguments: dict[str, Any],
    settings: dict[str, Any],
    load: dict[str, Any],
    chat: bool | None,
) -> tuple[Bench, dict[str, list[dict[str, Tensor]]]]:
    import transformers

    import hf_treespec
    from hf_treespec.api.draft_support import draft_support
    from hf_treespec.api.heads import is_head
    from hf_treespec.cli.environment import hardware_of
    from hf_treespec.cli.measure import Bench, make_methods
    from hf_treespec.cli.models import LoadOptions, encode, load_drafter, load_model, load_tokenizer, pad_arguments

    import torch  # isort: skip

    options = LoadOptions(**load)
    tokenizer = load_tokenizer(name, "MODEL")
    prompts = {
        one.name: [
            encode(tokenizer, text, chat=one.chat if chat is None else chat, argument=f"--set {one.name}")
            for text in one.prompts
        ]
        for one in sets
    }
    model = hf_treespec.enable(load_model(name, "MODEL", options))
    draft = load_drafter(draft_name, options) if draft_name is not None else None
    # What reads states of the target has its own checks, in the call.
    reader = draft if isinstance(draft, transformers.PreTrainedModel) and not is_head(draft) else None
    if reader is not None:
        if not (support := draft_support(reader)).ok:
            raise UsageFault("--draft-model", f"{draft_name} cannot take a tree: {support.reason}")
        if len({one.config.get_text_config().vocab_size for one in (model, reader)}) > 1:
            raise UsageFault(
                "--draft-model", f"{draft_name} has another vocabulary size, which assisted decoding refuses"
            )
    constants = {
        "temperature": settings["temperature"],
        "max_new_tokens": settings["max_new_tokens"],
        "model": name,
        "draft_model": draft_name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "hardware": hardware_of(model.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_treespec": hf_treespec.__version__,
    }
    methods = make_methods(configs, has_draft=draft is not None, sampled=settings["temperature"] > 0)
    if not isinstance(draft, transformers.PreTrainedModel):
        # Assisted decoding of transformers knows no draft heads.
        methods = [method for method in methods if method.name != "assisted"]
    runner = Bench(
        model=model,
        draft=draft,
        methods=methods,
        arguments={**arguments, **pad_arguments(tokenizer)},
        seed=settings["seed"],
        constants=constants,
    )
    return runner, prompts


def _measure(
    runner: Bench, prompts: dict[str, list[dict[str, Tensor]]], settings: dict[str, Any], csv: Path | None
) -> list[Row]:
    from hf_treespec._compat import quiet_transformers
    from hf_treespec.cli.progress import progress_bar
    from hf_treespec.cli.rows import RowWriter

    rows: list[Row] = []
    calls = len(runner.methods) * (
        settings["warmup"] + settings["repeats"] * sum(len(inputs) for inputs in prompts.values())
    )
    with ExitStack() as stack:
        writer = None
        if csv is not None:
            try:
                writer = RowWriter(stack.enter_context(csv.open("w", newline="", encoding="utf-8")))
            except OSError as error:
                raise UsageFault("--csv", f"{csv} cannot be written: {one_line(error)}") from error
        bar = stack.enter_context(progress_bar(calls, "bench"))
        stack.enter_context(quiet_transformers())
        first = next(iter(prompts.values()))[0]
        for _ in range(settings["warmup"]):
            runner.warm_up(first, bar.update)
        for name, inputs in prompts.items():
            for block in runner.rounds(name, inputs, settings["repeats"], bar.update):
                rows.extend(block)
                if writer is not None:
                    writer.write(block)
    return rows


def _report(rows: list[Row], settings: dict[str, Any], as_json: bool) -> str:
    from hf_treespec.cli.environment import describe_environment
    from hf_treespec.cli.measure import counting_seconds
    from hf_treespec.cli.summary import DEFINITIONS, summarise, table

    summaries = summarise(rows)
    if not as_json:
        return table(summaries, sampled=settings["temperature"] > 0)
    constants = {
        name: getattr(rows[0], name) for name in ("model", "draft_model", "dtype", "device", "hardware", "threads")
    }
    return to_json(
        {
            "schema_version": SCHEMA_VERSION,
            **constants,
            "settings": settings,
            "environment": describe_environment(),
            "definitions": DEFINITIONS,
            "counting_seconds_per_forward": counting_seconds(),
            "results": [summary.to_dict() for summary in summaries],
        }
    )
