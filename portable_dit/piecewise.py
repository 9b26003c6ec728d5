"""Attention kernels that backends share: a mask in pieces, torch's own function pinned, and the open sum.

A kernel of matrix units is two calls, attention over all keys and causal attention with as many queries as
keys. Every mask becomes a few of those (pieces.py), or, for padded keys, one call that says which are kept.
No mask of [S, S] is made for the others and nothing waits for the device, so all of it can be captured.

Letters: B batch, S tokens, N heads, D head_dim.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from portable_dit.backend import AttentionKernel
from portable_dit.capabilities import AttentionRequest, Capabilities, Reject
from portable_dit.masks import KeyPadding, Mask
from portable_dit.pieces import Piece, pieces

HALVES = frozenset({"bfloat16", "float16"})
ALL_MASKS = frozenset({"none", "causal", "causal_with_full_spans", "segments", "key_padding"})
MASKS_IN_PIECES = ALL_MASKS - {"key_padding"}
CHUNK_BYTES = 256 << 20  # of float32 scores at once in the kernel that computes in the open


class PiecewiseAttention(AttentionKernel):
    """What all kernels share: a mask in pieces, rows that see nothing, a single key.

    A subclass states its limits, and overrides `whole`, `padded` if it takes padded keys, and
    `refuse_further` for limits of its own.
    """

    dtypes: frozenset[str] = HALVES
    masks: frozenset[str] = ALL_MASKS
    head_dim_multiple = 8
    max_head_dim = 256
    gives_lse = False
    causal_at_last = True  # False: the library aligns its causal mask at the first key

    def refuse(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        if request.dtype not in self.dtypes:
            return Reject("dtype", f"takes {', '.join(sorted(self.dtypes))}, not {request.dtype}")
        if request.head_dim % self.head_dim_multiple or request.head_dim > self.max_head_dim:
            step = self.head_dim_multiple
            taken = f"takes {'heads' if step == 1 else f'multiples of {step}'} up to {self.max_head_dim}"
            return Reject("head_dim", f"{taken}, not {request.head_dim}")
        if request.num_heads % request.num_kv_heads:
            return Reject(
                "heads", f"{request.num_kv_heads} key heads must divide {request.num_heads} query heads"
            )
        if request.mask not in self.masks:
            return Reject("mask", f"does not take mask {request.mask}")
        if request.return_lse and not self.gives_lse:
            return Reject("lse", "does not give the log-sum-exp")
        return self.refuse_further(request, capabilities)

    def refuse_further(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        """What only this kernel refuses, such as a chip or a library that is not there."""
        return None

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
        if isinstance(mask, KeyPadding):
            out = self.padded(q, k, v, mask.keep, scale=scale)
            return out.masked_fill(~mask.keep.any(dim=1)[:, None, None, None], 0.0)
        parts = pieces(mask, q.shape[1], k.shape[1])
        if parts == [Piece(0, q.shape[1], 0, k.shape[1])]:
            return self._piece(q, k, v, causal=False, scale=scale)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for part in parts:
            out[:, part.start : part.stop] = self._piece(
                q[:, part.start : part.stop],
                k[:, part.first : part.last],
                v[:, part.first : part.last],
                causal=part.causal,
                scale=scale,
            )
        return out

    def whole(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        """Attention [B, Sq, N, D] over all keys, or causal with the last query at the last key."""
        raise AssertionError("each kernel has its own")

    def padded(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, *, scale: float) -> Tensor:
        """Attention over the keys that keep [B, Sk] says; anything for an entry that keeps none."""
        raise AssertionError("each kernel that takes the mask has its own")

    def _piece(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        if k.shape[1] == 1:  # one key has all the weight; some libraries refuse the case
            return v.repeat_interleave(q.shape[2] // v.shape[2], dim=2).expand(q.shape)
        causal = causal and q.shape[1] > 1  # the last query sees all
        missing = k.shape[1] - q.shape[1]
        if causal and missing and not self.causal_at_last:
            q = F.pad(q, (0, 0, 0, 0, missing, 0))  # rows before the queries, dropped again
            return self.whole(q, k, v, causal=True, scale=scale)[:, missing:]
        return self.whole(q, k, v, causal=causal, scale=scale)


class SdpaAttention(PiecewiseAttention):
    """torch's scaled_dot_product_attention, pinned: given a list it falls to another one unseen.

    grouped: whether that implementation shares key heads by itself; where not, they are repeated.
    """

    causal_at_last = False

    def __init__(
        self,
        id: str,
        implementation: SDPBackend,
        *,
        dtypes: frozenset[str] = HALVES,
        masks: frozenset[str] = ALL_MASKS,
        max_head_dim: int = 256,
        grouped: bool = True,
    ) -> None:
        self.id = id
        self.dtypes = dtypes
        self.masks = masks
        self.max_head_dim = max_head_dim
        self.implementation = implementation
        self._grouped = grouped

    def whole(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        return self._call(q, k, v, None, causal=causal, scale=scale)

    def padded(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, *, scale: float) -> Tensor:
        # bool, since float32 beside bfloat16 gave wrong numbers without an error (pytorch#191612).
        return self._call(q, k, v, keep[:, None, None, :], causal=False, scale=scale)

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, *, causal: bool, scale: float
    ) -> Tensor:
        shared = q.shape[2] != k.shape[2]
        if shared and not self._grouped:
            k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
            shared = False
        if keep is not None:
            keep = keep.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        with sdpa_kernel(self.implementation):
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=keep,
                is_causal=causal,
                scale=scale,
                enable_gqa=shared,
            )
        return out.transpose(1, 2)  # [B, S, N, D]


class ChunkedAttention(PiecewiseAttention):
    """Scores and softmax in float32, over chunks of queries so that memory stays bounded: the last resort.

    Gives the log-sum-exp, which torch's own functions do not.
    """

    id = "chunked"

    def refuse(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        if request.num_heads % request.num_kv_heads:
            return Reject(
                "heads", f"{request.num_kv_heads} key heads must divide {request.num_heads} query heads"
            )
        if request.dtype not in capabilities.dtypes:
            return Reject(
                "dtype", f"this device has {', '.join(sorted(capabilities.dtypes))}, not {request.dtype}"
            )
        return None

    def run_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        batch, rows, heads, _ = q.shape
        if isinstance(mask, KeyPadding):
            return self._chunks(q, k, v, mask.keep[:, None, None, :], causal=False, scale=scale)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lse = torch.full((batch, heads, rows), -math.inf, device=q.device)
        for part in pieces(mask, rows, k.shape[1]):
            here, keys = slice(part.start, part.stop), slice(part.first, part.last)
            out[:, here], lse[:, :, here] = self._chunks(
                q[:, here], k[:, keys], v[:, keys], None, causal=part.causal, scale=scale
            )
        return out, lse

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
        return self.run_with_lse(q, k, v, mask, scale=scale)[0]

    def _chunks(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        batch, rows_q, heads, _ = q.shape
        rows_k = k.shape[1]
        k, v = (t.repeat_interleave(heads // t.shape[2], dim=2).transpose(1, 2).float() for t in (k, v))
        step = max(CHUNK_BYTES // (4 * batch * heads * rows_k), 16)
        outs, lses = [], []
        for start in range(0, rows_q, step):
            chunk = q[:, start : start + step].transpose(1, 2).float()  # [B, N, rows, D]
            scores = chunk @ k.transpose(-1, -2) * scale  # [B, N, rows, Sk]
            if causal:
                at = torch.arange(start, start + chunk.shape[2], device=q.device) + rows_k - rows_q
                keep = torch.arange(rows_k, device=q.device)[None, :] <= at[:, None]
            if keep is not None:
                scores = scores.masked_fill(~keep, -math.inf)
            lse = scores.logsumexp(dim=-1)  # [B, N, rows]
            # -inf - -inf is NaN: a row that sees nothing, which gives zeros
            weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
            outs.append((weights @ v).transpose(1, 2).to(q.dtype))
            lses.append(lse)
        return torch.cat(outs, dim=1), torch.cat(lses, dim=2)


def sorted_keys(k: Tensor, v: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values with the kept rows first, in order, and how many there are: int32 [B].

    Attention does not care for the order of keys. Shapes stay fixed, so the device is not waited for.
    """
    order = torch.argsort(~keep, dim=1, stable=True)  # [B, Sk]
    index = order[:, :, None, None]
    k, v = (torch.take_along_dim(t, index, dim=1) for t in (k, v))
    return k, v, keep.sum(dim=1, dtype=torch.int32)
