"""Checks `commit_rows_` bit for bit against its torch reference on a device, then times it.

On a GPU machine (the table is printed last):

    PYTHONPATH=kernels/torch-ext python tests/gpu/commit_device.py

On a CPU, where Triton's interpreter runs the same cases and nothing is timed:

    TRITON_INTERPRET=1 PYTHONPATH=kernels/torch-ext python tests/gpu/commit_device.py --device cpu

Exit status 1 means that a case differs from the reference, or that a deliberately wrong one does not.

Shape legend: B batch rows, H heads, S physical slots, D head dimension, A longest path, N tree nodes.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from treespec_kernels import commit_rows_, commit_rows_reference_

DTYPES = {"int8": torch.int8, "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
# A quiet NaN with a payload that no arithmetic produces, so that a touched element shows; int8 has no NaN.
POISON = {torch.int8: 0x55, torch.float16: 0x7E5A, torch.bfloat16: 0x7FDA, torch.float32: 0x7FC05A5A}
# Row stride of the "far" layout, in elements: row 2 starts at 2**31, beyond any 32-bit offset.
FAR = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One commit to check; every dtype runs it."""

    name: str
    paths: tuple[tuple[int, ...], ...]
    """Accepted tree slots of each batch row, without padding."""
    heads: int = 2
    head_dim: int = 16
    base: int = 5
    """Committed rows before the tree, in slots."""
    nodes: int = 9
    """Slots of the tree region, N; the storage ends with it."""
    layout: str = "dense"
    """How the storage lies in memory; see `make_storage`."""
    pad: int = 0
    """Columns of -1 beyond the longest path."""
    repeats: int = 1
    """Runs on fresh data; more than one looks for a race."""
    gpu_only: bool = False


CASES = (
    Case(name="root_only", paths=((0,), (0,))),
    Case(name="one_move", paths=((3,), (8,))),
    Case(name="in_place_chain", paths=((0, 1, 2), (0, 1, 2))),
    # Every target is the source of the step before: any other order of moves gives another result.
    Case(name="shift_by_one", paths=((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 7, 8))),
    Case(name="ragged", paths=((0, 2, 5, 7), (), (1,), (0, 8)), pad=2),
    Case(name="none_accepted", paths=((), ()), pad=3),
    Case(name="no_columns", paths=((), ())),
    Case(name="whole_tree", paths=(tuple(range(9)), tuple(range(9)))),
    Case(name="empty_prefix", paths=((0, 3, 4), (2, 3, 8)), base=0),
    Case(name="one_wide", paths=((0, 4, 6),), heads=1, head_dim=1),
    Case(name="odd_dim_80", paths=((0, 3, 4, 8), (1, 2)), head_dim=80),
    Case(name="odd_dim_33", paths=((0, 3, 4, 8), (1, 2)), head_dim=33),
    Case(name="dim_128", paths=((2, 3, 7), (1, 6, 8)), head_dim=128),
    Case(name="two_blocks_300", paths=((2, 3, 7), (1, 6, 8)), head_dim=300),
    Case(name="token_major", paths=((0, 2, 5), (3, 4)), head_dim=80, layout="token_major"),
    Case(name="window", paths=((0, 2, 5), (3, 4)), head_dim=80, layout="window"),
    Case(name="half_of_kv", paths=((0, 2, 5), (3, 4)), head_dim=64, layout="half_of_kv"),
    Case(name="far", paths=((1, 4), (0, 2, 3), (2, 8)), heads=1, layout="far"),
    Case(
        name="race",
        paths=(tuple(range(1, 64)),) * 16,
        heads=64,
        head_dim=16,
        nodes=64,
        repeats=20,
        gpu_only=True,
    ),
)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that NaNs compare equal to themselves."""
    return tensor.view(BITS[tensor.element_size()])


def make_storage(case: Case, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned memory, and the [B, H, S, D] storage inside it."""
    B, H, S, D = len(case.paths), case.heads, case.base + case.nodes, case.head_dim
    if case.layout == "far":
        memory = torch.empty((B - 1) * FAR + H * S * D, dtype=dtype, device=device)
        storage = memory.as_strided((B, H, S, D), (FAR, S * D, D, 1))
        bits_of(storage).fill_(POISON[dtype])
        return storage, storage
    shape = {
        "dense": (B, H, S, D),
        "token_major": (B, S, H, D),
        "window": (B, H, S + 4, D + 7),
        "half_of_kv": (2, B, H, S, D),
    }[case.layout]
    memory = torch.empty(shape, dtype=dtype, device=device)
    bits_of(memory).fill_(POISON[dtype])
    storage = {
        "dense": lambda: memory,
        "token_major": lambda: memory.transpose(1, 2),
        "window": lambda: memory[:, :, 1 : 1 + S, 3 : 3 + D],
        "half_of_kv": lambda: memory[1],
    }[case.layout]()
    return memory, storage


