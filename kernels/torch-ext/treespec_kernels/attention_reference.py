"""`tree_attention` in plain torch: what the kernel is compared with, and what runs where it cannot.

Shapes as in `attention`, and: K slots read, at most S; R query heads of a key head.
"""

import math

import torch

__all__ = ["tree_attention_reference"]


def tree_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tree_words: torch.Tensor,
    prefix_len: torch.Tensor,
    *,
    kv_start: torch.Tensor | None = None,
    depth: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    max_len: int | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [B, N, H, D] in q's dtype and the natural log-sum-exp [B, H, N], both as `tree_attention` gives them.

    Nothing is read on the host. Arguments as for `tree_attention`; they are not checked.

    Args:
        q: [B, H, N, D], float64 allowed.
        k: [B, G, S, D].
        v: [B, G, S, D].
        tree_words: int64 [B | 1, N, W].
        prefix_len: [B].
        kv_start: [B].
        depth: [B | 1, N].
        k_scale: broadcastable to [B, G, S].
        v_scale: broadcastable to [B, G, S].
        scale: factor of the scores.
        window: 0 for none.
        softcap: 0 for none.
        sinks: [H].
        max_len: slots behind `max_len` + N are not read.
        compute_dtype: what everything is computed in, and the dtype of the log-sum-exp; float64 for float64 queries
            and float32 for others by default. The output has it as well if it is given.
    """
    B, H, N, D = q.shape
    G, S = k.shape[1:3]
    K = S if max_len is None else min(S, max_len + N)
    wide = compute_dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32)
    allowed_BNK = _visible(tree_words, prefix_len, kv_start, depth, window, N, K)
    # What no row sees may hold anything, NaNs among them, and a weight of zero does not silence these.
    seen_BK = allowed_BNK.any(1)

    def stored(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        real = rows[:, :, :K].to(wide)
        if scales is not None:
            real = real * scales.expand(B, G, S)[:, :, :K, None].to(wide)
        return torch.where(seen_BK[:, None, :, None], real, 0.0)

    packed = q.to(wide).unflatten(1, (G, H // G)).flatten(2, 3)
    score = packed @ stored(k, k_scale).transpose(-1, -2) * (D**-0.5 if scale is None else scale)
    score = score.unflatten(2, (H // G, N))
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    score = torch.where(allowed_BNK[:, None, None], score, -math.inf)
    if sinks is not None:
        sink = sinks.to(wide).reshape(1, G, H // G, 1, 1).expand(B, -1, -1, N, 1)
        score = torch.cat([score, sink], -1)
    # A row that sees nothing has the sum 0 and the output 0.
    peak = score.amax(-1, keepdim=True).clamp(min=torch.finfo(wide).min) if score.shape[-1] else score.new_zeros(1)
    weight = torch.exp(score - peak)
    total = weight.sum(-1, keepdim=True)
    weight = (weight / torch.where(total > 0, total, 1.0))[..., :K]
    out = (weight.flatten(2, 3) @ stored(v, v_scale)).reshape(B, H, N, D)
    lse = (peak + torch.log(total)).reshape(B, H, N)
    return out.transpose(1, 2).to(compute_dtype or q.dtype).contiguous(), lse


def _visible(
    tree_words: torch.Tensor,
    prefix_len: torch.Tensor,
    kv_start: torch.Tensor | None,
    depth: torch.Tensor | None,
    window: int,
    N: int,
    K: int,
) -> torch.Tensor:
    """Bool [B, N, K]: which slots each node sees."""
    slot_K = torch.arange(K, device=prefix_len.device)
    base_B1 = prefix_len.long()[:, None]
    other_BK = slot_K - base_B1
    in_prefix_BK = other_BK < 0
    in_tree_BK = (other_BK >= 0) & (other_BK < N)
    if kv_start is not None:
        in_prefix_BK = in_prefix_BK & (slot_K >= kv_start.long()[:, None])
    node_BK = other_BK.clamp(0, N - 1)
    bits = torch.arange(64, device=tree_words.device)
    ancestor_BNN = ((tree_words[..., None] >> bits) & 1).flatten(2)[..., :N].bool().expand(len(prefix_len), N, N)
    ancestor_BNK = ancestor_BNN.gather(2, node_BK[:, None].expand(-1, N, -1))
    allowed_BNK = torch.where(in_tree_BK[:, None], ancestor_BNK, in_prefix_BK[:, None])
    if window > 0:
        assert depth is not None  # checked by the caller
        depth_BN = depth.long().expand(len(prefix_len), N)
        key_BK = torch.where(in_tree_BK, depth_BN.gather(1, node_BK), other_BK)
        allowed_BNK = allowed_BNK & (depth_BN[:, :, None] - key_BK[:, None] < window)
    return allowed_BNK
