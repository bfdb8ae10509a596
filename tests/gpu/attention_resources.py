"""Compiles the attention kernels for devices that need not be there, and reports what they take of these.

    PYTHONPATH=kernels/torch-ext python tests/gpu/attention_resources.py --csv tests/gpu/attention_resources.csv

compiles the tiles of the tables for every family of devices, a hundred in some ten minutes. TRITON_INTERPRET must not
be set. Columns of the table: registers of a thread, its STL instructions (spills) and stack in bytes, shared memory of
a program in bytes, and which matrix unit multiplies.
"""

import argparse
import csv
import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from treespec_kernels._attention_kernel import merge_parts_kernel, tree_attention_kernel
from treespec_kernels._attention_launch import BLOCK_P, HALF_GAIN
from treespec_kernels._table import FAMILIES, HEAVY_TABLE, TABLE, WIDE_TABLE, Tile

# Bytes that a program may have of the smallest device of each family (sm80 stands for 86 and 89 too).
SHARED_LIMIT = {"sm80": 99 * 1024, "sm90": 227 * 1024, "sm100": 227 * 1024, "sm120": 99 * 1024, "gfx9": 64 * 1024}
TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "sm120": GPUTarget("cuda", 120, 32),
    "gfx9": GPUTarget("hip", "gfx942", 64),
}
STORED = {"dense": None, "int8": "*i8", "fp8": "*fp8e4nv", "bits": "*u8"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One binary of the kernel."""

    family: str
    head_dim: int
    tile: Tile
    kv: str
    query: str = "bf16"
    features: bool = False
    """Window, soft cap, sinks and left padding."""
    split: bool = True

    @property
    def name(self) -> str:
        """For test ids."""
        tile = self.tile
        parts = (self.family, self.query, self.kv, f"d{self.head_dim}", f"{tile.block_m}x{tile.block_n}w{tile.warps}")
        return "-".join(parts) + ("-all" if self.features else "") + ("" if self.split else "-whole")


def variants() -> list[Variant]:
    """What the report holds: every tile of the tables with int8, the largest with the other storages as well.

    Head dimensions below 128 have tiles of 128 and need less of everything: the largest stands for them. gfx9 is slow
    to compile, and has its largest tiles alone.
    """
    found = []
    for (family, head_dim), rows in TABLE.items():
        last = rows[-1][1]
        if family == "gfx9" or head_dim == 16:
            found += [Variant(family, head_dim, last, "int8")] if head_dim != 32 else []
            continue
        if head_dim >= 64:
            tiles = [tile for _, tile in rows] if head_dim > 64 else [last]
            found += [Variant(family, head_dim, tile, "int8") for tile in tiles]
            found += [Variant(family, head_dim, last, kv) for kv in ("dense", "bits" if family == "sm80" else "fp8")]
    for family in FAMILIES[:-1]:
        for head_dim in (64, 128, 256, 512):
            rows = HEAVY_TABLE[head_dim]
            tiles = [tile for _, tile in rows] if head_dim > 64 else [rows[-1][1]]
            found += [Variant(family, head_dim, tile, "int8", features=True, split=False) for tile in tiles]
            found += [Variant(family, head_dim, rows[-1][1], "dense", features=True, split=False)]
        found += [Variant(family, head_dim, WIDE_TABLE[head_dim], "dense", query="fp32") for head_dim in (128, 512)]
        found.append(Variant(family, 128, WIDE_TABLE[128], "dense", query="fp32", features=True, split=False))
    return found


def compile_variant(variant: Variant) -> Any:
    """Compiles as a launch would for a cache of a real size: aligned pointers, and strides that 16 divides."""
    element = f"*{variant.query}"
    stored = STORED[variant.kv] or element
    quantized = variant.kv != "dense"
    constants = {
        "D": variant.head_dim,
        "BLOCK_D": variant.head_dim,
        "BLOCK_M": variant.tile.block_m,
        "BLOCK_N": variant.tile.block_n,
        "GAIN": HALF_GAIN if variant.query == "fp16" and quantized else 1.0,
        "SPLIT": variant.split,
        "HAS_WINDOW": variant.features,
        "HAS_SOFTCAP": variant.features,
        "WIDE": False,
    }
    if quantized:
        constants |= {"k_scale_stride_s": 1, "v_scale_stride_s": 1}
    else:
        constants |= {"k_scale": None, "v_scale": None}
    if not variant.features:
        constants |= {"kv_start": None, "depth": None, "sinks": None}
    types = {
        "q": element,
        "k": stored,
        "v": stored,
        "out": "*fp32" if variant.split else element,
        **dict.fromkeys(("words", "prefix_len", "kv_start", "depth"), "*i32"),
        **dict.fromkeys(("k_scale", "v_scale", "sinks", "lse", "scale", "softcap"), "*fp32"),
        "scale": "fp32",
        "softcap": "fp32",
        **dict.fromkeys(constants, "constexpr"),
    }
    pointers = ("q", "k", "v", "words", "prefix_len", "kv_start", "depth", "k_scale", "v_scale", "sinks", "out", "lse")
    strides = [
        f"{tensor}_stride_{axis}" for tensor, axes in (("q", "bhn"), ("k", "bhs"), ("v", "bhs")) for axis in axes
    ]
    return _compile(tree_attention_kernel, types, constants, [*pointers, *strides], variant.family, variant.tile)


def compile_merge(family: str, head_dim: int) -> Any:
    """The kernel that merges parts."""
    constants = {"D": head_dim, "BLOCK_D": head_dim, "BLOCK_P": BLOCK_P, "sinks": None}
    types = {
        **dict.fromkeys(("parts", "part_lse", "lse"), "*fp32"),
        "out": "*bf16",
        **dict.fromkeys(constants, "constexpr"),
    }
    aligned = ["parts", "part_lse", "out", "lse"]
    return _compile(merge_parts_kernel, types, constants, aligned, family, Tile(1, 1, 4, 3))


def _compile(kernel: Any, types: dict, constants: dict, aligned: list[str], family: str, tile: Tile) -> Any:
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "i32") for name in names},
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in constants},
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    return compile_source(source, target=TARGETS[family], options=options)


def resources(compiled: Any) -> dict[str, Any]:
    """{registers, spills, stack, shared, unit} of a compiled kernel; needs the tools that triton brings."""
    shared = compiled.metadata.shared
    if "cubin" not in compiled.asm:
        text = compiled.asm["amdgcn"]
        # vgpr_spill_count is of registers, private_segment_fixed_size of bytes.
        counts = {field: int(re.search(rf"\.{field}:\s+(\d+)", text)[1]) for field in _AMD_FIELDS}
        return {
            "registers": counts["vgpr_count"],
            "spills": counts["vgpr_spill_count"],
            "stack": counts["private_segment_fixed_size"],
            "shared": shared,
            "unit": "mfma" if "v_mfma" in text else "none",
        }
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "--dump-resource-usage", str(cubin))
        sass = _tool("nvdisasm", str(cubin))
    units = [name for name, found in _UNITS.items() if re.search(found, sass)]
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": len(re.findall(r"\bSTL\b", sass)),
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
        "shared": shared,
        "unit": units[0] if units else "none",
    }


_AMD_FIELDS = ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
_UNITS = {"tcgen05": r"\bUTC\w*MMA", "wgmma": r"\bHGMMA", "mma": r"\b[HI]MMA"}


def _tool(name: str, *arguments: str) -> str:
    tool = Path(importlib.util.find_spec("triton").origin).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=True, timeout=120).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="write the rows here; rows of other versions of triton stay")
    parser.add_argument("--only", default="", help="variants whose name holds this text")
    parser.add_argument("--list", action="store_true", help="print the names and compile nothing")
    args = parser.parse_args()

    wanted = [variant for variant in variants() if re.search(args.only, variant.name)]
    if args.list:
        print("\n".join(variant.name for variant in wanted))
        return 0
    rows = []
    for variant in wanted:
        began = time.perf_counter()
        found = resources(compile_variant(variant))
        rows.append({"triton": triton.__version__, "variant": variant.name, **found})
        print(f"{variant.name:40} {found} {time.perf_counter() - began:.1f} s", flush=True)
    if args.csv and rows:
        write_rows(args.csv, rows)
    return 0


def write_rows(path: Path, rows: list[dict]) -> None:
    """Rows of the file for other versions of triton stay."""
    kept = []
    if path.exists():
        with path.open() as file:
            kept = [row for row in csv.DictReader(file) if row["triton"] != triton.__version__]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(kept + rows, key=lambda row: str(row["triton"])))


if __name__ == "__main__":
    sys.exit(main())
