"""Progress bars: on stderr, and only where somebody watches."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["progress_bar"]


def progress_bar(total: int, description: str) -> tqdm[NoReturn]:
    """A bar to use as a context manager; silent when stderr is no terminal."""
    from tqdm import tqdm

    # The file is looked up here: tqdm would keep the stderr of its own import.
    return tqdm(total=total, desc=description, file=sys.stderr, disable=not sys.stderr.isatty(), leave=False)
