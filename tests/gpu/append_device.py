"""Checks `append_quantized_` bit for bit against `quantize_rows` on a device.

    PYTHONPATH=kernels/torch-ext python tests/gpu/append_device.py

On a CPU, where Triton's interpreter runs the same cases:

    TRITON_INTERPRET=1 PYTHONPATH=kernels/torch-ext python tests/gpu/append_device.py --device cpu

Exit status 1 means that a case differs, or that a deliberately wrong one does not.

Shapes: B batch rows, G heads, T rows to append, S slots, D head dimension.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from mutants import mutant
from treespec_kernels import append_quantized_, quantize_rows

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
STORAGES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
S = 24
Append = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]
# What is broken in the kernel's source, and the case and storage that must see it.
MUTANTS = {
    "ties_upwards": ("+ 0x7FFFF + ((bits >> 20) & 1)", "+ 0x80000", "ties", "fp8"),
    "subnormals_missing": ("size < 0.015625", "size < 0.001", "ties", "fp8"),
    "no_sign": ("& 0x80\n", "& 0x00\n", "ties", "fp8"),
    "not_rounded": ("((value + ROUNDER) - ROUNDER)", "value", "scattered", "int8"),
    "no_least_scale": (", SMALLEST_NORMAL)", ", 0.0)", "zeros", "int8"),
    "slot_of_another": ("(slot >= 0) & (slot < n_slots)", "(slot >= 0) & (slot <= n_slots)", "outside", "int8"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One call; every dtype and storage runs it."""

    name: str
    slots: tuple[tuple[int, ...], ...]
    batch: int = 2
    heads: int = 2
    head_dim: int = 16
    layout: str = "heads"
    """heads: [B, G, ., D] in memory; tokens: [B, ., G, D], of the storage as well as of the rows."""
    content: str = "random"
    """random, zeros, tiny (subnormal), halves (all float16 up to 448), ties (all halfway points of e4m3)."""


CASES = (
    Case(name="in_order", slots=(tuple(range(5, 16)),)),
    Case(name="ragged", slots=((3, 4, 5, -1), (20, 21, 22, 23))),
    Case(name="scattered", slots=((9, 2, 23), (0, 1, 7))),
    Case(name="outside", slots=((-1, 24, 2**30), (-5, 1, -(2**31)))),
    Case(name="one", slots=((0,),), batch=1, heads=1, head_dim=1),
    Case(name="dim_80", slots=((1, 2, 3),), head_dim=80),
    Case(name="dim_300", slots=((1, 2, 3),), head_dim=300),
    Case(name="tokens_layout", slots=((1, 2, 3), (4, 5, 6)), layout="tokens"),
    Case(name="zeros", slots=((1, 2, 3),), content="zeros"),
    Case(name="tiny", slots=((1, 2, 3),), content="tiny"),
    Case(name="halves", slots=(tuple(range(24)),), heads=8, head_dim=128, content="halves"),
    Case(name="ties", slots=((1, 2),), batch=1, heads=1, head_dim=256, content="ties"),
)


def make_rows(case: Case, dtype: torch.dtype, device: str) -> torch.Tensor:
    """[B, G, T, D] of the case's content."""
    B, G, T, D = case.batch, case.heads, len(case.slots[0]), case.head_dim
    shape = (B, G, T, D)
    if case.content == "zeros":
        rows = torch.zeros(shape)
    elif case.content == "tiny":
        # float16 holds none of these, which makes them zeros.
        rows = torch.randn(shape) * 1e-39
    elif case.content == "halves":
        # 0x5F00 is 448, the largest; each row has it, so that its scale is 1 and every value is encoded as it is.
        halves = torch.arange(0x5F01, dtype=torch.int16).view(torch.float16).float()
        rest = halves[-1:].expand(G * T * (D - 1) - len(halves))
        halves = torch.cat([halves, rest]).view(1, G, T, D - 1)
        rows = torch.cat([torch.cat([halves, -halves]), torch.full((B, G, T, 1), 448.0)], -1)
    elif case.content == "ties":
        codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        middle = (codes[1:] + codes[:-1]) / 2
        rows = torch.cat([codes, middle, codes[-1:], torch.zeros(D - 254)]).expand(shape).clone()
        rows[:, :, 1::2] *= -1
    else:
        # Sizes over many octaves, so that subnormals of e4m3 occur.
        rows = torch.randn(shape) * 2.0 ** torch.randint(-12, 4, shape)
    rows = rows.to(device, dtype)
    return rows.transpose(1, 2).contiguous().transpose(1, 2) if case.layout == "tokens" else rows


