"""Copies of the kernels' package with one thing broken: what their checks must not let through."""

import importlib
import shutil
import sys
from pathlib import Path
from types import ModuleType

import treespec_kernels


def mutant(folder: Path, name: str, old: str, new: str, module: str) -> ModuleType:
    """The module of a copy of the package in which every `old` is `new`.

    Args:
        folder: where the copy goes; an empty one of the caller's.
        name: of the mutant, unique in the process.
        old: text that one file of the kernels holds; SystemExit if none or several do.
        new: what stands there instead.
        module: of the package, the one to import.
    """
    source = Path(treespec_kernels.__file__).parent
    package = folder / f"mutant_{name}"
    package.mkdir(parents=True)
    # The modules that register operators stay behind: their names are taken.
    files = [file for file in source.glob("_*.py") if file.name != "__init__.py"]
    changed = [file.name for file in files if old in file.read_text()]
    if len(changed) != 1:
        raise SystemExit(f"what the mutant {name} breaks is in {changed}; expected one file: {old}")
    for file in files:
        shutil.copy(file, package)
    target = package / changed[0]
    target.write_text(target.read_text().replace(old, new))
    (package / "__init__.py").write_text("")
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(f"{package.name}.{module}")
    finally:
        sys.path.remove(str(folder))
