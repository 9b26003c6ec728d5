"""Linear layers on 8-bit matrix units, each by the recipe's name for the format.

Weights keep the canonical order [N, K]; a product wants the second matrix column-major, which is a view of
it. Inputs are quantised on the way in, in one read where Triton is installed and by the plain functions of
portable_dit.formats where it is not: the numbers are the same.

Letters: M rows, N out features, K in features.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_dit.backend import EmulatedLinear, LinearKernel, Packed
from portable_dit.capabilities import Capabilities, LinearRequest, Reject
from portable_dit.formats import (
    FORMATS,
    QUANTIZED,
    Agree,
    Encoded,
    Format,
    quantize_blocks,
)
from portable_dit.models.spec import rotated_together
from portable_dit.rotation import hadamard, rotate
from portable_dit.scaled_products import (
    Int8RowLinear,
    MatrixUnitLinear,
    ScaledBlocksOf32Linear,
    ScaledRowLinear,
    ScaledTensorLinear,
)
from portable_dit_cuda import fusions
from portable_dit_cuda.chips import capability_of, refuse_library
from portable_dit_cuda.flash import library_function
from portable_dit_cuda.swizzle import padded_shape, swizzle

DEQUANTIZE_TILE = 1024
FLASHINFER = "flashinfer-python"


def quantize_rows(x: Tensor, form: Format, agree: Agree | None = None) -> tuple[Tensor, Tensor]:
    """x [M, K] of any float dtype -> values [M, K] and float32 scales [M, 1].

    agree: for a part of rows that devices share, gives the largest magnitudes of all parts.
    """
    if not (x.is_cuda and fusions.has_triton() and x.shape[1] <= fusions.MAX_ROW):
        return quantize_blocks(x.float(), form, (1, 0), agree=agree)
    if form.rotated:
        # By the matrix units, whose sums are float32: the entries of the rotation are exact in any dtype.
        size = rotated_together(x.shape[1])
        turned = torch.mm(x.reshape(-1, size), _rotation(size, x.dtype, x.device), out_dtype=torch.float32)
        x = turned.view(x.shape)
    amax = None if agree is None else agree(fusions.largest_of_rows(x))
    return fusions.quantize_rows(x, form, amax)


@cache
def _rotation(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return hadamard(size, dtype=dtype, device=device)


class InOneRead(MatrixUnitLinear):
    """Kernels whose input has one scale a row."""

    def quantize_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_rows(x, self.format)

    def quantize_divided(self, x: Tensor, agree: Agree) -> tuple[Tensor, Tensor]:
        return quantize_rows(x, self.format, agree)


class Fp8RowLinear(InOneRead, ScaledRowLinear):
    """fast_accumulation: sums stay in the matrix unit's own registers, of fewer bits, and only the end result
    is float32. Faster on compute capability 8.9 and 9.0; its error is far below that of the format.
    """

    def __init__(self, id: str = "scaled_mm", *, fast_accumulation: bool = True) -> None:
        super().__init__(id, fast_accumulation=fast_accumulation)


class Fp8Block128Linear(MatrixUnitLinear):
    """e4m3 with a scale for 128 channels of an input row and for 128 x 128 weights; capability 9.0 only."""

    multiple = (128, 128)

    def __init__(self) -> None:
        super().__init__("fp8_block128", "scaled_mm")

    def pack(self, weight: Encoded, dtype: torch.dtype) -> Packed:
        """Scales [N / 128, K / 128], rows padded to a multiple of 4: the product reads them transposed."""
        assert weight.scales is not None
        return {"values": weight.values, "scales": F.pad(weight.scales, (0, -weight.scales.shape[1] % 4))}

    def apply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        # cuBLAS refuses scales whose columns, M float32 apart, are not at multiples of 16 bytes.
        padded = F.pad(x, (0, 0, 0, -rows % 4)) if rows % 4 else x
        return super().apply(padded, packed, bias)[:rows]

    def quantize_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scales [M, K / 128] that lie in memory as [K / 128, M]."""
        if not (x.is_cuda and fusions.has_triton()):
            values, scales = quantize_blocks(x.float(), self.format, (1, 128))
            return values, torch.empty(scales.t().shape, device=x.device).copy_(scales.t()).t()
        x = x if x.stride(-1) == 1 else x.contiguous()
        (rows, columns), blocks = x.shape, x.shape[1] // 128
        values = torch.empty(x.shape, dtype=self.format.values, device=x.device)
        transposed = torch.empty((blocks, rows), dtype=torch.float32, device=x.device)
        fusions.kernels().quantize_blocks_of_128[(rows, -(-blocks // 8))](
            x, values, transposed, rows, columns, x.stride(0), BLOCKS=8
        )
        return values, transposed.t()

    def apply_quantized(
        self, values: Tensor, scales: Tensor, packed: Packed, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        out = F.scaled_mm(
            values,
            packed["values"].t(),
            scale_a=scales,
            scale_recipe_a=F.ScalingType.BlockWise1x128,
            scale_b=packed["scales"].t(),
            scale_recipe_b=F.ScalingType.BlockWise128x128,
            output_dtype=dtype,
        )
        return out if bias is None else out + bias


class Mxfp8Linear(ScaledBlocksOf32Linear):
    """Scales in tiles of 128 x 4 (swizzle.py); compute capability 10.0 on."""

    order = F.SwizzleType.SWIZZLE_32_4_4

    def pack(self, weight: Encoded, dtype: torch.dtype) -> Packed:
        assert weight.scales is not None
        return {"values": weight.values, "scales": swizzle(weight.scales)}

    def quantize_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not (x.is_cuda and fusions.has_triton()):
            values, scales = quantize_blocks(x.float(), self.format, (1, 32))
            return values, swizzle(scales)
        return quantize_blocks_of_32(x, self.format)


class FlashInferLinear(Mxfp8Linear):
    """The product of `Mxfp8Linear` by FlashInfer, which reads the same scales and gives float16 too.

    Below 128 features either way its results may hold infinities, so it refuses them, and so do we.
    """

    dtypes = frozenset({"bfloat16", "float16"})
    multiple = (32, 32)
    least = 128

    def __init__(self) -> None:
        super().__init__("flashinfer")

    def refuse_further(self, request: LinearRequest, capabilities: Capabilities) -> Reject | None:
        for what, size in (("in_features", request.in_features), ("out_features", request.out_features)):
            if size < self.least:
                return Reject(what, f"takes {self.least} {what.replace('_', ' ')} and more, not {size}")
        return refuse_library(FLASHINFER, capabilities)

    def apply_quantized(
        self, values: Tensor, scales: Tensor, packed: Packed, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        product = library_function(("flashinfer",), "mm_mxfp8")
        out: Tensor = product(
            values,
            packed["values"].t(),
            scales.view(torch.uint8),
            packed["scales"].view(torch.uint8),
            out_dtype=dtype,
        )
        return out if bias is None else out + bias


class Int8Linear(InOneRead, Int8RowLinear):
    """The sums are scaled in one pass where Triton is installed."""

    def scale(
        self, sums: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        if not (sums.is_cuda and fusions.has_triton()):
            return super().scale(sums, rows, columns, bias, dtype)
        out = torch.empty(sums.shape, dtype=dtype, device=sums.device)
        height, width = sums.shape
        fusions.kernels().scale_sums[(height, -(-width // DEQUANTIZE_TILE))](
            sums,
            rows,
            columns,
            sums if bias is None else bias,
            out,
            width,
            HAS_BIAS=bias is not None,
            BLOCK=DEQUANTIZE_TILE,
        )
        return out


class DequantizedLinear(LinearKernel):
    """The plain body with the weight expanded in one pass: exact to the stored numbers, on any chip.

    The plain body goes through float32, four bytes a weight; this one writes the activation type at once.
    """

    def __init__(self, format: str) -> None:
        super().__init__(format, "dequantize")

    def refuse(self, request: LinearRequest, capabilities: Capabilities) -> Reject | None:
        if capability_of(capabilities) < (8, 9) and self.format.values is torch.float8_e4m3fn:
            return Reject("arch", "Triton reads e4m3 from compute capability 8.9 on")
        return refuse_library("triton", capabilities)

    def apply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight(packed, x.dtype), bias)

    def weight(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """[N, K] in dtype; products in float32, rounded once."""
        exact = torch.float32 if self.format.rotated else dtype
        out = expand(packed["values"], packed["scales"], self.format.block, exact)
        if self.format.rotated:
            return rotate(out, rotated_together(out.shape[1])).to(dtype)
        return out


def expand(values: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """values [N, K] times their block's scale, in one read and one write, by Triton.

    block: rows and columns that share a scale, 0 for all of them. scales: [N / rows, K / columns].
    """
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    byte_scales = scales.dtype is torch.float8_e8m0fnu
    grid = (values.shape[0], -(-values.shape[1] // DEQUANTIZE_TILE))
    fusions.kernels().dequantize[grid](
        values,
        scales.view(torch.uint8) if byte_scales else scales,
        out,
        values.shape[1],
        scales.shape[1],
        BLOCK_ROWS=block[0],
        BLOCK_COLUMNS=block[1],
        IS_E8M0=byte_scales,
        BLOCK=DEQUANTIZE_TILE,
    )
    return out


def quantize_blocks_of_32(x: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """x [M, K] -> e4m3 values [M, K] and e8m0 scales, flat in the order of swizzle.py."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, columns = x.shape
    blocks = -(-columns // 32)
    padded_rows, padded_blocks = padded_shape(rows, blocks)
    values = torch.empty(x.shape, dtype=form.values, device=x.device)
    scales = torch.zeros(padded_rows * padded_blocks, dtype=torch.uint8, device=x.device)
    fusions.kernels().quantize_blocks_of_32[(rows, -(-blocks // 32))](
        x, values, scales, columns, padded_blocks, x.stride(0), BLOCKS=32
    )
    return values, scales.view(torch.float8_e8m0fnu)


def linear_kernels() -> dict[str, tuple[LinearKernel, ...]]:
    """All kernels by format, best first. The emulation comes last: it is for trying a format by name."""
    native: dict[str, tuple[LinearKernel, ...]] = {
        "fp8_row": (Fp8RowLinear(), Fp8RowLinear("scaled_mm_float32_sums", fast_accumulation=False)),
        "fp8_tensor": (ScaledTensorLinear(fast_accumulation=True),),
        "fp8_block128": (Fp8Block128Linear(),),
        "mxfp8": (Mxfp8Linear(), FlashInferLinear()),
        "int8_row": (Int8Linear(),),
        "int8_row_rotated": (Int8Linear("int8_row_rotated"),),
    }
    return {
        name: (
            *native.get(name, ()),
            DequantizedLinear(name),
            *((EmulatedLinear(name),) if FORMATS[name].activations else ()),
        )
        for name in QUANTIZED
    }
