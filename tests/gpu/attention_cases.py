"""What the attention kernel is checked on, and how a case is made and judged; used by attention_device.py.

Shapes: B batch rows, H query heads, G key heads, N tree nodes, S slots, D head dimension.
"""

import dataclasses
import math
from typing import Any

import torch

from treespec_kernels import tree_attention_reference

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Relative Frobenius error of the output against float64. The interpreter truncates where bfloat16 should be rounded.
LIMITS = {"fp16": 5e-4, "bf16": 8e-3, "fp32": 1e-5}
LSE_LIMIT = 1e-4
SMALL = (16, 16, 4, 1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One call of the kernel."""

    name: str
    nodes: int = 13
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    prefix: tuple[int, ...] = (37, 20)
    """Committed slots of each batch row, padding included."""
    start: tuple[int, ...] | None = None
    """Slots of left padding of each row."""
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: str = "fp16"
    kv: str = "dense"
    """dense, int8, fp8 (loaded as such), or bits (fp8 decoded by hand)."""
    scales: str = "token"
    """One scale a token and head, a head, or a tensor."""
    splits: int = 1
    tile: tuple[int, int, int, int] | None = SMALL
    """None takes it from the table."""
    tree: str = "random"
    """random, chain, star, or bare (random, its last third padding with no bits at all)."""
    shared: bool = False
    """One tree for all rows."""
    layout: str = "heads"
    """heads: [B, G, S, D] in memory; tokens: [B, S, G, D]."""
    value_size: float = 1.0
    """Standard deviation of the values."""
    slow: bool = False


# All that may be combined, together.
EVERYTHING = {"start": (5,), "window": 9, "softcap": 20.0, "sinks": True, "splits": 2, "nodes": 7, "prefix": (29,)}


CASES = (
    *(
        Case(name=f"nodes_{n}", nodes=n, kv_heads=4, prefix=(19,), tile=(32, 32, 4, 1))
        for n in (1, 2, 16, 31, 32, 33, 63, 64, 65)
    ),
    Case(name="nodes_100", nodes=100, heads=2, kv_heads=1, prefix=(19,), tile=(64, 64, 4, 1)),
    Case(name="nodes_128", nodes=128, heads=1, kv_heads=1, prefix=(5,), tile=(64, 64, 4, 1)),
    Case(name="nodes_65_by_16", nodes=65, heads=1, kv_heads=1, prefix=(5,)),
    *(Case(name=f"group_{g}", heads=2 * g, nodes=7, prefix=(21,)) for g in (1, 3, 4, 7, 8)),
    *(
        Case(name=f"dim_{d}", head_dim=d, nodes=5, prefix=(21,), heads=2, kv_heads=1)
        for d in (16, 24, 64, 80, 96, 128)
    ),
    Case(name="dim_8", head_dim=8, nodes=5, prefix=(21,), heads=2, kv_heads=1),
    Case(name="dim_1", head_dim=1, nodes=5, prefix=(21,), heads=2, kv_heads=1),
    Case(name="dim_192", head_dim=192, nodes=5, prefix=(21,), heads=2, kv_heads=1),
    Case(name="dim_256", head_dim=256, nodes=5, prefix=(21,), heads=2, kv_heads=1),
    Case(name="dim_512", head_dim=512, nodes=5, prefix=(21,), heads=2, kv_heads=1),
    Case(name="dim_80_int8", head_dim=80, nodes=5, prefix=(21,), heads=2, kv_heads=1, kv="int8", splits=2),
    *(Case(name=f"splits_{s}", splits=s, nodes=7, heads=2, kv_heads=1) for s in (2, 4, 8)),
    Case(name="splits_64", splits=64, prefix=(37,), nodes=3, heads=2, kv_heads=1),
    Case(name="splits_of_nothing", splits=4, prefix=(0, 1), nodes=1),
    Case(name="empty_prefix", prefix=(0, 0)),
    Case(name="one_row_is_empty", prefix=(0, 40)),
    Case(name="prefix_fills_tiles", prefix=(32, 16), nodes=16),
    Case(name="padding", start=(9, 3)),
    Case(name="padding_fills_tiles", start=(16, 16)),
    Case(name="all_padding", start=(37, 20)),
    Case(name="all_padding_split", nodes=7, heads=2, kv_heads=1, start=(37, 20), splits=4),
    Case(name="padding_one", nodes=7, heads=2, kv_heads=1, start=(1, 0), splits=2),
    Case(name="chain", tree="chain"),
    Case(name="star", tree="star"),
    Case(name="bare_nodes", tree="bare"),
    Case(name="bare_and_nothing_else", nodes=7, heads=2, kv_heads=1, tree="bare", prefix=(0, 0), splits=2),
    Case(name="bare_sinks", tree="bare", prefix=(0, 0), sinks=True),
    Case(name="bare_sinks_split", nodes=7, heads=2, kv_heads=1, tree="bare", prefix=(0, 0), sinks=True, splits=4),
    Case(name="shared_tree", shared=True),
    Case(name="shared_tree_window", shared=True, window=4),
    Case(name="window_1", window=1),
    Case(name="window_in_the_tree", window=3, tree="chain"),
    Case(name="window_7", window=7),
    Case(name="window_wide", window=1000),
    Case(name="window_padding", window=19, start=(9, 10), prefix=(40, 41)),
    Case(name="window_split", nodes=7, heads=2, kv_heads=1, window=17, splits=4, prefix=(70, 33)),
    Case(name="softcap", softcap=5.0),
    Case(name="softcap_low", softcap=0.5, dtype="fp32"),
    Case(name="sinks", sinks=True),
    Case(name="sinks_split", nodes=7, heads=2, kv_heads=1, sinks=True, splits=4),
    Case(name="tokens_layout", layout="tokens"),
    Case(name="tokens_layout_int8", layout="tokens", kv="int8"),
    Case(name="table_tile", tile=None, prefix=(70,)),
    Case(name="table_tile_int8", nodes=7, tile=None, prefix=(70,), kv="int8", splits=2),
    Case(name="table_tile_fp32", tile=None, prefix=(70,), dtype="fp32"),
    *(Case(name=f"head_scales_{kv}", kv=kv, scales="head") for kv in ("int8", "fp8")),
    *(Case(name=f"one_scale_{kv}", kv=kv, scales="tensor") for kv in ("int8", "fp8")),
    # Weights times scales of these would be subnormal in float16.
    Case(name="small_values_int8", kv="int8", value_size=0.001),
    *(
        Case(name=f"all_{dtype}_{kv}", dtype=dtype, kv=kv, **EVERYTHING)
        for dtype in DTYPES
        for kv in ("dense", "int8", "fp8", "bits")
    ),
    *(Case(name=f"plain_{dtype}_{kv}", dtype=dtype, kv=kv) for dtype in DTYPES for kv in ("dense", "int8", "fp8")),
    *(
        Case(
            name=f"real_{d}_{kv}",
            nodes=48,
            heads=8,
            head_dim=d,
            prefix=(300, 171),
            start=(0, 33),
            kv=kv,
            splits=4,
            tile=None,
            slow=True,
        )
        for d in (64, 128, 256)
        for kv in ("dense", "int8", "fp8", "bits")
    ),
)


@dataclasses.dataclass(slots=True)
class Call:
    """The tensors of a case, as the launcher takes them."""

    tensors: dict[str, torch.Tensor | None]
    numbers: dict[str, Any]


def make_call(case: Case, seed: int, device: str) -> Call:
    """Random queries, trees and a storage in which everything that no node may see is poisoned."""
    generator = torch.Generator().manual_seed(seed)
    B, N, G, D = len(case.prefix), case.nodes, case.kv_heads, case.head_dim
    S = max(case.prefix) + N + 64
    prefix = torch.tensor(case.prefix, dtype=torch.int32)
    start = torch.tensor(case.start or (0,) * B, dtype=torch.int32)
    trees = [_parents(case, generator) for _ in range(1 if case.shared else B)]
    words = torch.stack([_words(parents, case) for parents in trees])
    depths = torch.tensor([_depths(parents) for parents in trees], dtype=torch.int32)

    slot = torch.arange(S)
    first = start.clone()
    if case.window:
        first = torch.maximum(first, prefix - case.window + 1)
    used = (slot >= first[:, None]) & (slot < (prefix + N)[:, None])
    q = torch.randn(B, N, case.heads, D, generator=generator).to(DTYPES[case.dtype]).transpose(1, 2)
    k, k_scale = _stored(torch.randn(B, G, S, D, generator=generator), used, case)
    v, v_scale = _stored(torch.randn(B, G, S, D, generator=generator) * case.value_size, used, case)
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "tree_words": words,
        "prefix_len": prefix,
        "kv_start": start if case.start else None,
        "depth": depths if case.window else None,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "sinks": torch.randn(case.heads, generator=generator) if case.sinks else None,
    }
    # .to() keeps the strides of what is dense, whatever the order of its axes.
    moved = {name: None if value is None else value.to(device) for name, value in tensors.items()}
    return Call(moved, {"scale": D**-0.5, "window": case.window, "softcap": case.softcap})


def _parents(case: Case, generator: torch.Generator) -> list[int]:
    if case.tree == "chain":
        return [i - 1 for i in range(case.nodes)]
    if case.tree == "star":
        return [-1, *[0] * (case.nodes - 1)]
    return [-1, *(int(torch.randint(0, i, (), generator=generator)) for i in range(1, case.nodes))]


def _words(parents: list[int], case: Case) -> torch.Tensor:
    seen: list[int] = []
    for node, parent in enumerate(parents):
        seen.append((1 << node) | (seen[parent] if parent >= 0 else 0))
    if case.tree == "bare":
        seen[2 * case.nodes // 3 :] = [0] * (case.nodes - 2 * case.nodes // 3)
    count = -(-case.nodes // 64)
    rows = [[bits >> (64 * w) & (2**64 - 1) for w in range(count)] for bits in seen]
    # Two's complement: the last bit of a word is its sign.
    return torch.tensor([[word - 2**64 if word >= 2**63 else word for word in row] for row in rows])


def _depths(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def _stored(real: torch.Tensor, used: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor | None]:
    if case.kv == "dense":
        storage, scale = real.to(DTYPES[case.dtype]), None
        storage.masked_fill_(~used[:, None, :, None], math.nan)
    else:
        peak = real.abs().amax(-1)
        if case.scales != "token":
            peak = peak.amax((0, 2) if case.scales == "head" else (0, 1, 2), keepdim=True)
        scale = peak / (127 if case.kv == "int8" else 448)
        scaled = real / scale[..., None]
        storage = scaled.round().to(torch.int8) if case.kv == "int8" else scaled.to(torch.float8_e4m3fn)
        # int8 has no NaN, and the interpreter reads the one of e4m3 as a number: the scales carry the poison.
        storage = torch.where(used[:, None, :, None], storage, torch.full_like(storage, 77.0))
        if case.scales == "token":
            scale = torch.where(used[:, None], scale, math.nan)
    if case.layout == "tokens":
        storage = storage.transpose(1, 2).contiguous().transpose(1, 2)
    return storage, scale


def expected(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference in float64 on the same stored values."""
    return tree_attention_reference(**call.tensors, **call.numbers, compute_dtype=torch.float64)


def judge(case: Case, found: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]) -> dict:
    """{error, lse_error, ok}; a NaN anywhere is an infinite error."""
    out, want = found[0].double(), right[0]
    error = float((out - want).norm() / want.norm().clamp(min=1e-30))
    both = (found[1] == -math.inf) & (right[1] == -math.inf)
    difference = torch.where(both, 0.0, (found[1].double() - right[1]).abs())
    lse_error = float(difference.max())
    error, lse_error = (math.inf if math.isnan(value) else value for value in (error, lse_error))
    return {"error": error, "lse_error": lse_error, "ok": error <= LIMITS[case.dtype] and lse_error <= LSE_LIMIT}