def make_slots(case: Case, device: str) -> torch.Tensor:
    """The paths as int64 [B, A], padded with -1; their strides are swapped too where the storage's are."""
    width = max(map(len, case.paths)) + case.pad
    rows = [list(path) + [-1] * (width - len(path)) for path in case.paths]
    slots = torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(rows), width)
    return slots.t().contiguous().t() if case.layout == "token_major" else slots


def count_mismatches(case: Case, dtype: torch.dtype, device: str, shift: int = 0) -> int:
    """Elements of the whole memory, poison included, that differ between the kernel and the reference.

    Args:
        case: The commit to run.
        dtype: Dtype of the storage.
        device: Where it runs.
        shift: Added to every slot that the kernel gets; anything but 0 must give a mismatch.
    """
    wrong = 0
    slots = make_slots(case, device)
    for _ in range(case.repeats):
        memory, storage = make_storage(case, dtype, device)
        tree = bits_of(storage)[:, :, case.base :]
        limits = torch.iinfo(tree.dtype)
        tree.copy_(torch.randint(limits.min, limits.max, tree.shape, dtype=tree.dtype, device=device))
        # Both run in the same memory, one after the other, so that they see the same strides and addresses.
        before = bits_of(memory).clone()
        commit_rows_reference_(storage, case.base, slots)
        expected = bits_of(memory).clone()
        bits_of(memory).copy_(before)
        moved = torch.where(slots >= 0, slots + shift, slots).clamp(max=case.nodes - 1)
        commit_rows_(storage, case.base, moved, check_slots=False)
        wrong += int((bits_of(memory) != expected).sum())
    return wrong


def count_hostile_writes(dtype: torch.dtype, device: str) -> int:
    """Elements that change when every slot is unusable; the kernel has to ignore them all."""
    case = Case(name="hostile", paths=((9, 2**40, -7, 1), (-(2**40), 0, 10, 2)))
    memory, storage = make_storage(case, dtype, device)
    bits_of(storage).random_(0, 100)
    before = bits_of(memory).clone()
    commit_rows_(storage, case.base, make_slots(case, device), check_slots=False)
    return int((bits_of(memory) != before).sum())


def check(device: str) -> list[dict]:
    """Runs every case; a record is {name, dtype, wrong, ok}."""
    records = []
    for dtype_name, dtype in DTYPES.items():
        for case in CASES:
            if case.gpu_only and device == "cpu":
                continue
            # The far storage is sized in elements; one width proves the offsets, the rest would only cost memory.
            if case.layout == "far" and dtype != torch.int8:
                continue
            wrong = count_mismatches(case, dtype, device)
            records.append({"name": case.name, "dtype": dtype_name, "wrong": wrong, "ok": wrong == 0})
        wrong = count_hostile_writes(dtype, device)
        records.append({"name": "hostile", "dtype": dtype_name, "wrong": wrong, "ok": wrong == 0})
        wrong = count_mismatches(next(c for c in CASES if c.name == "dim_128"), dtype, device, shift=1)
        records.append({"name": "mutant", "dtype": dtype_name, "wrong": wrong, "ok": wrong > 0})
    return records


