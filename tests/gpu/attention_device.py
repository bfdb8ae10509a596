"""Checks the attention kernel against float64 on a device, and that broken kernels and inputs do not pass.

On a GPU machine:

    PYTHONPATH=kernels/torch-ext python tests/gpu/attention_device.py

On a CPU, where Triton's interpreter runs the same cases:

    TRITON_INTERPRET=1 PYTHONPATH=kernels/torch-ext python tests/gpu/attention_device.py --device cpu

Exit status 1 means that a case is off by more than its limit, or that a mutant is not.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import torch

sys.path.insert(0, str(Path(__file__).parent))

from attention_cases import CASES, Call, Case, expected, judge, make_call

from mutants import mutant
from treespec_kernels import _attention_launch
from treespec_kernels._table import Tile

CASE = {case.name: case for case in CASES}
# What is broken in the kernel's source, and the case that must see it.
MUTANTS = {
    "values_without_mask": (
        "tl.load(v_tile + n[:, None] * v_stride_s + d[None, :], mask=inside, other=0.0)",
        "tl.load(v_tile + n[:, None] * v_stride_s + d[None, :])",
        "padding",
    ),
    "value_scales_without_mask": (
        "tl.load(v_scale_tile + n * v_scale_stride_s, mask=loaded, other=0.0)",
        "tl.load(v_scale_tile + n * v_scale_stride_s)",
        "plain_fp16_int8",
    ),
    "value_scales_missing": ("[None, :] * GAIN", "[None, :] * 0 + GAIN", "plain_fp16_int8"),
    "no_gain": ("HALF_GAIN = 256.0", "HALF_GAIN = 1.0", "small_values_int8"),
    "key_scales_missing": ("score *= tl.load(k", "score += 0.0 * tl.load(k", "plain_fp16_int8"),
    "prefix_window": ("position[None, :] >= oldest", "position[None, :] > oldest", "window_7"),
    "window_bound": ("- window + 1)\n", "- window + 2)\n", "window_7"),
    "tree_window": ("oldest = length + level - window + 1", "oldest = length + level - window", "window_in_the_tree"),
    "last_tiles_lost": ("share = tl.cdiv(tiles, splits)", "share = tiles // splits", "splits_2"),
    "tile_read_twice": ("tl.minimum(begin + share, tiles)", "tl.minimum(begin + share + 1, tiles)", "splits_2"),
    "high_words_ignored": ("word, high[:, None])", "word, low[:, None])", "nodes_100"),
    "later_words_ignored": ("row_words + other // 32, ", "row_words, ", "nodes_65_by_16"),
    "beyond_the_prefix": ("(slot + column < length)", "(slot + column <= length)", "padding"),
    "before_the_prefix": ("(slot + column >= first)", "(slot + column >= first - 1)", "padding"),
    "bits_of_the_sign": ("(bits & 0x80) << 8", "(bits & 0x80) << 7", "all_fp16_bits"),
    "softcap_missing": ("- 2.0 * softcap /", "- 1.9 * softcap /", "softcap"),
    "sink_missing_in_merge": ("tl.load(sinks + head + one)", "0.0 * tl.load(sinks + head + one)", "sinks_split"),
    "row_without_keys": ('safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)', "safe = new_peak", "bare_sinks"),
    "one_head_for_all": ("head = kv_head * group + row % group", "head = kv_head * group + row * 0", "group_4"),
}


def run(case: Case, call: Call, launcher: ModuleType = _attention_launch) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's output of a case, in memory that held NaNs before."""
    S, N = call.tensors["k"].shape[2], case.nodes
    deterministic = torch.are_deterministic_algorithms_enabled()
    # What torch.empty returns is filled with NaNs then.
    torch.use_deterministic_algorithms(True)
    try:
        return launcher.launch(
            **call.tensors,
            **call.numbers,
            max_len=S - N,
            tile=None if case.tile is None else Tile(*case.tile),
            splits=case.splits,
            decode_bits=case.kv == "bits",
        )
    finally:
        torch.use_deterministic_algorithms(deterministic)


def check_cases(cases: list[Case], seed: int, device: str) -> list[dict]:
    """A record {name, error, lse_error, ok, seconds} for each case."""
    records = []
    for case in cases:
        began = time.perf_counter()
        call = make_call(case, seed, device)
        record = judge(case, run(case, call), expected(call))
        records.append({"name": case.name, **record, "seconds": time.perf_counter() - began})
    return records


def check_inputs(seed: int, device: str) -> list[dict]:
    """Records of kernels that are given inputs that are wrong by one bit or one slot; `ok` is that it shows."""
    records = []
    for name, case in {
        "ancestor_lost": CASE["nodes_33"],
        "stranger_seen": CASE["nodes_33"],
        "padding_seen": CASE["padding"],
        "padding_too_long": CASE["padding"],
        "prefix_too_long": CASE["padding"],
    }.items():
        call = make_call(case, seed, device)
        right = expected(call)
        words = call.tensors["tree_words"]
        if name == "ancestor_lost":
            words[0, -1, 0] ^= 1
        elif name == "stranger_seen":
            # Any node but the last and its ancestors.
            unseen = [j for j in range(case.nodes) if not int(words[0, -1, 0]) >> j & 1]
            words[0, -1, 0] ^= 1 << unseen[0]
        elif name == "prefix_too_long":
            call.tensors["prefix_len"] += 1
        else:
            call.tensors["kv_start"] += 1 if name == "padding_too_long" else -1
        record = judge(case, run(case, call), right)
        records.append({"name": f"input_{name}", **record, "ok": not record["ok"]})
    return records


def check_mutants(seed: int, device: str) -> list[dict]:
    """Records of kernels whose source is broken; `ok` is that the case of the mutant fails."""
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (old, new, case_name) in MUTANTS.items():
            launcher = mutant(Path(folder), name, old, new, "_attention_launch")
            case = CASE[case_name]
            call = make_call(case, seed, device)
            record = judge(case, run(case, call, launcher), expected(call))
            records.append({"name": f"mutant_{name}", **record, "ok": not record["ok"]})
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--cases", help="run the cases with one of these names only, separated by commas")
    parser.add_argument("--slow", action="store_true", help="run the slow cases, and only them")
    args = parser.parse_args()

    if args.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "this needs a CUDA device, and torch sees none; --device cpu runs the interpreter\n")
    torch.set_num_threads(1)
    wanted = args.cases.split(",") if args.cases else None
    # A device has all of them quickly.
    cases = [case for case in CASES if args.device == "cuda" or case.slow == args.slow or wanted]
    records = check_cases([case for case in cases if wanted is None or case.name in wanted], args.seed, args.device)
    if wanted is None and not args.slow:
        records += check_inputs(args.seed, args.device) + check_mutants(args.seed, args.device)
    if args.json:
        args.json.write_text(json.dumps(records))
    failed = [record for record in records if not record["ok"]]
    # The slowest five, or all that were asked for.
    for record in sorted(records, key=lambda one: one.get("seconds", 0.0))[-5 if wanted is None else 0 :]:
        print(f"{record['name']:28} error {record['error']:.1e} lse {record['lse_error']:.1e}", end=" ")
        print(f"{record.get('seconds', 0.0):.2f} s")
    print(
        f"checks: {len(records)}, failed: {len(failed)} (torch {torch.__version__}, {args.device}, seed {args.seed})"
    )
    for record in failed:
        print(f"FAILED {record['name']}: error {record['error']:.2e}, log-sum-exp {record['lse_error']:.2e}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
