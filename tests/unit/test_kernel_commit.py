"""`treespec_kernels.commit`: what can be proven about the commit kernel without a GPU.

Shape legend: B batch rows, H heads, S physical slots, D head dimension, A longest path.
"""

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import treespec_kernels
from treespec_kernels import commit_rows_, commit_rows_reference_

PACKAGE = Path(treespec_kernels.__file__).parent
SCRIPT = Path(__file__).parents[1] / "gpu" / "commit_device.py"
BITS = {
    torch.int8: torch.int8,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
}

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
outside_interpreter = pytest.mark.skipif(
    "TRITON_INTERPRET" in os.environ, reason="TRITON_INTERPRET is set: a call runs on a CPU"
)


def _version(distribution: str) -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version(distribution).split(".")[:2])


def _environment(**variables: str) -> dict[str, str]:
    """The environment of a child process that finds the package where this process found it."""
    path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, "PYTHONPATH": path, **variables}


def _load_script():
    spec = importlib.util.spec_from_file_location("commit_device", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    # dataclasses looks a class's module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


DEVICE = _load_script()


# -- the kernel in Triton's interpreter ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict]:
    """Records of the device script, run once on the CPU; by (case, dtype).

    In a child process: a function decorated under TRITON_INTERPRET cannot be compiled by the tests below.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if _version("triton") < (3, 9) and _version("numpy") >= (2, 4):
        pytest.skip("the interpreter of triton < 3.9 cannot run a loop with numpy >= 2.4")
    output = tmp_path_factory.mktemp("commit") / "records.json"
    child = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", "--json", str(output)],
        env=_environment(TRITON_INTERPRET="1", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert output.exists(), child.stdout + child.stderr
    records = json.loads(output.read_text())
    assert child.returncode == int(not all(record["ok"] for record in records)), child.stdout + child.stderr
    return {(record["name"], record["dtype"]): record for record in records}


@pytest.mark.parametrize("dtype", DEVICE.DTYPES)
@pytest.mark.parametrize("name", [case.name for case in DEVICE.CASES if not case.gpu_only and case.layout != "far"])
def test_interpreted_kernel_equals_the_reference_bit_for_bit(interpreted: dict, name: str, dtype: str) -> None:
    assert interpreted[name, dtype]["wrong"] == 0


def test_interpreted_kernel_reaches_beyond_32_bit_offsets(interpreted: dict) -> None:
    assert interpreted["far", "int8"]["wrong"] == 0


@pytest.mark.parametrize("dtype", DEVICE.DTYPES)
def test_interpreted_kernel_ignores_slots_that_were_not_checked(interpreted: dict, dtype: str) -> None:
    assert interpreted["hostile", dtype]["wrong"] == 0


@pytest.mark.parametrize("dtype", DEVICE.DTYPES)
def test_the_comparison_sees_a_path_that_is_off_by_one(interpreted: dict, dtype: str) -> None:
    assert interpreted["mutant", dtype]["wrong"] > 0


# -- the kernel compiled ahead of time ----------------------------------------------------------------------------

# (element, D, bits that a lane stores at once)
VARIANTS = [("*i8", 128, 32), ("*i16", 16, 16), ("*i16", 80, 64), ("*i16", 128, 64), ("*i32", 128, 128)]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Compiles the kernel as a launch would: (element, D, backend, architecture, warp size) -> compiled kernel."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        pytest.skip("TRITON_INTERPRET is set: an interpreted function cannot be compiled")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source

    from treespec_kernels import _commit_kernel as module

    def compile_variant(element: str, head_dim: int, backend: str, arch: int | str, warp_size: int):
        kernel = module.commit_rows_kernel
        names = kernel.arg_names
        constants = {"slots_stride_a": 1, "D": head_dim, "BLOCK_D": module.block_d(head_dim)}
        # What the launcher finds for a cache of a real size: aligned pointers, strides that 16 divides, and a
        # batch stride that needs 64 bits.
        types = {"storage": element, "slots": "*i64", "stride_b": "i64", **dict.fromkeys(constants, "constexpr")}
        aligned = ["storage", "slots", "stride_b", "stride_h", "stride_s"]
        source = ASTSource(
            fn=kernel,
            signature={name: types.get(name, "i32") for name in names},
            constexprs=constants,
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        )
        return compile_source(
            source,
            target=GPUTarget(backend, arch, warp_size),
            options={"num_warps": module.NUM_WARPS, "num_stages": 1, "enable_fp_fusion": True},
        )

    return compile_variant


def _nvidia_tool(name: str, *arguments: str) -> str:
    spec = importlib.util.find_spec("triton")
    tool = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
    if not tool.exists():
        pytest.skip(f"this build of triton does not ship {name}")
    return subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("element", "head_dim", "store_bits"), VARIANTS)
def test_compiles_for_nvidia_without_local_memory(
    compiler, tmp_path: Path, element: str, head_dim: int, store_bits: int, arch: int
) -> None:
    compiled = compiler(element, head_dim, "cuda", arch, 32)
    assert compiled.metadata.shared == 0
    cubin = tmp_path / "commit.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = _nvidia_tool("cuobjdump", "--dump-resource-usage", str(cubin))
    assert re.findall(r"\b(?:STACK|LOCAL):(\d+)", usage) == ["0", "0"], usage
    sass = _nvidia_tool("nvdisasm", str(cubin))
    assert not re.findall(r"\b(?:STL|LDL)\b", sass)
    # One store a step, as wide as the row allows: a narrower one means that the alignment was lost.
    width = {"U16": "16", "": "32"}
    stores = [width.get(suffix, suffix) for suffix in re.findall(r"\bSTG\.E\.?(U16|64|128)?\b", sass)]
    assert stores == [str(store_bits)], stores


@pytest.mark.parametrize(("element", "head_dim", "store_bits"), VARIANTS)
def test_a_barrier_keeps_each_write_behind_the_reads(compiler, element: str, head_dim: int, store_bits: int) -> None:
    # The interpreter runs a program on one thread and cannot miss the barrier; the compiled code can.
    ptx = compiler(element, head_dim, "cuda", 90, 32).asm["ptx"]
    steps = re.findall(r"\b(ld\.global|bar\.sync|bar\.warp\.sync|st\.global)\b", ptx)
    # The slot, the row, the barrier, the row's store.
    assert [step.replace(".warp", "") for step in steps] == ["ld.global", "ld.global", "bar.sync", "st.global"]


@pytest.mark.slow
@pytest.mark.parametrize(("element", "head_dim", "store_bits"), VARIANTS)
def test_compiles_for_amd_without_spills(compiler, element: str, head_dim: int, store_bits: int) -> None:
    assembly = compiler(element, head_dim, "hip", "gfx942", 64).asm["amdgcn"]
    for field in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        assert re.findall(rf"\.{field}:\s+(\d+)", assembly) == ["0"], field


# -- the reference ------------------------------------------------------------------------------------------------


def _random_path(length: int, nodes: int) -> list[int]:
    return sorted(torch.randperm(nodes)[:length].tolist())


@pytest.mark.parametrize("dtype", BITS)
def test_reference_equals_a_walk_over_saved_rows(dtype: torch.dtype) -> None:
    for _ in range(50):
        B, H, D, base, nodes, A = (int(torch.randint(low, 8, ())) for low in (1, 1, 1, 0, 1, 0))
        A = min(A, nodes)
        paths = [_random_path(int(torch.randint(0, A + 1, ())), nodes) for _ in range(B)]
        # int() first: bits of any value, NaNs with payloads among them.
        bits = torch.randint(-128, 128, (B, base + nodes, H, D), dtype=torch.int8).to(BITS[dtype]) * 257
        storage = bits.view(dtype).transpose(1, 2)
        expected = bits.transpose(1, 2).clone()
        for b, path in enumerate(paths):
            for a, slot in enumerate(path):
                expected[b, :, base + a] = bits[b, base + slot]
        slots = torch.tensor([path + [-1] * (A - len(path)) for path in paths]).long().reshape(B, A)
        assert commit_rows_reference_(storage, base, slots) is storage
        assert torch.equal(storage.view(BITS[dtype]), expected)


# -- arguments ----------------------------------------------------------------------------------------------------

STORAGE = torch.arange(2 * 3 * 10 * 4, dtype=torch.float32).view(2, 3, 10, 4)
SLOTS = torch.tensor([[0, 2, 4], [1, -1, -1]])


def _row(*row: int) -> torch.Tensor:
    return torch.tensor([[0, 2, 4], row])


REFUSED = {
    "storage_type": ({"storage": [1.0]}, TypeError, "`storage` is a list; expected a tensor"),
    "storage_dtype": (
        {"storage": STORAGE.double()},
        TypeError,
        "`storage` has dtype torch.float64; expected one of",
    ),
    "storage_rank": (
        {"storage": STORAGE[0]},
        ValueError,
        r"`storage` has shape \[3, 10, 4\]; expected \[B, H, S, D\]",
    ),
    "storage_stride": (
        {"storage": STORAGE.repeat(1, 1, 1, 2)[..., ::2]},
        ValueError,
        r"`storage` has strides \[240, 80, 8, 2\]; expected 1 for the last axis",
    ),
    "storage_expanded": (
        {"storage": STORAGE[:1].expand(2, 3, 10, 4)},
        ValueError,
        r"`storage` of shape .* has strides \[0, 40, 4, 1\]; expected every element at an address of its own",
    ),
    "storage_overlapping": (
        {"storage": STORAGE.flatten().as_strided((2, 3, 10, 4), (120, 39, 4, 1))},
        ValueError,
        "`storage` of shape .* call .contiguous",
    ),
    "base_type": ({"base": 4.0}, TypeError, r"`base` is a float; expected an int; pass int\(base\)"),
    "base_bool": ({"base": True}, TypeError, "`base` is a bool; expected an int"),
    "base_tensor": ({"base": torch.tensor(4)}, TypeError, "`base` is a Tensor; expected an int"),
    "base_negative": ({"base": -1}, ValueError, r"`base` is -1; expected 0\.\.10"),
    "base_beyond": ({"base": 11}, ValueError, r"`base` is 11; expected 0\.\.10"),
    "slots_type": ({"slots": [[0]]}, TypeError, "`slots` is a list; expected a tensor"),
    "slots_dtype": ({"slots": SLOTS.int()}, TypeError, "`slots` has dtype torch.int32; expected torch.int64"),
    "slots_rank": ({"slots": SLOTS[0]}, ValueError, r"`slots` has shape \[3\]; expected \[2, A\]"),
    "slots_batch": ({"slots": SLOTS[:1]}, ValueError, r"`slots` has shape \[1, 3\]; expected \[2, A\]"),
    "slots_device": ({"slots": SLOTS.to("meta")}, ValueError, "`slots` is on meta; expected cpu"),
    "slots_columns": ({"base": 8}, ValueError, "`slots` has 3 columns; expected at most 2"),
    "path_beyond": (
        {"slots": _row(1, 3, 6)},
        ValueError,
        r"`slots\[1\]` is \[1, 3, 6\], wrong at column 2; .* 0\.\.5",
    ),
    "path_negative": ({"slots": _row(-2, -1, -1)}, ValueError, r"`slots\[1\]` is .* wrong at column 0"),
    "path_equal": ({"slots": _row(1, 1, 2)}, ValueError, r"`slots\[1\]` is \[1, 1, 2\], wrong at column 1"),
    "path_descending": ({"slots": _row(0, 3, 2)}, ValueError, r"`slots\[1\]` is .* wrong at column 2"),
    "padding_first": ({"slots": _row(-1, 1, 2)}, ValueError, r"`slots\[1\]` is .* wrong at column 1"),
    "padding_inside": ({"slots": _row(1, -1, 2)}, ValueError, r"`slots\[1\]` is .* wrong at column 2"),
}


@pytest.mark.parametrize("commit", [commit_rows_, commit_rows_reference_])
@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_before_any_write(commit, name: str) -> None:
    changed, error, message = REFUSED[name]
    arguments = {"storage": STORAGE, "base": 4, "slots": SLOTS, **changed}
    before = STORAGE.clone()
    with pytest.raises(error, match=message):
        commit(**arguments)
    assert torch.equal(STORAGE, before)


@outside_interpreter
def test_paths_are_read_on_a_cpu_only_unless_told_otherwise() -> None:
    # A refusal of the device, or of a missing triton, comes after the paths: it says that they were let through.
    bad = _row(0, 3, 2)
    let_through = pytest.raises((ValueError, ImportError), match="commit_rows_reference_")
    with let_through:
        commit_rows_(STORAGE.clone(), 4, bad, check_slots=False)
    # A meta tensor has no values: reading them, which on an accelerator means to wait for it, raises.
    with let_through:
        commit_rows_(STORAGE.to("meta"), 4, bad.to("meta"))


@needs_triton
@outside_interpreter
def test_a_cpu_storage_is_refused_outside_the_interpreter() -> None:
    storage = STORAGE.clone()
    with pytest.raises(ValueError, match="`storage` is on cpu; expected a CUDA or ROCm device"):
        commit_rows_(storage, 4, SLOTS)
    assert torch.equal(storage, STORAGE)


# -- the package --------------------------------------------------------------------------------------------------

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it now raises ModuleNotFoundError
import torch, treespec_kernels
storage = torch.zeros(1, 1, 4, 2)
treespec_kernels.commit_rows_reference_(storage, 1, torch.tensor([[0, 2]]))
try:
    treespec_kernels.commit_rows_(storage, 1, torch.tensor([[0, 2]]))
except ImportError as error:
    print(error)
print(sorted({"hf_treespec", "transformers"} & set(sys.modules)))
"""


def test_without_triton_the_package_imports_and_a_call_names_the_extra() -> None:
    child = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], env=_environment(), capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    message, imported = child.stdout.splitlines()
    assert "needs triton" in message
    assert "`hf-treespec[kernels]`" in message
    assert imported == "[]"


def test_the_package_imports_torch_and_triton_only() -> None:
    imported = set()
    for file in PACKAGE.glob("**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.partition(".")[0])
    assert imported - sys.stdlib_module_names == {"torch", "triton"}
