"""The typer application. Command modules import torch and transformers inside the commands, so help is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_treespec.cli.bench import bench
from hf_treespec.cli.calibrate import calibrate
from hf_treespec.cli.doctor import doctor
from hf_treespec.cli.env import env
from hf_treespec.cli.generate import generate
from hf_treespec.cli.index import index
from hf_treespec.cli.skips import skips
from hf_treespec.cli.train import train

__all__ = ["app"]

app = typer.Typer(
    name="treespec",
    help="Tree speculative decoding for Hugging Face models: the model's own text in fewer forwards.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from hf_treespec import __version__

        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of `treespec` itself."""


for _command in (generate, bench, calibrate, index, skips, train, doctor, env):
    app.command()(_command)
