"""The Triton half of `tree_attention`: one kernel over parts of the keys, one that merges the parts.

Shapes: B batch rows, H query heads, G key heads, R = H / G query heads of a key head, N tree nodes, S slots, D head
dimension, P parts ("splits") of the keys. A program handles BLOCK_M packed rows of one (batch row, key head): row
r is node r // R under query head r % R, so that all of them share each tile of keys.

The keys of a program are BLOCK_N at a time: tiles of the prefix, which every row sees up to its window, then tiles
of the tree, which the packed ancestor words decide. The parts divide that sequence of tiles evenly.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# Nothing that follows the tree's size, the batch or the window may be compiled in: N = 16 and N = 17 are one binary.
_RUNTIME = [
    "words_stride_b",
    "words_stride_n",
    "depth_stride_b",
    "k_scale_stride_b",
    "k_scale_stride_h",
    "v_scale_stride_b",
    "v_scale_stride_h",
    "n_nodes",
    "group",
    "heads_kv",
    "window",
]


@triton.jit
def _decoded(tile, dtype: tl.constexpr):
    """A tile of stored keys or values in `dtype`; bytes are e4m3 bits, for devices without that type."""
    if tile.dtype == tl.uint8:
        bits = tile.to(tl.uint16)
        # Sign, exponent and mantissa moved to their places in float16; 256 makes up for the other exponent bias, and
        # turns subnormals into what they stand for as well.
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        result = half.to(dtype)
    else:
        result = tile.to(dtype)
    return result


@triton.jit
def _attend(
    q,
    peak,
    total,
    acc,
    k_tile,
    v_tile,
    k_scale_tile,
    v_scale_tile,
    k_stride_s,
    v_stride_s,
    k_scale_stride_s,
    v_scale_stride_s,
    loaded,
    position,
    oldest,
    low,
    high,
    bit,
    scale,
    softcap,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GAIN: tl.constexpr,
    TREE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One step of the running softmax over a tile of keys.

    `loaded` [BLOCK_N] guards every load: a weight of zero does not silence a NaN in memory that nobody wrote. Who sees
    whom is put together after the product, where it occupies registers for a moment only: a key no older than `oldest`
    [BLOCK_M] by its `position` [BLOCK_N], and with TREE one whose bit is set in the row's words `low` and `high`, of
    which `bit` is the first. Rows beyond the last one attend like any other; they are not stored. `peak` is the
    largest score so far, in log2.
    """
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = loaded[:, None] & (d < D)[None, :]
    keys = _decoded(tl.load(k_tile + n[:, None] * k_stride_s + d[None, :], mask=inside, other=0.0), q.dtype)
    score = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    if k_scale_tile is not None:
        score *= tl.load(k_scale_tile + n * k_scale_stride_s, mask=loaded, other=0.0)[None, :]
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is right at both infinities.
        score = softcap - 2.0 * softcap / (tl.exp2(score * (2.0 * LOG2E / softcap)) + 1.0)
    score = tl.where(loaded[None, :], score * LOG2E, float("-inf"))
    if HAS_WINDOW:
        score = tl.where(position[None, :] >= oldest[:, None], score, float("-inf"))
    if TREE:
        word = tl.broadcast_to(low[:, None], score.shape)
        if BLOCK_N > 32:
            word = tl.where(n[None, :] < 32, word, high[:, None])
        score = tl.where(((word >> ((bit + n) % 32)[None, :]) & 1) != 0, score, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(score, 1))
    # A row that has seen nothing yet: -inf minus -inf would be NaN.
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = tl.exp2(score - safe[:, None])
    fade = tl.exp2(peak - safe)
    total = total * fade + tl.sum(weight, 1)
    if v_scale_tile is not None:
        weight *= tl.load(v_scale_tile + n * v_scale_stride_s, mask=loaded, other=0.0)[None, :] * GAIN
    values = _decoded(tl.load(v_tile + n[:, None] * v_stride_s + d[None, :], mask=inside, other=0.0), q.dtype)
    acc = tl.dot(weight.to(q.dtype), values, acc * fade[:, None], input_precision="ieee")
    return new_peak, total, acc


@triton.jit
def _with_sink(peak, total, acc, sink):
    """The running softmax after one more key of score `sink` (in log2) and value zero."""
    new_peak = tl.maximum(peak, sink)
    fade = tl.exp2(peak - new_peak)
    return new_peak, total * fade + tl.exp2(sink - new_peak), acc * fade[:, None]


