"""The seams: what a model calls and a backend may do better.

Each seam is a small module with a plain PyTorch body, which is the documentation, the fallback and the oracle
of the conformance suite. `bind` sets `run` to the backend's function of the same signature; a model never
knows.

Letters: B batch, S tokens, C channels, N heads, D head_dim, R rows of a modulation table; for experts M rows,
E experts, k of them for each row; for clips T frames, h w cells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from portable_dit.masks import NO_MASK, Mask, to_keep

T = TypeVar("T")
CHUNK_BYTES = 512 << 20  # of float32 values that a norm of frames holds at once


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


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of rows that come before all queries: [B, L, Nkv, D] each."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Dispatch:
    """Which rows go to which expert.

    rows: int64 [R], rows of x ordered by their expert; None = x is in order. ends: int32 [E], where the rows
    of each expert end. Rows behind the last end belong to no expert here.
    """

    rows: Tensor | None
    ends: Tensor
    _known: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def in_order(self) -> Dispatch:
        """The same for rows that were ordered before."""
        return Dispatch(None, self.ends, self._known)

    def once(self, name: str, make: Callable[[Tensor], T]) -> T:
        """make(ends), worked out for the first layer of a mixture that asks and kept for the next."""
        if name not in self._known:
            self._known[name] = make(self.ends)
        known: T = self._known[name]
        return known

    def parts(self) -> list[tuple[int, slice]]:
        """The experts that have rows, and which: asks the device."""
        return self.once("parts", _parts)


def _parts(ends: Tensor) -> list[tuple[int, slice]]:
    found, start = [], 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            found.append((expert, slice(start, end)))
        start = end
    return found


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


def norm_cast(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """rms_norm of a stream that is wider than what comes next: [..., C] float32 -> [..., C] in dtype."""
    return rms_norm(x, weight, eps).to(dtype)


def scaled_residual(x: Tensor, branch: Tensor, scale: Tensor) -> Tensor:
    """x + scale * branch in the dtype of x, which may be wider than the branch's: [..., C], scale [C]."""
    return x + scale * branch


