"""Linear layers on the fp8 matrix units, through torch's older scaled product and MATE's.

torch_musa has `torch._scaled_mm`, not the function with named recipes, and wants all sizes in multiples of
32; rows are filled up to it.

Letters: M rows, N out features, K in features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_dit.backend import LinearKernel, Packed
from portable_dit.capabilities import Capabilities, LinearRequest, Reject
from portable_dit.formats import Agree, Encoded
from portable_dit.scaled_products import MatrixUnitLinear
from portable_dit_musa.attention import mate_function
from portable_dit_musa.chips import refuse_mate

ROWS = 32


def _filled(x: Tensor) -> Tensor:
    """x [M, K] with rows of zeros up to a multiple of ROWS."""
    return F.pad(x, (0, 0, 0, -x.shape[0] % ROWS))


class ScaledLinear(MatrixUnitLinear):
    """e4m3 with scales by row on both sides, or one for each side."""

    multiple = (32, 32)

    def __init__(self, format: str) -> None:
        super().__init__(format, "scaled_mm")
        self._by_row = format == "fp8_row"

    def pack(self, weight: Encoded, dtype: torch.dtype) -> Packed:
        assert weight.scales is not None
        shape = (1, -1) if self._by_row else (1,)
        return {"values": weight.values, "scales": weight.scales.reshape(shape)}

    def apply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        return super().apply(_filled(x), packed, bias)[: x.shape[0]]

    def apply_divided(self, x: Tensor, packed: Packed, bias: Tensor | None, agree: Agree) -> Tensor:
        return super().apply_divided(_filled(x), packed, bias, agree)[: x.shape[0]]

    def arrange(self, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        return values, scales if self._by_row else scales.reshape(1)

    def apply_quantized(
        self, values: Tensor, scales: Tensor, packed: Packed, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        return torch._scaled_mm(
            values,
            packed["values"].t(),
            scale_a=scales,
            scale_b=packed["scales"],
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=False,
        )


class MateLinear(MatrixUnitLinear):
    """e4m3 with a scale for 128 channels of an input row and for 128 x 128 weights; gives bfloat16."""

    multiple = (128, 128)

    def __init__(self) -> None:
        super().__init__("fp8_block128", "mate")

    def refuse_further(self, request: LinearRequest, capabilities: Capabilities) -> Reject | None:
        return refuse_mate(capabilities)

    def apply_quantized(
        self, values: Tensor, scales: Tensor, packed: Packed, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        out: Tensor = mate_function("mate.gemm", "gemm_fp8_nt_groupwise")(
            values,
            packed["values"],
            scales.contiguous(),
            packed["scales"],
            scale_major_mode="K",
            scale_granularity_mnk=(1, 128, 128),
            out_dtype=dtype,
        )
        return out if bias is None else out + bias


def linear_kernels() -> dict[str, tuple[LinearKernel, ...]]:
    """All kernels by format, best first; dequantising comes after them."""
    return {
        "fp8_row": (ScaledLinear("fp8_row"),),
        "fp8_tensor": (ScaledLinear("fp8_tensor"),),
        "fp8_block128": (MateLinear(),),
    }
