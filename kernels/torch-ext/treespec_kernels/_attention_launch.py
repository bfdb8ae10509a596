"""Launches the attention kernels; importing this module needs triton.

Shapes as in `attention`.
"""

import contextlib
import functools

import torch
import triton

from ._attention_kernel import INTERPRETED, merge_parts_kernel, tree_attention_kernel
from ._table import HEAD_DIMS, Tile, choose_splits, choose_tile

__all__ = ["INTERPRETED", "launch"]

# Parts that one step of the merge reads.
BLOCK_P = 8
# float16 holds weights times value scales down to 6e-8; the factor keeps them away from there, and is undone.
HALF_GAIN = 256.0


@functools.lru_cache(maxsize=64)
def _device_facts(device: torch.device) -> tuple[str, int, bool]:
    """Family of the device, its multiprocessors, and whether it has the type e4m3."""
    if device.type != "cuda":
        return "sm90", 132, True
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        # e4m3 of these devices is another encoding, so the bits are decoded by hand.
        return "gfx9", properties.multi_processor_count, False
    major = properties.major
    family = "sm80" if major < 9 else f"sm{min(major, 12)}0"
    native = (major, properties.minor) >= (8, 9)
    return ("sm100" if family == "sm110" else family), properties.multi_processor_count, native


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tree_words: torch.Tensor,
    prefix_len: torch.Tensor,
    kv_start: torch.Tensor | None,
    depth: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    scale: float,
    window: int,
    softcap: float,
    max_len: int,
    tile: Tile | None = None,
    splits: int = 0,
    decode_bits: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs checked arguments on the current stream: [B, N, H, D] and the log-sum-exp [B, H, N].

    Args:
        q: and the others: as for `tree_attention`.
        k: storage of the keys.
        v: storage of the values.
        tree_words: packed ancestors.
        prefix_len: committed slots.
        kv_start: left padding.
        depth: depths of the nodes.
        k_scale: scales of the keys.
        v_scale: scales of the values.
        sinks: scores of the sinks.
        scale: factor of the scores.
        window: width of the sliding window, 0 for none.
        softcap: cap of the scores, 0 for none.
        max_len: bound on `prefix_len`.
        tile: the compiled shape; None takes it from the table.
        splits: parts of the keys; 0 chooses.
        decode_bits: whether e4m3 is decoded from its bits; None where the device has no such type.
    """
    B, H, N, D = q.shape
    G, S = k.shape[1:3]
    group = H // G
    family, processors, native = _device_facts(q.device)
    block_d = next(size for size in HEAD_DIMS if size >= D)
    if tile is None:
        wide, heavy = q.dtype == torch.float32, window > 0 or softcap > 0
        tile = choose_tile(N * group, block_d, family, wide=wide, heavy=heavy)
    row_blocks = triton.cdiv(N * group, tile.block_m)
    if not splits:
        splits = choose_splits(
            programs=B * G * row_blocks, max_len=max_len, block_m=tile.block_m, processors=processors
        )
    if k.dtype == torch.float8_e4m3fn and (not native if decode_bits is None else decode_bits):
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    # The kernel reads 32-bit halves, which lie in order on little-endian devices, as all of them are.
    words = tree_words.contiguous().view(torch.int32)
    if k_scale is not None:
        k_scale = k_scale.expand(B, G, S)
    if v_scale is not None:
        v_scale = v_scale.expand(B, G, S)
    if depth is not None:
        depth = depth.contiguous()

    out = torch.empty(B, N, H, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H, N, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out, lse
    if splits > 1:
        parts = torch.empty(splits, B, H, N, D, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(splits, B, H, N, dtype=torch.float32, device=q.device)
    # Triton launches on the current device, which need not be the one that holds the tensors.
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        tree_attention_kernel[(row_blocks, splits, B * G)](
            q,
            k,
            v,
            words,
            prefix_len,
            kv_start,
            depth,
            k_scale,
            v_scale,
            sinks,
            parts if splits > 1 else out,
            part_lse if splits > 1 else lse,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            words.stride(0) if words.shape[0] > 1 else 0,
            words.stride(1),
            depth.stride(0) if depth is not None and depth.shape[0] > 1 else 0,
            *(k_scale.stride() if k_scale is not None else (0, 0, 0)),
            *(v_scale.stride() if v_scale is not None else (0, 0, 0)),
            N,
            group,
            G,
            window,
            scale,
            softcap,
            D=D,
            BLOCK_D=block_d,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            GAIN=HALF_GAIN if q.dtype == torch.float16 and v_scale is not None else 1.0,
            SPLIT=splits > 1,
            HAS_WINDOW=window > 0,
            HAS_SOFTCAP=softcap > 0,
            # The interpreter multiplies the bit patterns of bfloat16.
            WIDE=INTERPRETED and q.dtype == torch.bfloat16,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if splits > 1:
            merge_parts_kernel[(N, H, B)](
                parts, part_lse, sinks, out, lse, N, splits, D=D, BLOCK_D=block_d, BLOCK_P=BLOCK_P, num_warps=4
            )
    return out, lse
