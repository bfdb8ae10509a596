"""The Triton half of `append`; importing this module needs triton.

Shapes: B batch rows, G heads, T rows to append, S slots of the storage, D head dimension.
"""

import contextlib

import torch
import triton
import triton.language as tl

__all__ = ["INTERPRETED", "launch"]

# Rows of a program: two for each of its four warps.
BLOCK_T = 8
NUM_WARPS = 4
# Adding and subtracting it rounds a float32 below 2**22 to an integer, ties to the even one.
ROUNDER = tl.constexpr(12582912.0)
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _e4m3_code(value):
    """The e4m3 bits, as int32, of float32 values of at most 448; ties to even.

    By hand, since not every device converts to that type, and Triton's interpreter loses the carry of the mantissa.
    """
    size = tl.abs(value)
    bits = size.to(tl.int32, bitcast=True)
    # Twenty bits of mantissa go, and the exponent's bias falls from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the codes count steps of 2**-9, which is the last bit of a float32 just above 2**14.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(size < 0.015625, small, normal) | sign


# A forward's width and the length of the storage are not compiled in.
@triton.jit(do_not_specialize=["slots_stride_b", "n_rows", "n_slots"])
def append_quantized_kernel(
    storage,
    scales,
    rows,
    slots,
    storage_stride_b,
    storage_stride_h,
    storage_stride_s,
    scales_stride_b,
    scales_stride_h,
    scales_stride_s,
    rows_stride_b,
    rows_stride_h,
    rows_stride_t,
    slots_stride_b,
    n_rows,
    n_slots,
    LEVELS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    b = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    slot = tl.load(slots + b * slots_stride_b + t, mask=t < n_rows, other=-1).to(tl.int64)
    taken = (slot >= 0) & (slot < n_slots)
    inside = taken[:, None] & (d < D)[None, :]
    source = rows + b * rows_stride_b + h * rows_stride_h + t.to(tl.int64)[:, None] * rows_stride_t + d[None, :]
    real = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(real), 1)
    scale = tl.maximum(tl.div_rn(peak, tl.full([BLOCK_T], LEVELS, tl.float32)), SMALLEST_NORMAL)
    value = tl.div_rn(real, tl.broadcast_to(scale[:, None], (BLOCK_T, BLOCK_D)))
    value = tl.minimum(tl.maximum(value, -LEVELS), LEVELS)
    code = _e4m3_code(value) if storage.dtype.element_ty == tl.uint8 else ((value + ROUNDER) - ROUNDER).to(tl.int32)
    target = storage + b * storage_stride_b + h * storage_stride_h + slot[:, None] * storage_stride_s + d[None, :]
    tl.store(target, code.to(storage.dtype.element_ty), mask=inside)
    tl.store(scales + b * scales_stride_b + h * scales_stride_h + slot * scales_stride_s, scale, mask=taken)


# Under TRITON_INTERPRET=1 the decorator returns an interpreted function, which runs on CPU tensors.
INTERPRETED = not isinstance(append_quantized_kernel, triton.JITFunction)


def launch(
    storage: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, levels: float
) -> None:
    """Launches checked arguments on the current stream.

    Args:
        storage: [B, G, S, D], int8 or float8_e4m3fn.
        scales: float32 [B, G, S].
        rows: [B, G, T, D].
        slots: [B or 1, T].
        levels: largest value that the storage's type holds.
    """
    B, G, T, D = rows.shape
    if not rows.numel():
        return
    bits = storage if storage.dtype == torch.int8 else storage.view(torch.uint8)
    slots = slots.contiguous()
    # Triton launches on the current device, which need not be the one that holds the storage.
    with torch.cuda.device(rows.device) if rows.is_cuda else contextlib.nullcontext():
        append_quantized_kernel[(triton.cdiv(T, BLOCK_T), G, B)](
            bits,
            scales,
            rows,
            slots,
            *bits.stride()[:3],
            *scales.stride(),
            *rows.stride()[:3],
            slots.stride(0) if slots.shape[0] > 1 else 0,
            T,
            storage.shape[2],
            LEVELS=levels,
            D=D,
            BLOCK_D=triton.next_power_of_2(D),
            BLOCK_T=BLOCK_T,
            num_warps=NUM_WARPS,
        )
