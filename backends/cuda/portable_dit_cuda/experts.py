"""Mixtures of experts: grouped products, and the seams around them as single passes over memory.

Rows are dealt out and counted on the device, so a step never waits for the host.

Letters: B batch, S tokens, M rows, R rows ordered by expert, E experts, C channels, N heads, D head_dim.
"""

from __future__ import annotations

from functools import cache, partial
from math import gcd
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_dit.backend import ExpertKernel, FusedOp, Packed
from portable_dit.capabilities import Capabilities, ExpertRequest, FusionRequest, Reject, Request
from portable_dit.formats import Agree
from portable_dit.grouped_products import GroupedRowExperts, grouped_linear
from portable_dit.ops import Dispatch, Rotary
from portable_dit.scaled_products import ScaledRowLinear
from portable_dit_cuda.chips import capability_of, refuse_library
from portable_dit_cuda.fusions import DTYPES, MAX_HEAD_DIM, TILE, TritonOp
from portable_dit_cuda.linear import quantize_rows

GROUPED_FP8 = ((9, 0),)  # compute capabilities for which torch builds the row-scaled grouped product
GROUPED_BF16 = (9, 0)  # from here on torch has a grouped kernel; below it goes group by group on the host


@cache
def kernels() -> ModuleType:
    """The Triton kernels, imported when the first is launched."""
    from portable_dit_cuda import triton_experts

    return triton_experts


class RowLinear(ScaledRowLinear):
    """Quantises rows as the dense kernel does, in one read."""

    def quantize_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_rows(x, self.format)

    def quantize_divided(self, x: Tensor, agree: Agree) -> tuple[Tensor, Tensor]:
        return quantize_rows(x, self.format, agree)


class Fp8RowExperts(GroupedRowExperts):
    """torch's row-scaled grouped product, where it is built."""

    def check(self, request: Request, capabilities: Capabilities) -> Reject | None:
        assert isinstance(request, ExpertRequest)
        capability = capability_of(capabilities)
        if capability not in GROUPED_FP8:
            known = " and ".join(f"{major}.{minor}" for major, minor in GROUPED_FP8)
            return Reject("arch", f"torch builds it for {known}, this is {capability[0]}.{capability[1]}")
        return super().check(request, capabilities)


class TiledRowExperts(Fp8RowExperts):
    """The same product in Triton: 1.3 times as fast for a step of HunyuanImage-3, and the same bits.

    One program a multiprocessor takes tiles of rows in turn. Which expert a tile belongs to is worked out on
    the device, so that nothing waits for the host.
    """

    def check(self, request: Request, capabilities: Capabilities) -> Reject | None:
        return refuse_library("triton", capabilities) or super().check(request, capabilities)

    def multiply(
        self, values: Tensor, scales: Tensor, packed: Packed, dispatch: Dispatch, dtype: torch.dtype
    ) -> Tensor:
        from triton.tools.tensor_descriptor import TensorDescriptor

        weights = packed["values"]  # [E, N, K]
        experts, columns, depth = weights.shape
        if values.shape[0] < FEW * experts:
            return super().multiply(values, scales, packed, dispatch, dtype)
        out = torch.empty((values.shape[0], columns), dtype=dtype, device=values.device)
        expert, first, count = dispatch.once("tiles", partial(tiles_of_rows, rows=values.shape[0]))
        programs = torch.cuda.get_device_properties(values.device).multi_processor_count
        kernels().grouped_product[(programs,)](
            TensorDescriptor.from_tensor(values, [TILE_ROWS, TILE_DEPTH]),
            TensorDescriptor.from_tensor(weights.flatten(0, 1), [TILE_COLUMNS, TILE_DEPTH]),
            scales,
            packed["scales"],
            dispatch.ends,
            expert,
            first,
            count,
            out,
            columns,
            depth,
            ROWS=TILE_ROWS,
            COLUMNS=TILE_COLUMNS,
            DEPTH=TILE_DEPTH,
            BAND=BAND,
            PROGRAMS=programs,
            num_warps=8,
            num_stages=3,
        )
        return out


