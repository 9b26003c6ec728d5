"""What vendors' functions compute, on host tensors in float32: shared by the mocked machines.

Which calls are refused, and which rows see which keys where documents leave a choice, is each machine's own.

Letters: B batch, S tokens, N heads, D head_dim, M rows, K in features.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """[B, S, N, D] in FlashAttention's order: the result and the log-sum-exp [B, N, Sq].

    causal is aligned at the last key; a row that sees nothing gives zeros.
    """
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2).float() for t in (k, v))
    scores = torch.einsum("bqnd,bknd->bnqk", q.float(), k) * scale
    if causal:
        rows, keys = q.shape[1], k.shape[1]
        seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
        scores = scores.masked_fill(~seen, -torch.inf)
    out = torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1).nan_to_num(0.0), v)
    return out.to(q.dtype), scores.logsumexp(-1)


def scaled_dot_product(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None
) -> Tensor:
    """[B, N, S, D] as torch's own function: causal is aligned at the first key, a mask may be of numbers."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1).float() for t in (key, value))
    scores = query.float() @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    return (scores.softmax(-1).nan_to_num(0.0) @ value).to(query.dtype)


def product_of_blocks(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """a [M, K] times b [N, K]: scales [M, K / 128] and [N / 128, K / 128] -> float32 [M, N]."""
    first = a.float() * a_scale.repeat_interleave(128, 1)
    second = b.float() * b_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return first @ second.t()
