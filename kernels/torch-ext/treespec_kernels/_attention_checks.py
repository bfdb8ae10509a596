"""What `tree_attention` refuses: everything that shapes, dtypes, strides and devices can tell.

Shapes as in `attention`.
"""

import torch

__all__ = ["check_arguments", "check_values"]

_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_STORED = (torch.int8, torch.float8_e4m3fn)
_INTEGER = (torch.int32, torch.int64)


def _refuse(name: str, found: object, expected: str, remedy: str) -> ValueError:
    return ValueError(f"tree_attention: `{name}` {found}; expected {expected}; {remedy}.")


def check_arguments(
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
    window: int,
    softcap: float,
    max_len: int | None,
) -> None:
    """Raises for arguments that do not fit together; reads no value.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, stride, device or number is wrong.
    """
    _check_storage(q, k, v)
    B, H, N, _ = q.shape
    G, S = k.shape[1:3]
    if not N:
        raise _refuse("q", f"has shape {list(q.shape)}", "at least one node", "leave out a forward of no tokens")
    if N > S:
        raise _refuse("k", f"has {S} slots", f"at least the {N} of the tree", "grow the cache before the forward")
    if tree_words.dtype != torch.int64:
        raise TypeError(
            f"tree_attention: `tree_words` has dtype {tree_words.dtype}; expected torch.int64; pack 64 nodes a word."
        )
    words = -(-N // 64)
    if tree_words.ndim != 3 or tree_words.shape[0] not in (1, B) or tuple(tree_words.shape[1:]) != (N, words):
        raise _refuse(
            "tree_words",
            f"has shape {list(tree_words.shape)}",
            f"[{B} or 1, {N}, {words}]",
            "pass the words of every node, one tree or one for each row",
        )
    vectors = {"prefix_len": (prefix_len, (B,)), "kv_start": (kv_start, (B,)), "depth": (depth, None)}
    for name, (tensor, shape) in vectors.items():
        if tensor is None:
            continue
        if tensor.dtype not in _INTEGER:
            raise TypeError(
                f"tree_attention: `{name}` has dtype {tensor.dtype}; expected torch.int32; pass {name}.int()."
            )
        if shape is not None and (tuple(tensor.shape) != shape or not tensor.is_contiguous()):
            raise _refuse(name, f"has shape {list(tensor.shape)}", f"a contiguous [{B}]", "pass one number a row")
    if depth is not None and (depth.ndim != 2 or depth.shape[0] not in (1, B) or depth.shape[1] != N):
        raise _refuse("depth", f"has shape {list(depth.shape)}", f"[{B} or 1, {N}]", "pass the depth of every node")
    for name, scales in {"k_scale": k_scale, "v_scale": v_scale}.items():
        if scales is None:
            continue
        if scales.dtype != torch.float32:
            raise TypeError(
                f"tree_attention: `{name}` has dtype {scales.dtype}; expected torch.float32; pass {name}.float()."
            )
        if scales.ndim > 3 or any(
            have not in (1, want) for have, want in zip(reversed(scales.shape), (S, G, B), strict=False)
        ):
            raise _refuse(
                name, f"has shape {list(scales.shape)}", f"one that broadcasts to [{B}, {G}, {S}]", "reshape"
            )
    if sinks is not None and (tuple(sinks.shape) != (H,) or sinks.dtype not in _REAL or not sinks.is_contiguous()):
        raise _refuse("sinks", f"has shape {list(sinks.shape)}", f"[{H}] floats", "pass one score a query head")
    for name, other in {
        "k": k,
        "v": v,
        "tree_words": tree_words,
        "prefix_len": prefix_len,
        "kv_start": kv_start,
        "depth": depth,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "sinks": sinks,
    }.items():
        if other is not None and other.device != q.device:
            raise _refuse(name, f"is on {other.device}", f"{q.device}, where `q` is", "move it")
    if window < 0:
        raise _refuse("window", f"is {window}", "0 for none, or the positions a node sees", "pass 0 or more")
    if window and depth is None:
        raise _refuse("depth", "is None", f"[{B} or 1, {N}] with window={window}", "pass the depth of every node")
    if not softcap >= 0.0:
        raise _refuse("softcap", f"is {softcap}", "0 for none, or a positive number", "pass 0.0 or more")
    if max_len is not None and max_len < 0:
        raise _refuse("max_len", f"is {max_len}", "a bound on `prefix_len`", "pass 0 or more")


def _check_storage(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        if tensor.ndim != 4:
            axes = "[B, H, N, D]" if name == "q" else "[B, G, S, D]"
            raise _refuse(name, f"has shape {list(tensor.shape)}", axes, "reshape it")
        if tensor.shape[3] > 1 and tensor.stride(3) != 1:
            raise _refuse(name, f"has strides {list(tensor.stride())}", "1 for the last axis", "keep D innermost")
    if q.dtype not in _REAL:
        raise TypeError(f"tree_attention: `q` has dtype {q.dtype}; expected one of {_names(_REAL)}; convert it.")
    if k.dtype not in (q.dtype, *_STORED) or v.dtype != k.dtype:
        raise TypeError(
            f"tree_attention: `k` and `v` have dtypes {k.dtype} and {v.dtype}; expected both {q.dtype}, as `q`, or "
            f"both one of {_names(_STORED)}; store keys and values alike."
        )
    if k.shape != v.shape:
        raise _refuse(
            "v",
            f"has shape {list(v.shape)}",
            f"that of `k`, {list(k.shape)}",
            "use another attention for heads whose keys and values differ in size",
        )
    B, H, _, D = q.shape
    if k.shape[0] != B or k.shape[3] != D or not k.shape[1] or H % k.shape[1]:
        raise _refuse(
            "k", f"has shape {list(k.shape)}", f"[{B}, a divisor of {H}, S, {D}]", "pass the cache of the same layer"
        )


def check_values(
    q: torch.Tensor,
    k: torch.Tensor,
    prefix_len: torch.Tensor,
    kv_start: torch.Tensor | None,
    max_len: int | None,
) -> None:
    """Refuses lengths that leave the storage; for tensors on a CPU, where reading them waits for nobody.

    Raises:
        ValueError: a length is wrong.
    """
    room = k.shape[2] - q.shape[2]
    if ((prefix_len < 0) | (prefix_len > room)).any():
        raise _refuse(
            "prefix_len", f"is {prefix_len.tolist()}", f"0..{room}, so that the tree fits behind it", "grow the cache"
        )
    if max_len is not None and (prefix_len > max_len).any():
        raise _refuse("max_len", f"is {max_len}", f"at least `prefix_len`, {prefix_len.tolist()}", "raise the bound")
    if kv_start is not None and ((kv_start < 0) | (kv_start > prefix_len)).any():
        raise _refuse(
            "kv_start", f"is {kv_start.tolist()}", f"0 to `prefix_len`, {prefix_len.tolist()}", "count the padding"
        )


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
