"""`treespec env`: versions and machine, for bug reports."""

from __future__ import annotations

import typer

from hf_treespec.cli.options import JsonOption, to_json

__all__ = ["env"]


def env(as_json: JsonOption = False) -> None:
    """Versions of everything involved and the machine; paste it into bug reports."""
    from hf_treespec.cli.environment import describe_environment

    facts = describe_environment()
    if as_json:
        typer.echo(to_json(facts))
        return
    for name, value in facts.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        typer.echo(f"{name:14}{shown or 'none'}")
