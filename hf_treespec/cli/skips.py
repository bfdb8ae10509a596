"""`treespec skips`: layers that a model can draft without, searched on prompts, as a tree config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_treespec.cli.faults import UsageFault, faults_reported, one_line
from hf_treespec.cli.options import (
    AttnOption,
    ChatOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    config_with,
    to_json,
)

__all__ = ["skips"]


def skips(
    model: ModelArgument,
    sets: Annotated[
        list[str], typer.Option("--set", metavar="NAME=FILE", help="Prompts, as for bench; may be given again.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The tree config to write: .json or .yaml.")],
    limit: Annotated[int, typer.Option("--limit", min=1, help="Prompts of each set.")] = 4,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Sets of layers to try.")] = 60,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=2, help="Tokens of each text.")] = 48,
    max_nodes: Annotated[int | None, typer.Option("--max-nodes", help="Drafted nodes a tree.")] = None,
    max_depth: Annotated[int | None, typer.Option("--max-depth", help="Largest depth to consider.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the search.")] = 0,
    chat: ChatOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    attn: AttnOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find layers to skip in drafts of the model itself, and write the config to generate with."""
    with faults_reported():
        facts = _skips(
            model,
            sets,
            out,
            limit=limit,
            chat=chat,
            load={"dtype": dtype, "device": device, "attention": attn},
            sizes={"max_nodes": max_nodes, "max_depth": max_depth},
            search={"trials": trials, "max_new_tokens": max_new_tokens, "seed": seed},
        )
        if as_json:
            typer.echo(to_json(facts))
        else:
            typer.echo(
                f"{out}: skips {', '.join(map(str, facts['skip']))} of {facts['layers']} layers, depth "
                f"{facts['depth']}; {facts['tokens_per_round']:.2f} tokens a round, gain {facts['gain']:.2f}"
            )


def _skips(
    name: str,
    sets: list[str],
    out: Path,
    *,
    limit: int,
    chat: bool | None,
    load: dict[str, Any],
    sizes: dict[str, int | None],
    search: dict[str, int],
) -> dict[str, Any]:
    from hf_treespec import LayerSkip, TreeConfig, find_layer_skip
    from hf_treespec.cli.models import LoadOptions, encode_sets, load_model, load_tokenizer, pad_arguments
    from hf_treespec.cli.progress import progress_bar
    from hf_treespec.cli.promptsets import load_set

    if out.suffix not in (".json", ".yaml", ".yml"):
        raise UsageFault("--out", f"{out}: expected a name that ends in .json, .yaml or .yml")
    tree = config_with(TreeConfig(), sizes)
    options = LoadOptions(**load)
    prompts = [load_set(spec, limit) for spec in sets]
    tokenizer = load_tokenizer(name, "MODEL")
    inputs = encode_sets(tokenizer, prompts, chat)
    model = load_model(name, "MODEL", options)
    with progress_bar(search["trials"], "sets of layers") as bar:
        best = 0.0

        def report(tried: LayerSkip) -> None:
            nonlocal best
            best = max(best, tried.gain)
            bar.set_postfix_str(f"best gain {best:.2f}")
            bar.update()

        device = model.device
        found = find_layer_skip(
            model,
            [{key: value.to(device) for key, value in one.items()} for one in inputs],
            tree_config=tree,
            report=report,
            **search,
            **pad_arguments(tokenizer),
        )
    try:
        found.config.save_pretrained(out)
    except OSError as error:
        raise UsageFault("--out", f"{out} cannot be written: {one_line(error)}") from error
    return {"config": str(out), **{key: value for key, value in found._asdict().items() if key != "config"}}
