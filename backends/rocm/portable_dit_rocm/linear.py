"""Linear layers on the 8-bit matrix units: AITER's products where it is installed, else torch's own.

On gfx942 the units read e4m3fnuz. Weights and inputs are quantised as everywhere (portable_dit.formats) and
their bits handed over as fnuz with doubled scales, so the numbers are those of any other device.

Letters: M rows, N out features, K in features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_dit.backend import LinearKernel, Packed
from portable_dit.capabilities import Capabilities, LinearRequest, Reject
from portable_dit.formats import Encoded, format_named
from portable_dit.scaled_products import (
    MatrixUnitLinear,
    ScaledBlocksOf32Linear,
    ScaledRowLinear,
    ScaledTensorLinear,
)
from portable_dit_rocm.attention import library_function
from portable_dit_rocm.chips import AITER, FNUZ, refuse_library
from portable_dit_rocm.fnuz import to_fnuz

BLOCK_ROWS = 32  # the product of blocks of 32 wants all its sizes to be multiples of it


class _Fnuz(MatrixUnitLinear):
    """Values as fnuz and scales doubled, on both sides: for chips that have no other e4m3."""

    takes_quantized = False  # what another seam makes is e4m3fn

    def refuse_further(self, request: LinearRequest, capabilities: Capabilities) -> Reject | None:
        if capabilities.device.arch not in FNUZ:
            return Reject("arch", f"for {', '.join(FNUZ)}, whose e4m3 is another one")
        return super().refuse_further(request, capabilities)

    def pack(self, weight: Encoded, dtype: torch.dtype) -> Packed:
        packed = super().pack(weight, dtype)
        return {"values": to_fnuz(packed["values"]), "scales": packed["scales"] * 2}

    def arrange(self, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        values, scales = super().arrange(values, scales)
        return to_fnuz(values), scales * 2


class _Plain(MatrixUnitLinear):
    """For chips whose e4m3 is the one that weights are stored in."""

    def refuse_further(self, request: LinearRequest, capabilities: Capabilities) -> Reject | None:
        if capabilities.device.arch in FNUZ:
            return Reject("arch", f"{capabilities.device.arch} has e4m3fnuz only")
        return super().refuse_further(request, capabilities)


class RowLinear(_Plain, ScaledRowLinear):
    """e4m3 by row through torch."""


class FnuzRowLinear(_Fnuz, ScaledRowLinear):
    """e4m3fnuz by row through torch."""


class TensorLinear(_Plain, ScaledTensorLinear):
    """e4m3 with one scale each through torch."""


class FnuzTensorLinear(_Fnuz, ScaledTensorLinear):
    """e4m3fnuz with one scale each through torch."""


class Mxfp8Linear(ScaledBlocksOf32Linear):
    """e4m3 in blocks of 32, scales in plain order, rows filled up to a multiple of 32."""

    multiple = (32, 32)

    def apply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        filled = F.pad(x, (0, 0, 0, -x.shape[0] % BLOCK_ROWS))
        return super().apply(filled, packed, bias)[: x.shape[0]]


class AiterLinear(MatrixUnitLinear):
    """AITER's products of [M, K] and [N, K]: scales [M, 1] and [1, N], or one for each block of 128.

    The weight is not transposed and the bias is added afterwards: its dtype differs between AITER's kernels.
    """

    def __init__(self, format: str) -> None:
        super().__init__(format, "aiter")
        self._function = "gemm_a8w8_blockscale" if format == "fp8_block128" else "gemm_a8w8"
        self.multiple = (128, 128) if format == "fp8_block128" else (16, 16)

    def refuse_further(self, request: LinearRequest, capabilities: Capabilities) -> Reject | None:
        if capabilities.device.arch not in AITER:
            return Reject("arch", f"has kernels for {', '.join(AITER)}, not {capabilities.device.arch}")
        return refuse_library("aiter", capabilities)

    def pack(self, weight: Encoded, dtype: torch.dtype) -> Packed:
        assert weight.scales is not None
        values, scales = self._as_the_chip_has_it(weight.values, weight.scales)
        return {"values": values, "scales": scales if self.multiple[0] == 128 else scales.reshape(1, -1)}

    def arrange(self, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        return self._as_the_chip_has_it(values, scales)

    def apply_quantized(
        self, values: Tensor, scales: Tensor, packed: Packed, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        function = library_function("aiter", self._function)
        out: Tensor = function(values, packed["values"], scales, packed["scales"], dtype=dtype)
        return out if bias is None else out + bias

    def _as_the_chip_has_it(self, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        if values.dtype is torch.int8 or not _is_fnuz(values.device):
            return values, scales
        return to_fnuz(values), scales * 2


def _is_fnuz(device: torch.device) -> bool:
    arch: str = torch.cuda.get_device_properties(device).gcnArchName
    return arch.startswith(FNUZ)


def linear_kernels() -> dict[str, tuple[LinearKernel, ...]]:
    """All kernels by format, best first; dequantising comes after them."""
    kernels: dict[str, tuple[LinearKernel, ...]] = {
        "fp8_row": (AiterLinear("fp8_row"), RowLinear(), FnuzRowLinear("scaled_mm_fnuz")),
        "fp8_tensor": (TensorLinear(), FnuzTensorLinear("scaled_mm_fnuz")),
        "fp8_block128": (AiterLinear("fp8_block128"),),
        "mxfp8": (Mxfp8Linear(),),
        "int8_row": (AiterLinear("int8_row"),),
    }
    assert all(format_named(name) for name in kernels)
    return kernels