def count_mismatches(case: Case, dtype: torch.dtype, storage_dtype: torch.dtype, device: str, append: Append) -> int:
    """Elements of the storage and of its scales that differ from what should be there, the untouched ones included."""
    B, G, D = case.batch, case.heads, case.head_dim
    shape = (B, S, G, D) if case.layout == "tokens" else (B, G, S, D)
    memory = torch.randint(0, 127, shape, dtype=torch.uint8, device=device)
    storage = memory.view(storage_dtype)
    scales = torch.rand(B, G, S, device=device)
    if case.layout == "tokens":
        storage = storage.transpose(1, 2)
        scales = scales.transpose(1, 2).contiguous().transpose(1, 2)
    want, want_scales = storage.clone(), scales.clone()
    rows = make_rows(case, dtype, device)
    values, factors = quantize_rows(rows, storage_dtype)
    for b in range(B):
        for t, slot in enumerate(case.slots[b if len(case.slots) > 1 else 0]):
            if 0 <= slot < S:
                want.view(torch.uint8)[b, :, slot] = values.view(torch.uint8)[b, :, t]
                want_scales[b, :, slot] = factors[b, :, t]
    slots = torch.tensor(case.slots, dtype=torch.int32, device=device)
    append(storage, scales, rows, slots)
    return int((storage.view(torch.uint8) != want.view(torch.uint8)).sum() + (scales != want_scales).sum())


def check(device: str, append: Append) -> list[dict]:
    """Runs every case; a record is {name, dtype, storage, wrong, ok}."""
    records = []
    for case in CASES:
        for dtype_name, dtype in DTYPES.items():
            if case.content == "tiny" and dtype == torch.bfloat16 and device == "cpu":
                continue  # the interpreter reads no subnormal of bfloat16
            for storage_name, storage_dtype in STORAGES.items():
                wrong = count_mismatches(case, dtype, storage_dtype, device, append)
                names = {"name": case.name, "dtype": dtype_name, "storage": storage_name}
                records.append({**names, "wrong": wrong, "ok": wrong == 0})
    return records


def check_mutants(device: str) -> list[dict]:
    """Records of kernels whose source is broken; `ok` is that the case of the mutant fails."""
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (old, new, case_name, storage) in MUTANTS.items():
            launcher = mutant(Path(folder), name, old, new, "_append_kernel")
            case = next(case for case in CASES if case.name == case_name)
            append = partial(launcher.launch, levels=448.0 if storage == "fp8" else 127.0)
            wrong = count_mismatches(case, torch.float32, STORAGES[storage], device, append)
            names = {"name": f"mutant_{name}", "dtype": "fp32", "storage": storage}
            records.append({**names, "wrong": wrong, "ok": wrong > 0})
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path, help="write the records here")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "this needs a CUDA device, and torch sees none; --device cpu runs the interpreter\n")
    torch.manual_seed(0)
    records = check(args.device, partial(append_quantized_, backend="triton"))
    records += check_mutants(args.device)
    if args.json:
        args.json.write_text(json.dumps(records))
    failed = [record for record in records if not record["ok"]]
    print(f"checks: {len(records)}, failed: {len(failed)} (torch {torch.__version__}, device {args.device})")
    for record in failed:
        print("FAILED", *record.values())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
