"""Commit of the accepted tree path inside a key or value storage.

Shape legend: B batch rows, H key/value heads, S physical slots of the storage, D head dimension,
A longest accepted path of the batch (in nodes), N nodes of the tree.
"""

import contextlib

import torch

# A commit moves rows and never computes with them, so it works on the bits of an element and one kernel
# serves every dtype of a width. (It also keeps NaN payloads, and bf16 exact in Triton's interpreter.)
_BITS = {
    torch.int8: torch.int8,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
}


def commit_rows_(
    storage: torch.Tensor, base: int, slots: torch.Tensor, *, check_slots: bool | None = None
) -> torch.Tensor:
    """Moves the accepted tree rows of `storage` to the front of the tree region, in place.

    Afterwards `storage[b, :, base + a, :]` holds what `storage[b, :, base + slots[b, a], :]` held before, for
    every `slots[b, a] >= 0`. No other row is written. The order of the moves is what makes them safe in place:
    a path ascends strictly, so step `a` never reads a row that an earlier step wrote.

    Args:
        storage: [B, H, S, D], float16, bfloat16, float32 or int8; D contiguous, other strides free.
        base: Physical slot at which the tree region starts.
        slots: int64 [B, A] on the storage's device. Tree slot (0..N-1, relative to `base`) of the a-th accepted
            node of row b, strictly ascending; a shorter path is padded with -1 at its end.
        check_slots: Whether to read the values of `slots` and refuse a bad path. None reads them on a CPU only,
            since on an accelerator it costs a device-to-host synchronisation. Unchecked, an entry that is out of
            range or below its own rank moves nothing; an unordered path may move the wrong rows.

    Returns:
        `storage` itself.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: An argument has a bad shape, stride, device or value.
        ImportError: triton is not installed.
    """
    _check_layout(storage, base, slots)
    if slots.is_cpu if check_slots is None else check_slots:
        _check_paths(storage, base, slots)
    try:
        from . import _commit_kernel
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise ImportError(
            "commit_rows_ needs triton, which is not installed; install the extra `hf-treespec[kernels]`, "
            "or call commit_rows_reference_, which needs torch alone."
        ) from error
    if not storage.is_cuda and not _commit_kernel.INTERPRETED:
        raise ValueError(
            f"commit_rows_: `storage` is on {storage.device}; expected a CUDA or ROCm device; move it there, "
            "or call commit_rows_reference_."
        )
    if storage.numel() and slots.numel():
        # Triton launches on the current device, which need not be the one that holds the storage.
        with torch.cuda.device(storage.device) if storage.is_cuda else contextlib.nullcontext():
            _commit_kernel.launch(storage.detach().view(_BITS[storage.dtype]), base, slots)
    return storage


def commit_rows_reference_(storage: torch.Tensor, base: int, slots: torch.Tensor) -> torch.Tensor:
    """Does what `commit_rows_` does in plain torch, on any device; it reads `slots` on the host.

    Args:
        storage: [B, H, S, D], as for `commit_rows_`.
        base: Physical slot at which the tree region starts.
        slots: int64 [B, A], as for `commit_rows_`.

    Returns:
        `storage` itself.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: An argument has a bad shape, stride, device or value.
    """
    _check_layout(storage, base, slots)
    _check_paths(storage, base, slots)
    bits_BHSD = storage.detach().view(_BITS[storage.dtype])
    for bits_HSD, path_A in zip(bits_BHSD, slots, strict=True):
        path_A = path_A[path_A >= 0]
        # index_select copies, so a row that is both source and target is read before it is written.
        bits_HSD[:, base : base + len(path_A)] = bits_HSD.index_select(1, base + path_A)
    return storage


def _check_layout(storage: torch.Tensor, base: int, slots: torch.Tensor) -> None:
    """Refuses whatever can be refused without reading the values of `slots`."""
    for name, value in (("storage", storage), ("slots", slots)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"commit_rows_: `{name}` is a {type(value).__name__}; expected a tensor; pass one.")
    if storage.dtype not in _BITS:
        raise TypeError(
            f"commit_rows_: `storage` has dtype {storage.dtype}; expected one of {[str(d) for d in _BITS]}; pass "
            "storage.view(dtype) with one of them that has the same element size: rows are moved bit by bit."
        )
    if storage.ndim != 4:
        raise ValueError(
            f"commit_rows_: `storage` has shape {list(storage.shape)}; expected [B, H, S, D]; reshape it."
        )
    if storage.shape[3] > 1 and storage.stride(3) != 1:
        raise ValueError(
            f"commit_rows_: `storage` has strides {list(storage.stride())}; expected 1 for the last axis; "
            "allocate it with D innermost."
        )
    if _may_overlap(storage):
        raise ValueError(
            f"commit_rows_: `storage` of shape {list(storage.shape)} has strides {list(storage.stride())}; "
            "expected every element at an address of its own; call .contiguous() on it."
        )
    if isinstance(base, bool) or not isinstance(base, int):
        raise TypeError(f"commit_rows_: `base` is a {type(base).__name__}; expected an int; pass int(base).")
    S = storage.shape[2]
    if not 0 <= base <= S:
        raise ValueError(
            f"commit_rows_: `base` is {base}; expected 0..{S}, the slots of `storage`; pass the committed length."
        )
    if slots.dtype != torch.int64:
        raise TypeError(f"commit_rows_: `slots` has dtype {slots.dtype}; expected torch.int64; pass slots.long().")
    if slots.ndim != 2 or slots.shape[0] != storage.shape[0]:
        raise ValueError(
            f"commit_rows_: `slots` has shape {list(slots.shape)}; expected [{storage.shape[0]}, A], one path for "
            "each row of `storage`; stack the paths and pad them with -1."
        )
    if slots.device != storage.device:
        raise ValueError(
            f"commit_rows_: `slots` is on {slots.device}; expected {storage.device}, where `storage` is; move it."
        )
    if slots.shape[1] > S - base:
        raise ValueError(
            f"commit_rows_: `slots` has {slots.shape[1]} columns; expected at most {S - base}, the slots of "
            "`storage` from `base` on; grow `storage` or drop the columns that hold only -1."
        )


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Whether two indices of `tensor` may name one address; exact for any slice or permutation of a dense one."""
    if tensor.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted((tensor.stride(i), n) for i, n in enumerate(tensor.shape) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _check_paths(storage: torch.Tensor, base: int, slots: torch.Tensor) -> None:
    """Refuses a path that is out of range, not strictly ascending, or padded elsewhere than at its end."""
    before = torch.cat([slots.new_full((slots.shape[0], 1), -1), slots[:, :-1]], dim=1)
    room = storage.shape[2] - base
    # A padded entry after an accepted one is fine, the reverse is not. An ascending path from 0 or above has
    # slots[b, a] >= a of itself, hence there is no third condition.
    ascends = torch.where(slots >= 0, slots > before, slots == -1)
    gap = (slots >= 0) & (before < 0)
    gap[:, :1] = False
    bad = ~ascends | gap | (slots >= room)
    if not bad.any():
        return
    b, a = bad.nonzero()[0].tolist()
    raise ValueError(
        f"commit_rows_: `slots[{b}]` is {slots[b].tolist()}, wrong at column {a}; expected tree slots "
        f"in 0..{room - 1} that ascend strictly, then -1 to the end; sort the path and keep the padding last."
    )
