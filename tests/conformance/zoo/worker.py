"""What a process of `make conformance` does. Processes that are spawned cannot find it in `__main__`."""

from __future__ import annotations

import logging
import time

import torch

from conformance.zoo import checks, results


def quiet() -> None:
    """Settings of a process."""
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.CRITICAL)


def run(name: str) -> tuple[results.Record, float]:
    """The line of a type, and the seconds that it took."""
    start = time.perf_counter()
    try:
        found = checks.check(name)
    except Exception as error:  # no type may keep the others from being told of
        found = checks.Finding(name, "?", "error", f"{type(error).__name__}: {' '.join(str(error).split())}")
    return results.record(found), time.perf_counter() - start
