"""The seams of ops.py as single passes over memory, in Triton.

Every function has the signature of its plain body. Those with `_quantized` in their name also make the next
product's 8-bit input on the way out: values and one scale a row, bit for bit what `quantize_rows` makes of
the plain result.

Letters: B batch, S tokens, M = B * S rows, C channels, N heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from math import gcd
from types import ModuleType

import torch
from torch import Tensor

from portable_dit.backend import FusedOp
from portable_dit.capabilities import Capabilities, FusionRequest, Reject, Request
from portable_dit.formats import FORMATS, Format, QuantizedRows
from portable_dit.ops import Modulation, Rotary
from portable_dit_cuda.chips import capability_of, refuse_library

MAX_ROW = 32768  # channels that one program holds in registers
MAX_HEAD_DIM = 512
TILE = 1024  # channels of one program where a row needs no sum
PIECE = 1 << 14  # numbers of which one program takes the mean
MAX_WARPS = 16  # of one program
HEAD_TILE = 64  # rows of one head that a program quantises
DTYPES = frozenset({"bfloat16", "float16"})
ROW_FORMATS = ("fp8_row", "int8_row")  # those with one scale for a row of the input


@dataclass(frozen=True)
class TritonOp(FusedOp):
    """A fused seam that needs Triton and a chip with bfloat16. channels: the longest row it takes."""

    channels: int = MAX_ROW

    def check(self, request: Request, capabilities: Capabilities) -> Reject | None:
        assert isinstance(request, FusionRequest)
        capability = capability_of(capabilities)
        if capability < (8, 0):
            return Reject("arch", f"needs compute capability 8.0 on, this is {capability[0]}.{capability[1]}")
        if request.channels > self.channels:
            return Reject("channels", f"takes rows up to {self.channels}, not {request.channels}")
        return refuse_library("triton", capabilities) or super().check(request, capabilities)


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def kernels() -> ModuleType:
    """The Triton kernels, imported when the first is launched."""
    from portable_dit_cuda import triton_kernels

    return triton_kernels


@cache
def head_kernels() -> ModuleType:
    """Those that go by attention heads."""
    from portable_dit_cuda import triton_heads

    return triton_heads


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """ops.rms_norm: one read and one write of x."""
    rows = _rows(x)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _norm(rows, weight, eps, None, 0, out=out)
    return out.view(x.shape)


def rms_norm_quantized(x: Tensor, weight: Tensor | None, eps: float, *, form: Format) -> QuantizedRows:
    """rms_norm as 8-bit rows with a scale each."""
    rows = _rows(x)
    values, scales = _quantized_like(rows.shape, form, x.device)
    _norm(rows, weight, eps, None, 0, out=values, scales=scales, form=form)
    return QuantizedRows(form, values, scales, tuple(x.shape), x.dtype)


def norm_cast(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """ops.norm_cast: one read of x and one write of what is half as wide."""
    rows = _rows(x)
    out = torch.empty(rows.shape, dtype=dtype, device=x.device)
    _norm(rows, weight, eps, None, 0, out=out)
    return out.view(x.shape)


def scaled_residual(x: Tensor, branch: Tensor, scale: Tensor) -> Tensor:
    """ops.scaled_residual: two reads and one write."""
    rows, others = _rows(x), _rows(branch)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    grid = (rows.shape[0], -(-rows.shape[1] // TILE))
    sizes = rows.shape[1], rows.stride(0), others.stride(0)
    kernels().scaled_residual[grid](rows, others, scale, out, *sizes, BLOCK=TILE)
    return out.view(x.shape)


def frame_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, activate: bool) -> Tensor:
    """ops.frame_norm: two reads and one write of x [B, T, C, h, w]."""
    x = x.contiguous()
    batch, frames, channels, plane = *x.shape[:3], x.shape[3] * x.shape[4]
    run = channels // groups * plane  # numbers of a group that lie together
    pieces = -(-run // PIECE)
    found = torch.empty((2, batch * groups, frames * pieces), dtype=torch.float32, device=x.device)
    kernels().moments[(batch * groups, frames, pieces)](
        x, found[0], found[1], frames, groups, run, PIECE=PIECE, BLOCK=TILE
    )
    mean, factor = _joined(found[0], found[1], run, pieces, frames, eps)
    out = torch.empty_like(x)
    kernels().normed[(batch * frames * channels, -(-plane // TILE))](
        x,
        mean,
        factor,
        weight,
        bias,
        out,
        frames * channels,
        channels,
        channels // groups,
        groups,
        plane,
        ACTIVATE=activate,
        BLOCK=TILE,
    )
    return out


def _joined(
    means: Tensor, squares: Tensor, run: int, pieces: int, frames: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(variance + eps) of each group, [groups], from its pieces, [groups, frames * pieces].

    squares: sums of squared differences from the piece's own mean.
    """
    counts = torch.full((pieces,), float(PIECE), device=means.device)
    counts[-1] = run - (pieces - 1) * PIECE
    counts = counts.repeat(frames)
    mean = (means * counts).sum(dim=1, keepdim=True) / (run * frames)
    variance = (squares + counts * (means - mean) ** 2).sum(dim=1) / (run * frames)
    return mean[:, 0], torch.rsqrt(variance + eps)


