"""The command line: `treespec generate | bench | index | skips | train | doctor | env`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of `treespec`."""
    try:
        from hf_treespec.cli.app import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        # Without typer there is no typer.echo either.
        sys.stderr.write("treespec: the command line needs typer; in the checkout: pip install -e '.[cli]'\n")
        raise SystemExit(1) from None
    app()
