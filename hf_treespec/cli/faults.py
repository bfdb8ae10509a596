"""How a command ends when something is wrong: one line to stderr and an exit code, never a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from hf_treespec.errors import UnsupportedCallError, UnsupportedModelError

__all__ = ["EXIT_REFUSED", "EXIT_USAGE", "UsageFault", "faults_reported", "one_line"]

EXIT_REFUSED = 1
EXIT_USAGE = 2


class UsageFault(Exception):
    """Something the user typed cannot work.

    Args:
        argument: the argument as it is typed, such as "--config" or "MODEL".
        message: the value, what was expected, what to do.
    """

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(f"{argument}: {one_line(message)}")
        self.argument = argument


def one_line(message: object) -> str:
    """The text of an error with its line breaks folded; some of transformers' messages span a screen."""
    return " ".join(str(message).split())


@contextmanager
def faults_reported(*, quiet: bool = False) -> Iterator[None]:
    """Turn the errors that a user can cause into one line and an exit code: 1 refused model, 2 usage.

    Args:
        quiet: leave the line to another process, which has the same fault.
    """
    try:
        yield
    except UsageFault as fault:
        _end(fault, EXIT_USAGE, quiet)
    except UnsupportedCallError as error:
        _end(error, EXIT_USAGE, quiet)
    except UnsupportedModelError as error:
        _end(error, EXIT_REFUSED, quiet)


def _end(error: Exception, code: int, quiet: bool) -> None:
    if not quiet:
        typer.echo(f"treespec: error: {one_line(error)}", err=True)
    # Not chained: typer.Exit carries the code out, and the cause is told.
    raise typer.Exit(code) from None
