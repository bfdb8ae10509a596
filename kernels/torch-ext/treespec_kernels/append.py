"""Keys or values appended to a quantized storage, with a scale for each token and head.

Shapes: B batch rows, G heads, T rows to append, S slots of the storage, D head dimension.
"""

import importlib

import torch

from ._backend import choose_backend
from ._names import operator_name

__all__ = ["append_quantized_", "quantize_rows"]

# The largest value of each storage: int8 symmetric, so -128 is never used.
_LEVELS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_REAL = (torch.float16, torch.bfloat16, torch.float32)


def quantize_rows(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in `dtype` and their scales: a row is its values times its scale.

    The scale is the largest size in a row over 127 (int8) or 448 (float8_e4m3fn), and at least 2 ** -126; values are
    rounded to the nearest, ties to even. Rows must be finite.

    Args:
        rows: [..., D], floating point.
        dtype: int8 or float8_e4m3fn.

    Returns:
        Values [..., D] and float32 scales [...].

    Raises:
        TypeError: another `dtype`.
    """
    if dtype not in _LEVELS:
        raise TypeError(
            f"quantize_rows: `dtype` is {dtype}; expected int8 or float8_e4m3fn; choose one of these storages."
        )
    real = rows.float()
    levels = _LEVELS[dtype]
    scales = (real.abs().amax(-1) / levels).clamp(min=torch.finfo(torch.float32).tiny)
    values = (real / scales[..., None]).clamp(-levels, levels)
    return (values.round() if dtype == torch.int8 else values).to(dtype), scales


def append_quantized_(
    storage: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Writes `rows` at `slots` of a storage, in place, each with a scale of its own; `quantize_rows` says how.

    No other slot is written. A slot outside of the storage, such as -1, takes nothing; two rows for one slot leave one
    of the two there.

    Args:
        storage: [B, G, S, D], int8 or float8_e4m3fn; D contiguous, other strides free.
        scales: float32 [B, G, S], any strides.
        rows: [B, G, T, D], float16, bfloat16 or float32; D contiguous. Must be finite.
        slots: int32 or int64 [B or 1, T], physical slots.
        backend: "triton", "torch", or "auto" for triton wherever it can run. "torch" reads `slots` on the host.

    Returns:
        `storage` itself.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, stride or device is wrong, or the backend cannot run the call.
        ImportError: backend "triton" without triton.
    """
    _append(storage, scales, rows, slots, backend)
    return storage


@torch.library.custom_op(operator_name("append_quantized_"), mutates_args=("storage", "scales"))
def _append(
    storage: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, backend: str
) -> None:
    _check(storage, scales, rows, slots)
    if choose_backend("append_quantized_", backend, rows, rows.shape[-1], "_append_kernel") == "triton":
        # Imported by name at the call, so that the package needs no triton.
        launch = importlib.import_module("._append_kernel", __package__).launch
        launch(storage, scales, rows, slots, _LEVELS[storage.dtype])
        return
    values, factors = quantize_rows(rows, storage.dtype)
    slot_BT = slots.expand(len(rows), -1)
    row, token = ((slot_BT >= 0) & (slot_BT < storage.shape[2])).nonzero(as_tuple=True)
    place = row, slice(None), slot_BT[row, token].long()
    # No indexed write of e4m3 is needed: its bytes are as good.
    storage.view(torch.uint8)[place] = values.view(torch.uint8)[row, :, token]
    scales[place] = factors[row, :, token]


@_append.register_fake
def _(storage: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, backend: str) -> None:
    _check(storage, scales, rows, slots)


def _check(storage: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Refuses whatever shapes, dtypes, strides and devices can tell."""
    for name, tensor, dtypes, wanted in (
        ("storage", storage, tuple(_LEVELS), "int8 or float8_e4m3fn"),
        ("scales", scales, (torch.float32,), "float32"),
        ("rows", rows, _REAL, "float16, bfloat16 or float32"),
        ("slots", slots, (torch.int32, torch.int64), "int32 or int64"),
    ):
        if tensor.dtype not in dtypes:
            raise TypeError(f"append_quantized_: `{name}` has dtype {tensor.dtype}; expected {wanted}; convert it.")
        if tensor.device != storage.device:
            raise ValueError(
                f"append_quantized_: `{name}` is on {tensor.device}; expected {storage.device}, where `storage` is; "
                "move it."
            )
    for name, tensor in (("storage", storage), ("rows", rows)):
        if tensor.ndim != 4 or (tensor.shape[3] > 1 and tensor.stride(3) != 1):
            raise ValueError(
                f"append_quantized_: `{name}` has shape {list(tensor.shape)} and strides {list(tensor.stride())}; "
                "expected four axes, the last one contiguous; reshape it."
            )
    B, G, S, D = storage.shape
    T = rows.shape[2]
    for name, tensor, shapes in (
        ("scales", scales, ([B, G, S],)),
        ("rows", rows, ([B, G, T, D],)),
        ("slots", slots, ([B, T], [1, T])),
    ):
        if list(tensor.shape) not in shapes:
            raise ValueError(
                f"append_quantized_: `{name}` has shape {list(tensor.shape)}; expected "
                f"{' or '.join(str(shape) for shape in shapes)}; pass what belongs to `storage`."
            )
