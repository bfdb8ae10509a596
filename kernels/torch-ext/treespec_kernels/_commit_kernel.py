"""The Triton half of `commit`; importing this module needs triton.

Shape legend as in `commit`: B batch rows, H heads, S physical slots, D head dimension, A longest path.
"""

import torch
import triton
import triton.language as tl

# One warp moves a row of 256 elements at 8 to 32 bytes a lane; more warps would only wait for one another.
NUM_WARPS = 1
MAX_BLOCK_D = 256


# The base and the lengths change every round: specialising on them would compile the kernel again and again.
@triton.jit(do_not_specialize=["base", "n_path", "n_room"])
def commit_rows_kernel(
    storage,
    slots,
    stride_b,
    stride_h,
    stride_s,
    slots_stride_b,
    slots_stride_a,
    base,
    n_path,
    n_room,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # 64-bit offsets: a storage may hold more than 2**31 elements.
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    tree = storage + b * stride_b + h * stride_h + tl.cast(base, tl.int64) * stride_s + d
    path = slots + b * slots_stride_b
    target = tree
    for a in range(n_path):
        slot = tl.load(path)
        # False for padding (-1), for a node already in place (slot == a), and for a slot outside the storage.
        if (slot > a) & (slot < n_room):
            row = tl.load(tree + slot * stride_s, mask=d < D)
            # The target may be a row that an earlier step read. The barrier puts every lane's reads before the
            # write, whichever lane the compiler gives an element to.
            tl.debug_barrier()
            tl.store(target, row, mask=d < D)
        path += slots_stride_a
        target += stride_s


# Under TRITON_INTERPRET=1 the decorator returns an interpreted function, which runs on CPU tensors.
INTERPRETED = not isinstance(commit_rows_kernel, triton.JITFunction)


def block_d(head_dim: int) -> int:
    """Elements of a row that one program moves; a power of two."""
    return min(triton.next_power_of_2(head_dim), MAX_BLOCK_D)


def launch(bits: torch.Tensor, base: int, slots: torch.Tensor) -> None:
    """Launches one program for each (batch row, head, block of D) on the current stream.

    Args:
        bits: [B, H, S, D], an integer view of a checked, non-empty storage.
        base: Physical slot at which the tree region starts.
        slots: int64 [B, A], tree slots relative to `base`, padded with -1.
    """
    B, H, S, D = bits.shape
    block = block_d(D)
    commit_rows_kernel[(B, H, triton.cdiv(D, block))](
        bits,
        slots,
        *bits.stride()[:3],
        *slots.stride(),
        base,
        slots.shape[1],
        S - base,
        D=D,
        BLOCK_D=block,
        num_warps=NUM_WARPS,
        num_stages=1,
    )
