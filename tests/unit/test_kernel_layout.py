"""`kernels/` as kernel-builder and the Hub's client take it."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from kernel_scripts import PACKAGE

KERNELS = PACKAGE.parents[1]


def test_build_file_names_the_package_and_compiles_nothing() -> None:
    build = tomllib.loads((KERNELS / "build.toml").read_text())
    assert build["general"]["name"].replace("-", "_") == PACKAGE.name
    assert (KERNELS / "torch-ext" / PACKAGE.name / "__init__.py").exists()
    assert "torch-noarch" in build
    assert "kernel" not in build


def test_a_build_registers_its_operators_in_a_namespace_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client loads a build under another name, beside any other version; a module `_ops` comes with it."""
    copy = tmp_path / "treespec_kernels_a1b2"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "_ops.py").write_text("def add_op_namespace_prefix(name):\n    return f'treespec_a1b2::{name}'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    build = importlib.import_module(copy.name)
    try:
        q = torch.randn(1, 1, 1, 16)
        out = build.tree_attention(q, q, q, torch.ones(1, 1, 1).long(), torch.tensor([0]), backend="torch")
        torch.testing.assert_close(out, q)
        assert torch.ops.treespec_a1b2.tree_attention.default is not None
        assert torch.ops.treespec_a1b2.append_quantized_.default is not None
        own = [name for name in sys.modules if name.startswith(copy.name)]
        assert len(own) > 3
        files = {sys.modules[name].__file__ for name in own}
        assert all(Path(file).is_relative_to(copy) for file in files)
    finally:
        for name in [name for name in sys.modules if name.startswith(copy.name)]:
            del sys.modules[name]


def test_readme_shows_a_call_that_runs() -> None:
    code = re.search(r"```python\n(.*?)```", (KERNELS / "README.md").read_text(), re.DOTALL)[1]
    names: dict[str, object] = {}
    exec(code.replace('device="cuda"', 'device="cpu"').replace("4096", "64").replace("3000", "40"), names)
    assert names["out"].shape == (1, 16, 32, 128)
