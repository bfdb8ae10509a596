"""`treespec calibrate`: what rounds cost on this machine, and the tree sizes that pay."""

from __future__ import annotations

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
    config_with,
    read_config,
    sampling_arguments,
    to_json,
)

if TYPE_CHECKING:
    from hf_treespec.api.calibration import Calibration

__all__ = ["calibrate"]


def calibrate(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("--out", help="Folder for the config, its provenance, tables and a plot.")],
    draft_model: DraftModelOption = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=FILE", help="Prompts, as for bench; may be given again. None: costs only."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="A TreeConfig as JSON or YAML that says how to draft.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Prompts of each set.")] = 8,
    max_nodes: Annotated[int, typer.Option("--max-nodes", help="The largest tree.")] = 64,
    context: Annotated[
        list[int] | None, typer.Option("--context", help="Tokens of a text. Repeatable. Default: 128 and 1024.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option("--batch", help="Rows. Repeatable. Default: 1.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Rounds of each size.")] = 5,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=2, help="Tokens of each prompt's text.")] = 64,
    temperature: TemperatureOption = 0.0,
    chat: ChatOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    attn: AttnOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what rounds cost by tree size, keep it for later calls, and write the config that pays on the prompts.

    Calls of generate begin from what is kept (in $HF_TREESPEC_CACHE, or ~/.cache/hf_treespec) instead of timing their
    first rounds.
    """
    with faults_reported():
        found, files = _calibrate(
            model,
            out,
            draft_name=draft_model,
            sets=sets or [],
            config_path=config,
            limit=limit,
            measure={
                "max_nodes": max_nodes,
                "contexts": tuple(context or (128, 1024)),
                "batches": tuple(batch or (1,)),
                "repeats": repeats,
                "max_new_tokens": max_new_tokens,
            },
            sampling=sampling_arguments(temperature),
            chat=chat,
            load={"dtype": dtype, "device": device, "attention": attn},
        )
        typer.echo(to_json(_facts(found, files)) if as_json else _told(found, out))


def _calibrate(
    name: str,
    out: Path,
    *,
    draft_name: str | None,
    sets: list[str],
    config_path: Path | None,
    limit: int,
    measure: dict[str, Any],
    sampling: dict[str, Any],
    chat: bool | None,
    load: dict[str, Any],
) -> tuple[Calibration, list[Path]]:
    _check_out(out)
    if draft_name is not None and not sets:
        raise UsageFault("--draft-model", "is judged on prompts; give --set as well")

    import hf_treespec
    from hf_treespec import TreeConfig, TreeConfigError
    from hf_treespec.cli.calibration_plot import plot_calibration
    from hf_treespec.cli.models import (
        LoadOptions,
        encode_sets,
        load_drafter,
        load_model,
        load_tokenizer,
        pad_arguments,
    )
    from hf_treespec.cli.progress import progress_bar
    from hf_treespec.cli.promptsets import load_set

    tree = read_config(config_path) if config_path else TreeConfig()
    tree = config_with(tree, {"max_nodes": measure["max_nodes"]})
    if tree.with_model and draft_name is None:
        raise UsageFault("--config", f"draft={tree.draft!r} needs --draft-model")
    options = LoadOptions(**load)
    prompts = [load_set(spec, limit) for spec in sets]
    tokenizer = load_tokenizer(name, "MODEL") if prompts else None
    inputs = [] if tokenizer is None else encode_sets(tokenizer, prompts, chat)
    model = load_model(name, "MODEL", options)
    draft = load_drafter(draft_name, options) if draft_name else None
    pad: dict[str, Any] = {} if tokenizer is None else pad_arguments(tokenizer)
    steps = len(measure["contexts"]) * len(measure["batches"]) + len(inputs)
    with progress_bar(steps, "calibrate") as bar:

        def report(step: str) -> None:
            bar.set_postfix_str(step)
            bar.update()

        try:
            found = hf_treespec.calibrate(
                model,
                prompts=[{key: value.to(model.device) for key, value in one.items()} for one in inputs],
                draft_model=draft,
                tree_config=tree,
                report=report,
                **measure,
                **sampling,
                **pad,
            )
        except TreeConfigError as error:
            raise UsageFault(_option_of(str(error)), one_line(error)) from error
    try:
        files = found.save(out)
        files.append(plot_calibration(out, f"{name}, {found.setting.dtype}, {found.setting.device}, {found.measured}"))
    except OSError as error:
        raise UsageFault("--out", f"{out} cannot be written: {one_line(error)}") from error
    return found, files


def _check_out(out: Path) -> None:
    """Before minutes of measuring, not after them."""
    if out.exists() and not out.is_dir():
        raise UsageFault("--out", f"{out}: expected a folder")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageFault("--out", "the plot needs matplotlib: pip install -e '.[cli]' in the checkout") from error


def _option_of(message: str) -> str:
    """The option behind an argument that `hf_treespec.calibrate` names."""
    options = {"max_nodes": "--max-nodes", "repeats": "--repeats", "contexts": "--context", "batches": "--batch"}
    named = message.removeprefix("calibrate(").partition("=")[0]
    return options.get(named, "--config")


def _facts(found: Calibration, files: list[Path]) -> dict[str, Any]:
    return {
        "files": [str(path) for path in files],
        "costs": [
            {"batch": one.batch, "context": one.context, "nodes": one.nodes, "seconds": one.median}
            for one in found.timings
        ],
        "levels": {str(level): seconds for level, seconds in found.levels.items()},
        "acceptance": found.acceptance(),
        "config": None if found.config is None else found.config.to_dict(),
        "gain": found.gain,
    }


def _told(found: Calibration, out: Path) -> str:
    places = dict.fromkeys((one.batch, one.context) for one in found.timings)
    lines = []
    for batch, context in places:
        target = found.target(batch, context)
        costs = ", ".join(f"{nodes}: {1000 * seconds:.1f}" for nodes, seconds in target.items())
        lines.append(f"batch {batch}, context {context}: milliseconds by nodes {costs}")
    if found.config is None:
        return "\n".join([*lines, f"{out}: costs only; --set gives prompts to judge a draft on"])
    if not found.config.max_nodes:
        return "\n".join([*lines, f"{out}: no tree of this draft pays here; the config decodes plainly"])
    sizes = f"max_nodes {found.config.max_nodes}, max_depth {found.config.max_depth}"
    return "\n".join([*lines, f"{out}: {sizes}, about {found.gain:.2f} times plain"])