def tiles_of_rows(ends: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Expert and first row of each tile of TILE_ROWS rows, int32, and how many tiles count, int32 [1].

    ends: int32 [E], where each expert's of so many rows end. Tiles start anew with each expert. There are as
    many as there can be at most; those beyond the count mean nothing.
    """
    starts = F.pad(ends[:-1], (1, 0))
    needed = (ends - starts + TILE_ROWS - 1) // TILE_ROWS
    through = needed.cumsum(0, dtype=torch.int32)  # [E]
    tile = torch.arange(rows // TILE_ROWS + ends.numel(), device=ends.device, dtype=torch.int32)
    expert = torch.searchsorted(through, tile, right=True, out_int32=True).clamp_(max=ends.numel() - 1)
    first = starts[expert] + (tile - (through - needed)[expert]) * TILE_ROWS
    return expert, first, through[-1:]


class GroupedOp(FusedOp):
    """A plain grouped product, where torch has a kernel for it."""

    def check(self, request: Request, capabilities: Capabilities) -> Reject | None:
        assert isinstance(request, FusionRequest)
        capability = capability_of(capabilities)
        if capability < GROUPED_BF16:
            return Reject("arch", f"needs compute capability 9.0 on, this is {capability[0]}.{capability[1]}")
        return super().check(request, capabilities)


def rotary_head_norm(x: Tensor, weight: Tensor, eps: float, rotary: Rotary) -> Tensor:
    """ops.rotary_head_norm: x [B, S, N, D], which may be a slice of packed projections -> contiguous."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, rows, heads, dim = x.shape
    cos, sin = rotary.cos.contiguous(), rotary.sin.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = 1 << max(dim // 2 - 1, 0).bit_length()
    together = max(256 // half, 1)  # 8 channels of each half for each thread of a warp
    turns = gcd(-(-heads // together), 4)
    kernels().rotary_head_norm[(batch * rows, -(-heads // (together * turns)))](
        x,
        weight,
        cos,
        sin,
        out,
        rows,
        heads,
        dim,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        0 if cos.shape[0] == 1 else cos.stride(0),
        eps,
        TURNS=turns,
        HEADS=together,
        HALF=half,
        num_warps=1,
    )
    return out


def deal(index: Tensor, first: int, held: int, num_experts: int) -> tuple[Dispatch, Tensor]:
    """ops.deal as a counting sort in three launches; torch's sort and what surrounds it take a dozen."""
    index = index.contiguous()
    count, device = index.numel(), index.device
    bins, blocks = 1 << (held + 1).bit_length(), -(-count // CHOICES)
    starts = torch.empty((blocks, bins), dtype=torch.int32, device=device)
    ends = torch.empty(held, dtype=torch.int32, device=device)
    rows = torch.empty(count, dtype=torch.int64, device=device)
    places = torch.empty(index.shape, dtype=torch.int64, device=device)
    sizes = {"BINS": bins, "BLOCK": CHOICES}
    kernels().count_choices[(blocks,)](index, starts, count, first, held, **sizes)
    kernels().place_blocks[(1,)](starts, ends, blocks, held, BINS=bins, ROWS=64, TURNS=-(-blocks // 64))
    kernels().deal_choices[(blocks,)](
        index, starts, rows, places, count, first, held, index.shape[1], **sizes
    )
    return Dispatch(rows, ends), places


def combine_experts(x: Tensor, places: Tensor, shares: Tensor) -> Tensor:
    """ops.combine_experts: k reads and one write a row, no atomics."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    count, choices = places.shape
    out = torch.empty((count, x.shape[1]), dtype=x.dtype, device=x.device)
    kernels().combine_rows[(count, -(-x.shape[1] // TILE))](
        x,
        places.contiguous(),
        shares.contiguous(),
        out,
        x.shape[1],
        x.stride(0),
        CHOICES=choices,
        BLOCK=TILE,
    )
    return out


def route(x: Tensor, weight: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """ops.route with the product in the matrix units: inputs as they are, sums and logits in float32."""
    logits = torch.mm(x, weight.to(x.dtype).t(), out_dtype=torch.float32)  # [M, E]
    shares, index = logits.softmax(dim=-1).topk(top_k, dim=-1)
    return index, shares / shares.sum(dim=-1, keepdim=True).clamp_min(1e-8)


# Tiles of the grouped product, of which the matrix units' float32 sums fill the registers of two warp groups.
TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 128, 256, 128
FEW = 64  # rows for each expert, below which torch's own product with its smaller tiles is faster
CHOICES = 256  # of rows, that one program deals out
BAND = 8  # tiles of rows that are taken across all columns before the next
MOST_EXPERTS = 256  # that one program counts side by side
HALVES = frozenset({"bfloat16"})
EXPERT_OPS = (
    TritonOp("rotary_head_norm", "triton", rotary_head_norm, DTYPES, channels=MAX_HEAD_DIM),
    TritonOp("combine_experts", "triton", combine_experts, DTYPES, channels=1 << 20),
    FusedOp("route", "matrix_units", route, HALVES),
    TritonOp("deal", "triton", deal, DTYPES, channels=MOST_EXPERTS),
    GroupedOp("expert_linear", "grouped_mm", grouped_linear, HALVES),
)


def expert_kernels() -> dict[str, tuple[ExpertKernel, ...]]:
    """By format, best first; those that go expert by expert follow by themselves."""
    rows = RowLinear(fast_accumulation=True)
    return {"fp8_row": (TiledRowExperts(rows, "tiled_mm"), Fp8RowExperts(rows))}
