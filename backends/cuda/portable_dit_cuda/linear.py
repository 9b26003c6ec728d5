"""Linear layers on 8-bit matrix units, each by the recipe's name for the format.

Weights keep the canonical order [N, K]; a product wants the second matrix column-major, which is a view of
it. Inputs are quantised on the way in, in one read where Triton is installed and by the plain functions of
portable_dit.formats where it is not: the numbers are the same.

Letters: M rows, N out features, K in features.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_dit.backend import EmulatedLinear, LinearKernel, Packed
from portable_dit.capabilities import Capabilities, LinearRequest, Reject
from portable_dit.formats import FORMATS, QUANTIZED, Encoded, Format, quantize_blocks
from portable_dit_cuda import fusions
from portable_dit_cuda.chips import capability_of, refuse_library
from portable_dit_cuda.swizzle import padded_shape, swizzle

INT8_ROWS = 32  # torch._int_mm wants more than 16 rows
DEQUANTIZE_TILE = 1024


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def quantize_rows(x: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """x [M, K] of any float dtype -> values [M, K] and float32 scales [M, 1]."""
    if x.is_cuda and has_triton() and x.shape[1] <= fusions.MAX_ROW:
        return fusions.quantize_rows(x, form)
    return quantize_blocks(x.float(), form, (1, 0))


class MatrixUnitLinear(LinearKernel):
    """What the native kernels share. multiple: of K and N, which the matrix units ask for."""

    quantizes_input = True
    dtypes: frozenset[str] = frozenset({"bfloat16"})
    multiple: tuple[int, int] = (16, 16)

    def refuse(self, request: LinearRequest, capabilities: Capabilities) -> Reject | None:
        name = self.format.name
        if name not in capabilities.native_formats:
            arch = capabilities.device.arch
            return Reject(
                "arch", f"{arch} or this build of torch does not multiply {name} in its matrix units"
            )
        if request.dtype not in self.dtypes:
            return Reject("dtype", f"takes {', '.join(sorted(self.dtypes))}, not {request.dtype}")
        for what, size, of in (
            ("in_features", request.in_features, self.multiple[0]),
            ("out_features", request.out_features, self.multiple[1]),
        ):
            if size % of:
                return Reject(what, f"{size} {what.replace('_', ' ')} are no multiple of {of}")
        return None

    def apply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        values, scales = self.quantize_input(x)
        return self.apply_quantized(values, scales, packed, bias, x.dtype)

    def quantize_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, K] as values [M, K] and scales in the layout that `apply_quantized` takes."""
        return quantize_rows(x, self.format)

    def apply_quantized(
        self, values: Tensor, scales: Tensor, packed: Packed, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """[M, N] in dtype; scales as `quantize_input` gives them."""
        raise AssertionError("each kernel has its own")


def _scaled_mm(
    values: Tensor,
    scales: Tensor,
    packed: Packed,
    bias: Tensor | None,
    dtype: torch.dtype,
    recipe: F.ScalingType,
    *,
    fast: bool,
) -> Tensor:
    """torch's scaled product of [M, K] values and packed [N, K] weights under one recipe: [M, N]."""
    return F.scaled_mm(
        values,
        packed["values"].t(),
        scale_a=scales,
        scale_recipe_a=recipe,
        scale_b=packed["scales"],
        scale_recipe_b=recipe,
        bias=bias,
        output_dtype=dtype,
        use_fast_accum=fast,
    )


class Fp8RowLinear(MatrixUnitLinear):
    """e4m3 with a scale for each input row and each output channel.

    fast_accumulation: sums stay in the matrix unit's own registers, of fewer bits, and only the end result is
    float32. Faster on compute capability 8.9 and 9.0; its error is far below that of the format.
    """

    takes_quantized = True

    def __init__(self, id: str = "scaled_mm", *, fast_accumulation: bool = True) -> None:
        super().__init__("fp8_row", id)
        self._fast = fast_accumulation

    def pack(self, weight: Encoded, dtype: torch.dtype) -> Packed:
        assert weight.scales is not None
        return {"values": weight.values, "scales": weight.scales.reshape(1, -1)}  # [1, N]

    def apply_quantized(
        self, values: Tensor, scales: Tensor, packed: Packed, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        by_row = F.ScalingType.RowWise
        return _scaled_mm(values, scales, packed, bias, dtype, by_row, fast=self._fast)


class Fp8TensorLinear(MatrixUnitLinear):
    """e4m3 with one scale for all of the input and one for the weight. A row depends on its batch mates."""

    dtypes = frozenset({"bfloat16", "float16"})

    def __init__(self) -> None:
        super().__init__("fp8_tensor", "scaled_mm")

    def pack(self, weight: Encoded, dtype: torch.dtype) -> Packed:
        assert weight.scales is not None
        return {"values": weight.values, "scales": weight.scales.reshape(1)}

    def quantize_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, scales = quantize_blocks(x.float(), self.format, (0, 0))
        return values, scales.reshape(1)

    def apply_quantized(
        self, values: Tensor, scales: Tensor, packed: Packed, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        whole = F.ScalingType.TensorWise
        return _scaled_mm(values, scales, packed, bias, dtype, whole, fast=True)


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
        if not (x.is_cuda and has_triton()):
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


class Mxfp8Linear(MatrixUnitLinear):
    """e4m3 in blocks of 32 with power-of-two scales; compute capability 10.0 on."""

    multiple = (32, 16)

    def __init__(self) -> None:
        super().__init__("mxfp8", "scaled_mm")

    def pack(self, weight: Encoded, dtype: torch.dtype) -> Packed:
        assert weight.scales is not None
        return {"values": weight.values, "scales": swizzle(weight.scales)}

    def quantize_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not (x.is_cuda and has_triton()):
            values, scales = quantize_blocks(x.float(), self.format, (1, 32))
            return values, swizzle(scales)
        return quantize_blocks_of_32(x, self.format)

    def apply_quantized(
        self, values: Tensor, scales: Tensor, packed: Packed, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        blocks, order = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
        out = F.scaled_mm(
            values,
            packed["values"].t(),
            scale_a=scales,
            scale_recipe_a=blocks,
            scale_b=packed["scales"],
            scale_recipe_b=blocks,
            swizzle_a=order,
            swizzle_b=order,
            output_dtype=dtype,
        )
        return out if bias is None else out + bias


class Int8RowLinear(MatrixUnitLinear):
    """int8 with a scale for each input row and each output channel, summed in int32."""

    takes_quantized = True
    dtypes = frozenset({"bfloat16", "float16"})
    multiple = (16, 16)

    def __init__(self) -> None:
        super().__init__("int8_row", "int8_mm")

    def refuse(self, request: LinearRequest, capabilities: Capabilities) -> Reject | None:
        if request.in_features * 127 * 127 >= 1 << 31:
            return Reject("in_features", f"{request.in_features} products of 127 x 127 overflow int32 sums")
        return super().refuse(request, capabilities)

    def pack(self, weight: Encoded, dtype: torch.dtype) -> Packed:
        assert weight.scales is not None
        return {"values": weight.values, "scales": weight.scales.reshape(1, -1)}  # [1, N]

    def apply_quantized(
        self, values: Tensor, scales: Tensor, packed: Packed, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        rows = values.shape[0]
        if rows < INT8_ROWS:
            values = F.pad(values, (0, 0, 0, INT8_ROWS - rows))
        sums = torch._int_mm(values, packed["values"].t())[:rows]  # [M, N] int32
        if not (sums.is_cuda and has_triton()):
            out = sums.float().mul_(scales).mul_(packed["scales"])
            return (out if bias is None else out.add_(bias)).to(dtype)
        out = torch.empty(sums.shape, dtype=dtype, device=sums.device)
        width = sums.shape[1]
        fusions.kernels().scale_sums[(rows, -(-width // DEQUANTIZE_TILE))](
            sums,
            scales,
            packed["scales"],
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
        values, scales = packed["values"], packed["scales"]
        out = torch.empty(values.shape, dtype=dtype, device=values.device)
        byte_scales = scales.dtype is torch.float8_e8m0fnu
        block_rows, block_columns = self.format.block
        grid = (values.shape[0], -(-values.shape[1] // DEQUANTIZE_TILE))
        fusions.kernels().dequantize[grid](
            values,
            scales.view(torch.uint8) if byte_scales else scales,
            out,
            values.shape[1],
            scales.shape[1],
            BLOCK_ROWS=block_rows,
            BLOCK_COLUMNS=block_columns,
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
        "fp8_tensor": (Fp8TensorLinear(),),
        "fp8_block128": (Fp8Block128Linear(),),
        "mxfp8": (Mxfp8Linear(),),
        "int8_row": (Int8RowLinear(),),
    }
    return {
        name: (
            *native.get(name, ()),
            DequantizedLinear(name),
            *((EmulatedLinear(name),) if FORMATS[name].activations else ()),
        )
        for name in QUANTIZED
    }
