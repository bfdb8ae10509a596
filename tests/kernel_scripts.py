"""The device scripts of tests/gpu, for tests that run them on a CPU in Triton's interpreter."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import treespec_kernels

GPU = Path(__file__).parent / "gpu"
PACKAGE = Path(treespec_kernels.__file__).parent


def load_script(name: str) -> Any:
    """The module of a script."""
    spec = importlib.util.spec_from_file_location(name, GPU / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses looks a class's module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def child_environment(**variables: str) -> dict[str, str]:
    """The environment of a child process that finds the package where this process found it."""
    path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def skip_without_interpreter() -> None:
    """Skips where no interpreter of Triton runs."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    versions = (importlib.metadata.version(name).split(".")[:2] for name in ("triton", "numpy"))
    triton, numpy = (tuple(int(part) for part in version) for version in versions)
    if triton < (3, 9) and numpy >= (2, 4):
        pytest.skip("the interpreter of triton < 3.9 cannot run a loop with numpy >= 2.4")


def interpreted_records(script: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Records of a device script, run on the CPU; skips where no interpreter can run it.

    In a child process: the interpreter is chosen for the whole of it, when the kernels are imported.
    """
    skip_without_interpreter()
    output = folder / "records.json"
    child = subprocess.run(
        [sys.executable, str(GPU / f"{script}.py"), "--device", "cpu", "--json", str(output), *arguments],
        env=child_environment(TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert output.exists(), child.stdout + child.stderr
    records = json.loads(output.read_text())
    assert child.returncode == int(not all(record["ok"] for record in records)), child.stdout + child.stderr
    return records
