"""Settings of every test: offline, few threads, markers decided here, deprecations of our own use fail."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

# Before anything imports huggingface_hub or tokenizers, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

from hf_treespec.api import support

ROOT = Path(__file__).resolve().parent.parent
OURS = ("hf_treespec", "treespec_kernels")
# Frames between a deprecated call and the log line about it.
BETWEEN = ("logging", "transformers", "torch", "contextlib", "functools")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-part",
        metavar="K/N",
        type=parse_part,
        default=None,
        help="of the tests marked slow, run those whose node id hashes to K modulo N",
    )


def parse_part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise pytest.UsageError(f"--slow-part {text!r}: expected K/N with 0 <= K < N, such as 3/7")
    return int(part), int(parts)


def in_part(node_id: str, part: int, parts: int) -> bool:
    """By a hash that no Python version salts, so a test keeps its day however many others come or go."""
    return int.from_bytes(hashlib.sha256(node_id.encode()).digest()[:8], "big") % parts == part


def pytest_configure(config: pytest.Config) -> None:
    # xdist workers share the cores; torch would give each of them all.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    logging.getLogger("transformers").addHandler(DeprecationGuard())
    # Tests build more models than a process of users; one whose answer was forgotten would be probed again, and tests
    # that count forwards would hang on their order.
    support._REMEMBERED = 1 << 20


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
    slow_part = config.getoption("--slow-part")
    if slow_part is None:
        return
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        out = item.get_closest_marker("slow") and not in_part(item.nodeid, *slow_part)
        (dropped if out else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)


class DeprecationGuard(logging.Handler):
    """Fail where our own code makes transformers log a deprecation, which never reaches `warnings`."""

    def emit(self, record: logging.LogRecord) -> None:
        if "deprecat" not in record.getMessage().lower():
            return
        caller = _first_outside(sys._getframe(1))
        if caller.startswith(OURS):
            pytest.fail(f"{caller} uses something deprecated: {record.getMessage()}")


def _first_outside(frame: FrameType | None) -> str:
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name != __name__ and name.partition(".")[0] not in BETWEEN:
            return name
        frame = frame.f_back
    return ""


@pytest.fixture(autouse=True)
def _warn_again() -> None:
    """Transformers says each deprecation once a process, so a first test would hide it from all others."""
    module = sys.modules.get("transformers.utils.logging")
    if module is not None:
        module.warning_once.cache_clear()


@pytest.fixture(autouse=True)
def _same_seed() -> Iterator[None]:
    """A test that forgets to seed must still fail the same way twice."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """The real model in float32 and its tokenizer; converted on first use (evals/real_model.py)."""
    spec = importlib.util.spec_from_file_location("treespec_evals_real_model", ROOT / "evals" / "real_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load_smollm2()