@triton.jit(do_not_specialize=_RUNTIME)
def tree_attention_kernel(
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
    out,
    lse,
    q_stride_b,
    q_stride_h,
    q_stride_n,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    v_stride_b,
    v_stride_h,
    v_stride_s,
    words_stride_b,
    words_stride_n,
    depth_stride_b,
    k_scale_stride_b,
    k_scale_stride_h,
    k_scale_stride_s,
    v_scale_stride_b,
    v_scale_stride_h,
    v_scale_stride_s,
    n_nodes,
    group,
    heads_kv,
    window,
    scale,
    softcap,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GAIN: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr,
):
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    # 64-bit offsets: a storage may hold more than 2**31 elements.
    batch = (tl.program_id(2) // heads_kv).to(tl.int64)
    kv_head = tl.program_id(2) % heads_kv

    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = row < n_nodes * group
    node = row // group
    head = kv_head * group + row % group
    d = tl.arange(0, BLOCK_D)
    q_rows = q + batch * q_stride_b + head.to(tl.int64) * q_stride_h + node.to(tl.int64) * q_stride_n
    tile_q = tl.load(q_rows[:, None] + d[None, :], mask=row_ok[:, None] & (d < D)[None, :], other=0.0)
    if WIDE:
        tile_q = tile_q.to(tl.float32)

    length = tl.load(prefix_len + batch).to(tl.int32)
    first = length * 0
    if kv_start is not None:
        first = tl.load(kv_start + batch).to(tl.int32)
    oldest = row * 0
    if HAS_WINDOW:
        depths = depth + batch * depth_stride_b
        level = tl.load(depths + node, mask=row_ok, other=0).to(tl.int32)
        # No row of this program sees further back than its shallowest node.
        shallowest = tl.min(tl.where(row_ok, level, 2147483647), 0)
        first = tl.maximum(first, length + shallowest - window + 1)
        oldest = length + level - window + 1
    first = tl.minimum(tl.maximum(first, 0), length)
    origin = (first // BLOCK_N) * BLOCK_N

    prefix_tiles = tl.cdiv(length - origin, BLOCK_N)
    tiles = prefix_tiles + tl.cdiv(n_nodes, BLOCK_N)
    share = tl.cdiv(tiles, splits)
    begin = tl.minimum(split * share, tiles)
    end = tl.minimum(begin + share, tiles)

    keys = k + batch * k_stride_b + kv_head.to(tl.int64) * k_stride_h
    values = v + batch * v_stride_b + kv_head.to(tl.int64) * v_stride_h
    # Without scales these stay None, which the helper leaves out when it is compiled.
    key_scales = k_scale
    value_scales = v_scale
    if k_scale is not None:
        key_scales = k_scale + batch * k_scale_stride_b + kv_head * k_scale_stride_h
    if v_scale is not None:
        value_scales = v_scale + batch * v_scale_stride_b + kv_head * v_scale_stride_h

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    column = tl.arange(0, BLOCK_N)

    for tile in range(begin, tl.minimum(end, prefix_tiles)):
        slot = origin + tile * BLOCK_N
        loaded = (slot + column >= first) & (slot + column < length)
        far = slot.to(tl.int64)
        key_scales_tile = key_scales
        value_scales_tile = value_scales
        if k_scale is not None:
            key_scales_tile = key_scales + far * k_scale_stride_s
        if v_scale is not None:
            value_scales_tile = value_scales + far * v_scale_stride_s
        peak, total, acc = _attend(
            tile_q,
            peak,
            total,
            acc,
            keys + far * k_stride_s,
            values + far * v_stride_s,
            key_scales_tile,
            value_scales_tile,
            k_stride_s,
            v_stride_s,
            k_scale_stride_s,
            v_scale_stride_s,
            loaded,
            slot + column,
            oldest,
            node,
            node,
            0,
            scale,
            softcap,
            D,
            BLOCK_D,
            BLOCK_N,
            GAIN,
            False,
            HAS_WINDOW,
            HAS_SOFTCAP,
        )

    row_words = words + batch * words_stride_b + node * words_stride_n
    for tile in tl.range(tl.maximum(begin, prefix_tiles), end, num_stages=1):
        other = (tile - prefix_tiles) * BLOCK_N
        loaded = other + column < n_nodes
        # The words are read as halves of 32 bits, so that no shift needs 64.
        low = tl.load(row_words + other // 32, mask=row_ok, other=0)
        high = low
        if BLOCK_N > 32:
            high = tl.load(row_words + other // 32 + 1, mask=row_ok, other=0)
        position = column
        if HAS_WINDOW:
            position = length + tl.load(depths + other + column, mask=loaded, other=0).to(tl.int32)
        far = (length + other).to(tl.int64)
        key_scales_tile = key_scales
        value_scales_tile = value_scales
        if k_scale is not None:
            key_scales_tile = key_scales + far * k_scale_stride_s
        if v_scale is not None:
            value_scales_tile = value_scales + far * v_scale_stride_s
        peak, total, acc = _attend(
            tile_q,
            peak,
            total,
            acc,
            keys + far * k_stride_s,
            values + far * v_stride_s,
            key_scales_tile,
            value_scales_tile,
            k_stride_s,
            v_stride_s,
            k_scale_stride_s,
            v_scale_stride_s,
            loaded,
            position,
            oldest,
            low,
            high,
            other,
            scale,
            softcap,
            D,
            BLOCK_D,
            BLOCK_N,
            GAIN,
            True,
            HAS_WINDOW,
            HAS_SOFTCAP,
        )

    heads = heads_kv * group
    if SPLIT:
        place = ((split * (tl.num_programs(2) // heads_kv) + batch) * heads + head) * n_nodes + node
        row_of_out = place
    else:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=row_ok, other=0.0).to(tl.float32) * LOG2E
            peak, total, acc = _with_sink(peak, total, acc, sink)
        place = (batch * heads + head) * n_nodes + node
        row_of_out = (batch * n_nodes + node) * heads + head
    some = tl.where(total > 0.0, total, 1.0)
    result = acc / (some * GAIN)[:, None]
    log_total = tl.where(total > 0.0, peak + tl.log2(some), float("-inf"))
    if not SPLIT:
        log_total = log_total * LN2
    tl.store(lse + place, log_total, mask=row_ok)
    tl.store(
        out + row_of_out[:, None] * D + d[None, :],
        result.to(out.dtype.element_ty),
        mask=row_ok[:, None] & (d < D)[None, :],
    )


@triton.jit(do_not_specialize=["n_nodes", "splits"])
def merge_parts_kernel(
    parts,
    part_lse,
    sinks,
    out,
    lse,
    n_nodes,
    splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Merges the parts of one (node, head, batch row); the sink is counted here, once."""
    node = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    batch = tl.program_id(2).to(tl.int64)
    place = (batch * heads + head) * n_nodes + node
    step = tl.num_programs(2).to(tl.int64) * heads * n_nodes
    d = tl.arange(0, BLOCK_D)
    one = tl.arange(0, 1)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    for start in range(0, splits, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        part_ok = part < splits
        rows = part * step + place
        log_total = tl.load(part_lse + rows, mask=part_ok, other=float("-inf"))
        values = tl.load(parts + rows[:, None] * D + d[None, :], mask=part_ok[:, None] & (d < D)[None, :], other=0.0)
        new_peak = tl.maximum(peak, tl.max(log_total, 0))
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(log_total - safe)
        fade = tl.exp2(peak - safe)
        total = total * fade + tl.sum(weight, 0)
        acc = acc * fade[:, None] + tl.sum(weight[:, None] * values, 0)[None, :]
        peak = new_peak
    if sinks is not None:
        sink = tl.load(sinks + head + one).to(tl.float32) * LOG2E
        peak, total, acc = _with_sink(peak, total, acc, sink)
    some = tl.where(total > 0.0, total, 1.0)
    tl.store(lse + place + one, tl.where(total > 0.0, (peak + tl.log2(some)) * LN2, float("-inf")))
    row_of_out = ((batch * n_nodes + node) * heads + head) + one
    tl.store(
        out + row_of_out[:, None] * D + d[None, :],
        (acc / some[:, None]).to(out.dtype.element_ty),
        mask=(one >= 0)[:, None] & (d < D)[None, :],
    )


# Under TRITON_INTERPRET=1 the decorator returns an interpreted function, which runs on CPU tensors.
INTERPRETED = not isinstance(tree_attention_kernel, triton.JITFunction)