def frame_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, activate: bool) -> Tensor:
    """Group norm over all frames of a clip, float32 inside, then SiLU if asked for: [B, T, C, h, w] and back.

    Some groups at a time, since float32 doubles the largest tensors there are.
    """
    size = x.shape[2] // groups
    step = max(CHUNK_BYTES // (4 * x.numel() // groups), 1) * size
    out = torch.empty_like(x)
    for start in range(0, x.shape[2], step):
        part = slice(start, start + step)
        values = x[:, :, part].float().view(*x.shape[:2], -1, size, *x.shape[3:])  # [B, T, groups, .., h, w]
        variance, mean = torch.var_mean(values, dim=(1, 3, 4, 5), keepdim=True, correction=0)
        values = ((values - mean) * torch.rsqrt(variance + eps)).flatten(2, 3)
        values = values * weight[part, None, None].float() + bias[part, None, None].float()
        out[:, :, part] = F.silu(values) if activate else values
    return out


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


def rotary_head_norm(x: Tensor, weight: Tensor, eps: float, rotary: Rotary) -> Tensor:
    """Rotary first and the per-head RMS norm after it, float32 in between: [B, S, N, D] -> [B, S, N, D].

    rotary: in float32, over all of D.
    """
    return rms_norm(rotate(x.float(), rotary), weight.float(), eps).to(x.dtype)


def route(x: Tensor, weight: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The experts of each row and their shares: x [M, C], weight [E, C] -> int64 [M, k], float32 [M, k].

    Float32, since near ties decide which experts see a row. Shares are those of the softmax over all experts,
    scaled to add up to one.
    """
    shares, index = F.linear(x.float(), weight.float()).softmax(dim=-1).topk(top_k, dim=-1)
    return index, shares / shares.sum(dim=-1, keepdim=True).clamp_min(1e-8)


def deal(index: Tensor, first: int, held: int, num_experts: int) -> tuple[Dispatch, Tensor]:
    """The choices of all rows ordered by expert: index int64 [M, k] -> who gets which rows, and places.

    first, held: which of the experts are here; choices of others come last. Choices of one expert keep the
    order of their rows. places: int64 [M, k], where in that order each choice stands. Counted on the device:
    nothing of the routing goes to the host.
    """
    chosen = index.flatten()
    if held < num_experts:
        here = chosen - first
        chosen = torch.where((here >= 0) & (here < held), here, held)
    # As short numbers, of which a sort by digits has two and not eight.
    experts, order = chosen.to(torch.int16).sort(stable=True)  # [M * k]
    numbers = torch.arange(held, dtype=torch.int16, device=index.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=index.device)
    return Dispatch(order // index.shape[1], ends), places.view(index.shape)


def expert_linear(x: Tensor, weight: Tensor, dispatch: Dispatch) -> Tensor:
    """Each row through its expert's matrix: x [M, K], weight [E, N, K] -> [R, N], ordered by expert.

    Rows behind the last end give anything: nobody reads them.
    """
    rows = x if dispatch.rows is None else x[dispatch.rows]  # [R, K]
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    for expert, part in dispatch.parts():
        out[part] = F.linear(rows[part], weight[expert])
    return out


def combine_experts(x: Tensor, places: Tensor, shares: Tensor) -> Tensor:
    """The sum of each row's experts by share: x [R, C], places int64 [M, k], shares float32 [M, k] -> [M, C].

    Summed in float32, one expert after the other in the order of `places`, so that the result does not depend
    on who else is in the batch.
    """
    out = torch.zeros(places.shape[0], x.shape[1], dtype=torch.float32, device=x.device)
    for choice in range(places.shape[1]):
        out.addcmul_(x[places[:, choice]].float(), shares[:, choice, None])
    return out.to(x.dtype)


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

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask = NO_MASK, prefix: KeyValues | None = None
    ) -> Tensor:
        """prefix: keys and values in front of k and v, of rows that are done; the mask counts them."""
        if prefix is not None:
            k, v = torch.cat([prefix.k, k], dim=1), torch.cat([prefix.v, v], dim=1)
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


class CastingNorm(Seam):
    """RMS norm of a float32 stream for layers of another dtype; owns the norm's weight [C]."""

    op = "norm_cast"

    def __init__(self, channels: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__(norm_cast)
        self.weight = nn.Parameter(torch.ones(channels))
        self.eps = eps
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.run(x, self.weight, self.eps, self.dtype)
        return out


class ScaledResidual(Seam):
    """x + scale * branch, with one scale for each channel."""

    op = "scaled_residual"

    def __init__(self) -> None:
        super().__init__(scaled_residual)

    def forward(self, x: Tensor, branch: Tensor, scale: Tensor) -> Tensor:
        out: Tensor = self.run(x, branch, scale)
        return out


class FrameNorm(Seam):
    """Group norm over all frames of a clip, with SiLU unless told not to; owns weight and bias [C]."""

    op = "frame_norm"

    def __init__(self, channels: int, groups: int, eps: float) -> None:
        super().__init__(frame_norm)
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.groups = groups
        self.eps = eps

    def forward(self, x: Tensor, *, activate: bool = True) -> Tensor:
        out: Tensor = self.run(x, self.weight, self.bias, self.groups, self.eps, activate)
        return out


class RotaryHeadNorm(Seam):
    """Rotary embedding of queries or keys, then the per-head RMS norm; owns the norm's weight [D]."""

    op = "rotary_head_norm"

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__(rotary_head_norm)
        self.weight = nn.Parameter(torch.ones(head_dim))
        self.eps = eps

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        out: Tensor = self.run(x, self.weight, self.eps, rotary)
        return out


class Router(Seam):
    """Chooses k experts for each row; owns the router's weight [E, C]."""

    op = "route"

    def __init__(self, channels: int, num_experts: int, top_k: int) -> None:
        super().__init__(route)
        self.weight = nn.Parameter(torch.zeros(num_experts, channels))
        self.top_k = top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        index, shares = self.run(x, self.weight, self.top_k)
        return index, shares


class ExpertLinear(Seam):
    """The linear layers of several experts as one weight [E, N, K]; a loader fills it one expert at a time.

    first: number of the first expert that is held here.
    """

    op = "expert_linear"

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__(expert_linear)
        self.first = 0
        self.num_experts = num_experts
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.zeros(num_experts, out_features, in_features))

    def hold(self, first: int, count: int) -> None:
        """Keeps `count` experts from `first` on, before weights arrive: what one device of several holds."""
        shape = count, *self.weight.shape[1:]
        self.first, self.num_experts = first, count
        self.weight = nn.Parameter(self.weight.new_empty(shape), requires_grad=False)

    def forward(self, x: Tensor, dispatch: Dispatch) -> Tensor:
        out: Tensor = self.run(x, self.weight, dispatch)
        return out


class Deal(Seam):
    """Orders the choices of rows by expert."""

    op = "deal"

    def __init__(self) -> None:
        super().__init__(deal)

    def forward(self, index: Tensor, first: int, held: int, num_experts: int) -> tuple[Dispatch, Tensor]:
        dispatch, places = self.run(index, first, held, num_experts)
        return dispatch, places


class CombineExperts(Seam):
    """The weighted sum of what a row's experts gave."""

    op = "combine_experts"

    def __init__(self) -> None:
        super().__init__(combine_experts)

    def forward(self, x: Tensor, places: Tensor, shares: Tensor) -> Tensor:
        out: Tensor = self.run(x, places, shares)
        return out


class Experts(nn.Module):
    """Gated MLPs, of which each row passes the k that were chosen for it: [M, C] -> [M, C].

    Choices of experts that are held elsewhere (`ExpertLinear.hold`) add nothing, so the sum over all holders
    is the whole.
    """

    def __init__(self, num_experts: int, channels: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.deal = Deal()
        self.gate_and_up_proj = ExpertLinear(num_experts, channels, 2 * hidden)
        self.act = SwiGLU()
        self.down_proj = ExpertLinear(num_experts, hidden, channels)
        self.combine = CombineExperts()

    def forward(self, x: Tensor, index: Tensor, shares: Tensor) -> Tensor:
        """x [M, C]; index int64 [M, k] and shares float32 [M, k], as a `Router` gives them."""
        first, held = self.gate_and_up_proj.first, self.gate_and_up_proj.num_experts
        dispatch, places = self.deal(index, first, held, self.num_experts)
        hidden = self.gate_and_up_proj(x, dispatch)  # [M * k, 2F]
        out = self.down_proj(self.act(hidden), dispatch.in_order())  # [M * k, C]
        if held < self.num_experts:
            end = dispatch.ends[-1]
            out = out.masked_fill((torch.arange(len(out), device=x.device) >= end)[:, None], 0.0)
            shares = torch.where(places < end, shares, 0.0)
        combined: Tensor = self.combine(out, places, shares)
        return combined
