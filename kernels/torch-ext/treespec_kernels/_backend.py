"""Which implementation runs a call: decided when it is made, by what is at hand then."""

import importlib

import torch

__all__ = ["BACKENDS", "choose_backend"]

BACKENDS = ("auto", "triton", "torch")
# What a tile of the kernel can hold.
LARGEST_HEAD_DIM = 512


def choose_backend(name: str, asked: str, tensor: torch.Tensor, head_dim: int, launcher: str) -> str:
    """Which of "triton" and "torch" runs a call; "auto" takes the kernel wherever it can run.

    Args:
        name: of the function, for messages.
        asked: one of `BACKENDS`.
        tensor: the call's queries or rows.
        head_dim: D.
        launcher: module of this package that launches the kernel and knows whether it is interpreted.

    Raises:
        ValueError: `asked` is no backend, or "triton" cannot run the call.
        ImportError: "triton" was asked for and is not installed.
    """
    if asked not in BACKENDS:
        raise ValueError(f"{name}: `backend` is {asked!r}; expected one of {BACKENDS}; choose one.")
    if asked == "torch":
        return "torch"
    reason = None
    if tensor.dtype == torch.float64:
        reason = "float64, which it does not compute in"
    elif head_dim > LARGEST_HEAD_DIM:
        reason = f"a head dimension of {head_dim}, above {LARGEST_HEAD_DIM}"
    else:
        try:
            interpreted = importlib.import_module(f".{launcher}", __package__).INTERPRETED
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "triton":
                raise
            if asked == "triton":
                raise ImportError(
                    f"{name}: backend='triton' needs triton, which is not installed; install the extra "
                    "`hf-treespec[kernels]`, or pass backend='torch'."
                ) from error
            return "torch"
        if not (tensor.is_cuda or (interpreted and tensor.is_cpu)):
            reason = f"tensors on {tensor.device}, where no kernel runs"
    if reason is None:
        return "triton"
    if asked == "triton":
        raise ValueError(f"{name}: backend='triton' was given {reason}; pass backend='torch' or 'auto'.")
    return "torch"