def norm_modulate(x: Tensor, weight: Tensor, eps: float, modulation: Modulation, chunk: int) -> Tensor:
    """ops.norm_modulate: one read and one write of x; the table stays in the cache."""
    rows = _rows(x)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _norm(rows, weight, eps, modulation, chunk, out=out)
    return out.view(x.shape)


def norm_modulate_quantized(
    x: Tensor, weight: Tensor, eps: float, modulation: Modulation, chunk: int, *, form: Format
) -> QuantizedRows:
    """norm_modulate as 8-bit rows with a scale each."""
    rows = _rows(x)
    values, scales = _quantized_like(rows.shape, form, x.device)
    _norm(rows, weight, eps, modulation, chunk, out=values, scales=scales, form=form)
    return QuantizedRows(form, values, scales, tuple(x.shape), x.dtype)


def swiglu(x: Tensor) -> Tensor:
    """ops.swiglu: x [..., 2F] -> [..., F]."""
    rows = _rows(x)
    width = x.shape[-1] // 2
    out = torch.empty((rows.shape[0], width), dtype=x.dtype, device=x.device)
    grid = (rows.shape[0], -(-width // TILE))
    kernels().swiglu[grid](rows, out, width, rows.stride(0), BLOCK=TILE)
    return out.view(*x.shape[:-1], width)


def swiglu_quantized(x: Tensor, *, form: Format) -> QuantizedRows:
    """swiglu as 8-bit rows with a scale each: x [..., 2F] -> [..., F]."""
    rows = _rows(x)
    width = x.shape[-1] // 2
    values, scales = _quantized_like((rows.shape[0], width), form, x.device)
    kernels().swiglu_quantize[(rows.shape[0],)](
        rows,
        values,
        scales,
        width,
        rows.stride(0),
        form.largest,
        IS_INT8=form.values is torch.int8,
        **_in_pieces(width, of_warp=1024, of_thread=4),
    )
    return QuantizedRows(form, values, scales, (*x.shape[:-1], width), x.dtype)


def gated_residual(x: Tensor, branch: Tensor, modulation: Modulation, chunk: int) -> Tensor:
    """ops.gated_residual: two reads and one write."""
    rows, others = _rows(x), _rows(branch)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    table = _unit_last(modulation.table)
    grid = (rows.shape[0], -(-rows.shape[1] // TILE))
    kernels().gated_residual[grid](
        rows,
        others,
        table[:, chunk],
        modulation.index.reshape(-1),
        out,
        rows.shape[1],
        rows.stride(0),
        others.stride(0),
        table.stride(0),
        BLOCK=TILE,
    )
    return out.view(x.shape)


def head_norm_rotary(x: Tensor, weight: Tensor | None, eps: float, rotary: Rotary | None) -> Tensor:
    """ops.head_norm_rotary: x [B, S, N, D], which may be a slice of packed projections -> contiguous."""
    x = _unit_last(x)
    batch, rows, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cos, sin = (x, x) if rotary is None else (rotary.cos.contiguous(), rotary.sin.contiguous())
    pairs = 0 if rotary is None else cos.shape[-1]
    block = _power_of_two(dim)
    group = gcd(pairs, 16) if pairs else min(block, 16)
    together = max(256 // block, 1)  # 8 channels for each thread of a warp
    turns = gcd(-(-heads // together), 4)
    head_kernels().head_norm_rotary[(batch * rows, -(-heads // (together * turns)))](
        x,
        x if weight is None else weight,
        cos,
        sin,
        out,
        rows,
        heads,
        dim,
        pairs,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        0 if rotary is None or cos.shape[0] == 1 else cos.stride(0),
        eps,
        HAS_WEIGHT=weight is not None,
        ROTATE=rotary is not None,
        TURNS=turns,
        HEADS=together,
        GROUPS=block // group,
        GROUP=group,
        num_warps=1,
    )
    return out


def quantize_rows(x: Tensor, form: Format, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [M, K] as 8-bit rows: values [M, K] and float32 scales [M, 1], in one read.

    amax: float32 [M, 1], the largest magnitude that each row's scale is for; None = its own.
    """
    x = _unit_last(x)
    values, scales = _quantized_like(x.shape, form, x.device)
    kernels().quantize_rows[(x.shape[0],)](
        x,
        x if amax is None else amax,
        values,
        scales,
        x.shape[1],
        x.stride(0),
        form.largest,
        IS_GIVEN=amax is not None,
        IS_INT8=form.values is torch.int8,
        **_in_pieces(x.shape[1]),
    )
    return values, scales


def largest_of_rows(x: Tensor) -> Tensor:
    """The largest magnitude of each row of x [M, K]: float32 [M, 1], in one read."""
    x = _unit_last(x)
    amax = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    kernels().largest_of_rows[(x.shape[0],)](x, amax, x.shape[1], x.stride(0), **_in_pieces(x.shape[1]))
    return amax


def quantize_heads(x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """x [B, S, N, D] as e4m3, and the float32 scale [B, heads] that each group of N / heads heads shares."""
    x = _unit_last(x)
    batch, rows, count, dim = x.shape
    largest = torch.zeros((batch, heads), dtype=torch.float32, device=x.device)
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty_like(largest)
    grid = (-(-rows // HEAD_TILE), count, batch)
    strides = x.stride(0), x.stride(1), x.stride(2)
    sizes = {"GROUP": count // heads, "ROWS": HEAD_TILE, "BLOCK": _power_of_two(dim)}
    head_kernels().largest_of_heads[grid](x, largest, rows, dim, heads, *strides, **sizes)
    head_kernels().quantize_heads[grid](
        x, largest, values, scales, rows, count, dim, heads, *strides, **sizes
    )
    return values, scales


def _by_format(function: Callable[..., QuantizedRows]) -> dict[str, Callable[..., QuantizedRows]]:
    return {name: partial(function, form=FORMATS[name]) for name in ROW_FORMATS}


FUSED_OPS = (
    TritonOp("rms_norm", "triton", rms_norm, DTYPES, quantized=_by_format(rms_norm_quantized)),
    TritonOp("norm_modulate", "triton", norm_modulate, DTYPES, quantized=_by_format(norm_modulate_quantized)),
    TritonOp("gated_residual", "triton", gated_residual, DTYPES, channels=1 << 20),
    TritonOp("norm_cast", "triton", norm_cast, DTYPES),
    TritonOp("frame_norm", "triton", frame_norm, DTYPES, channels=1 << 20),
    TritonOp("scaled_residual", "triton", scaled_residual, DTYPES, channels=1 << 20),
    TritonOp("head_norm_rotary", "triton", head_norm_rotary, DTYPES, channels=MAX_HEAD_DIM),
    TritonOp("swiglu", "triton", swiglu, DTYPES, quantized=_by_format(swiglu_quantized)),
)


def _norm(
    rows: Tensor,
    weight: Tensor | None,
    eps: float,
    modulation: Modulation | None,
    chunk: int,
    *,
    out: Tensor,
    scales: Tensor | None = None,
    form: Format | None = None,
) -> None:
    """Norm, modulation and quantisation of rows [M, C] into out, each where it is asked for."""
    table = None if modulation is None else _unit_last(modulation.table)
    kernels().norm_modulate[(rows.shape[0],)](
        rows,
        rows if weight is None else weight,
        rows if table is None else table[:, chunk],
        rows if modulation is None else modulation.index.reshape(-1),
        out,
        rows if scales is None else scales,
        rows.shape[1],
        rows.stride(0),
        0 if table is None else table.stride(0),
        0 if table is None else table.stride(1),
        eps,
        1.0 if form is None else form.largest,
        HAS_WEIGHT=weight is not None,
        MODULATE=table is not None,
        QUANTIZE=form is not None,
        IS_INT8=form is not None and form.values is torch.int8,
        **_in_pieces(rows.shape[1]),
    )


def _rows(x: Tensor) -> Tensor:
    """[M, C] of x [..., C], with channels side by side in memory."""
    return _unit_last(x.reshape(-1, x.shape[-1]))


def _unit_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _quantized_like(shape: tuple[int, ...], form: Format, device: torch.device) -> tuple[Tensor, Tensor]:
    values = torch.empty(shape, dtype=form.values, device=device)
    return values, torch.empty((shape[0], 1), dtype=torch.float32, device=device)


def _in_pieces(width: int, *, of_warp: int = 2048, of_thread: int = 8) -> dict[str, int]:
    """How a kernel holds a row in registers. of_warp: most channels for one; of_thread: of each piece."""
    warps = min(_power_of_two(-(-width // of_warp)), MAX_WARPS)
    piece = warps * 32 * of_thread
    return {"PIECES": -(-width // piece), "PIECE": piece, "num_warps": warps}


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 1 else 1