def per_call_us(calls: list[Callable[[], object]], rounds: int) -> tuple[float, float]:
    """Median microseconds a call: launched from Python (wall clock), and replayed from a CUDA graph (device)."""

    def run() -> None:
        for call in calls:
            call()

    # Warm-up on a side stream: what a capture needs, and it compiles the kernel.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()

    eager = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        eager.append((time.perf_counter() - start) * 1e6 / len(calls))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replayed = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        replayed.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(eager), statistics.median(replayed)


def time_one(dtype: torch.dtype, B: int, A: int, layers: int, rounds: int) -> list[tuple[str, float, float]]:
    """Times one round of a model (keys and values of every layer) three ways: (way, eager us, device us)."""
    H, S, D, N = 8, 4096, 128, 64
    base = S - N
    storages = [torch.zeros(B, H, S, D, dtype=dtype, device="cuda") for _ in range(2 * layers)]
    # Nothing is in place yet: slots 1.. is the most that a path of A nodes can make the kernel move.
    slots = torch.stack([torch.randperm(N - 1)[:A].sort().values + 1 for _ in range(B)]).cuda()
    # Index tensors and their host-side shapes are free for the two torch ways: both are made beforehand.
    rows_BA = base + slots
    gather_index = slots[:, None, :, None].expand(B, H, A, D)

    def index_select(storage: torch.Tensor) -> None:
        for b in range(B):
            storage[b, :, base : base + A].copy_(storage[b].index_select(1, rows_BA[b]))

    def gather(storage: torch.Tensor) -> None:
        storage[:, :, base : base + A].copy_(storage[:, :, base:].gather(2, gather_index))

    ways = {"commit_rows_": lambda s: commit_rows_(s, base, slots), "index_select": index_select, "gather": gather}
    return [
        (name, *per_call_us([lambda s=s, way=way: way(s) for s in storages], rounds)) for name, way in ways.items()
    ]


def timing_table(layers: int, rounds: int, budget_s: float) -> list[str]:
    """Lines of the timing table; stops opening new rows when `budget_s` seconds have gone."""
    columns = ("eager us", "device us", "eager x", "device x")
    header = f"{'dtype':9} {'B':>3} {'A':>3}  {'way':13}" + "".join(f"{column:>11}" for column in columns)
    lines = [header, "-" * len(header)]
    start = time.perf_counter()
    for dtype_name in ("bfloat16", "int8"):
        for B in (1, 8):
            for A in (2, 5, 16):
                if time.perf_counter() - start > budget_s:
                    return [*lines, f"stopped: {budget_s:.0f} s are over"]
                rows = time_one(DTYPES[dtype_name], B, A, layers, rounds)
                _, eager_ours, device_ours = rows[0]
                lines.extend(
                    f"{dtype_name:9} {B:3d} {A:3d}  {way:13}{eager:11.2f}{device:11.2f}"
                    f"{eager / eager_ours:11.2f}{device / device_ours:11.2f}"
                    for way, eager, device in rows
                )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the check records here")
    parser.add_argument("--layers", type=int, default=32, help="layers of the timed model; two storages each")
    parser.add_argument("--rounds", type=int, default=50, help="timed rounds; the table shows their median")
    parser.add_argument("--budget-s", type=float, default=180.0, help="seconds after which no timing row is begun")
    args = parser.parse_args()

    if args.device == "cuda" and not torch.cuda.is_available():
        parser.exit(
            2, "this needs a CUDA device, and torch sees none; --device cpu runs the checks without the timing\n"
        )
    torch.manual_seed(args.seed)
    records = check(args.device)
    if args.json:
        args.json.write_text(json.dumps(records))
    failed = [record for record in records if not record["ok"]]
    print(f"checks: {len(records)}, failed: {len(failed)} (torch {torch.__version__}, device {args.device})")
    for record in failed:
        print(f"FAILED {record['name']} {record['dtype']}: {record['wrong']} elements differ")
    if args.device == "cuda" and not failed:
        table = timing_table(args.layers, args.rounds, args.budget_s)
        print(f"\n{torch.cuda.get_device_name()}: microseconds a call, median of {args.rounds} rounds of")
        print(f"{2 * args.layers} calls, H 8, S 4096, D 128, N 64; 'x' is the time over that of commit_rows_")
        print("\n".join(table))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
