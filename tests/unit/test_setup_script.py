"""scripts/setup.sh: what it must not do to an environment that works."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_an_interpreter_that_is_not_there_removes_nothing(tmp_path: Path) -> None:
    for name in ("scripts", "constraints"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    kept = tmp_path / ".venv" / "lib" / "kept.py"
    kept.parent.mkdir(parents=True)
    kept.write_text("")
    done = subprocess.run(
        ["sh", "scripts/setup.sh", ".venv", "tf524", "cli"],
        cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "PYTHON": "/nowhere/python"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "no Python >= 3.11" in done.stderr and "/nowhere/python" in done.stderr
    assert kept.exists()
