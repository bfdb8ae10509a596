"""The clock of all that is decided by time, in one place, so that a test can script it."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["now"]

# Seconds from any start. Callers read it as an attribute of this module.
now: Callable[[], float] = time.perf_counter
