"""The seams: what a model calls and a backend may do better.

Each seam is a small module with a plain PyTorch body, which is the documentation, the fallback and the oracle
of the conformance suite. `bind` sets `run` to the backend's function of the same signature; a model never
knows.

Letters: B batch, S tokens, C channels, N heads, D head_dim, R rows of a modulation table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from portable_dit.masks import NO_MASK, Mask, to_keep


@dataclass(frozen=True)
class Modulation:
    """Shift, scale and gate for every row, kept as a small table and an index into it.

    table: [R, chunks, C] in the activation dtype, one entry per distinct (timestep, tag).
    index: int64 [B, S], the entry of each row. Chunks of a block: shift, scale, gate of attention, then
    of the MLP.
    """

    table: Tensor
    index: Tensor

    def rows(self, chunk: int) -> Tensor:
        """One chunk spread over the rows: [B, S, C]."""
        return F.embedding(self.index, self.table[:, chunk])


@dataclass(frozen=True)
class Rotary:
    """cos, sin: [B, S, pairs] or [1, S, pairs] in the activation dtype; channel i pairs with i + pairs."""

    cos: Tensor
    sin: Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm over the last dim with float32 statistics, result in the dtype of x."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * (1.0 if weight is None else weight)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
    """Softmax attention in the open: q [B, Sq, N, D], k and v [B, Sk, Nkv, D] -> [B, Sq, N, D].

    Scores and softmax are float32: scores rounded to bfloat16 are off by a tenth where they reach 30. Query
    heads share key heads in equal groups when N > Nkv. A row that sees nothing gives zeros.
    """
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, dim=2) if groups > 1 else t for t in (k, v))
    scores = torch.einsum("bqnd,bknd->bnqk", q.float(), k.float()) * scale  # [B, N, Sq, Sk]
    keep = to_keep(mask, q.shape[1], k.shape[1], q.device)
    if keep is not None:
        scores = scores.masked_fill(~keep, float("-inf"))
    weights = scores.softmax(dim=-1)
    if keep is not None:
        weights = weights.masked_fill(~keep.any(dim=-1, keepdim=True), 0.0)
    return torch.einsum("bnqk,bknd->bqnd", weights.to(v.dtype), v)


def norm_modulate(x: Tensor, weight: Tensor, eps: float, modulation: Modulation, chunk: int) -> Tensor:
    """rms_norm(x) * (1 + scale) + shift, shift at `chunk`, scale at `chunk + 1`: [B, S, C] -> [B, S, C]."""
    return rms_norm(x, weight, eps) * (1 + modulation.rows(chunk + 1)) + modulation.rows(chunk)


def gated_residual(x: Tensor, branch: Tensor, modulation: Modulation, chunk: int) -> Tensor:
    """x + gate * branch, with gate at `chunk`: [B, S, C] each."""
    return x + modulation.rows(chunk) * branch


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotary embedding of the first 2 * pairs channels in rotate-half style, the rest kept: [B, S, N, D]."""
    pairs = rotary.cos.shape[-1]
    cos, sin = rotary.cos[:, :, None], rotary.sin[:, :, None]  # [B, S, 1, pairs]
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def head_norm_rotary(x: Tensor, weight: Tensor | None, eps: float, rotary: Rotary | None) -> Tensor:
    """Per-head RMS norm, then rotary if given: [B, S, N, D] -> [B, S, N, D]."""
    x = rms_norm(x, weight, eps)
    return x if rotary is None else rotate(x, rotary)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * value of a last dim laid out [gate ; value]: [..., 2F] -> [..., F]."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


class Seam(nn.Module):
    """A place where a backend may put its own function. `op` is the name that kernels are listed under."""

    op: ClassVar[str]

    def __init__(self, plain: Callable[..., Any]) -> None:
        super().__init__()
        self.run = plain


class Attention(Seam):
    """Attention over [B, S, N, D] with an explicit scale."""

    op = "attention"

    def __init__(self, num_heads: int, head_dim: int, *, num_kv_heads: int | None = None) -> None:
        super().__init__(attention)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask = NO_MASK) -> Tensor:
        out: Tensor = self.run(q, k, v, mask, scale=self.scale)
        return out


class ModulatedNorm(Seam):
    """RMS norm followed by shift and scale from a modulation table; owns the norm's weight [C]."""

    op = "norm_modulate"

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__(norm_modulate)
        self.weight = nn.Parameter(torch.ones(channels))
        self.eps = eps

    def forward(self, x: Tensor, modulation: Modulation, chunk: int) -> Tensor:
        out: Tensor = self.run(x, self.weight, self.eps, modulation, chunk)
        return out


class GatedResidual(Seam):
    """x + gate * branch, gate from a modulation table."""

    op = "gated_residual"

    def __init__(self) -> None:
        super().__init__(gated_residual)

    def forward(self, x: Tensor, branch: Tensor, modulation: Modulation, chunk: int) -> Tensor:
        out: Tensor = self.run(x, branch, modulation, chunk)
        return out


class HeadNormRotary(Seam):
    """Per-head RMS norm of queries or keys, then rotary; owns the norm's weight [D] unless told not to."""

    op = "head_norm_rotary"

    def __init__(self, head_dim: int, eps: float, *, has_weight: bool = True) -> None:
        super().__init__(head_norm_rotary)
        self.weight = nn.Parameter(torch.ones(head_dim)) if has_weight else None
        self.eps = eps

    def forward(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        out: Tensor = self.run(x, self.weight, self.eps, rotary)
        return out


class SwiGLU(Seam):
    """silu(gate) * value over the two halves of the last dim."""

    op = "swiglu"

    def __init__(self) -> None:
        super().__init__(swiglu)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.run(x)
        return out


class RMSNorm(Seam):
    """RMS norm with a weight [C], float32 statistics."""

    op = "rms_norm"

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__(rms_norm)
        self.weight = nn.Parameter(torch.ones(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.run(x, self.weight, self.eps)
        return out
