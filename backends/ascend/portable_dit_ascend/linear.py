"""Products of the NPU's quantised matmul, each by the recipe's name for the format.

npu_quant_matmul wants the weight as [K, N], gives int8 unless told the output's type, and takes scales of
blocks in pairs along K. npu_dynamic_mx_quant makes 4-bit values unless told otherwise.

Letters: M rows, N out features, K in features.
"""

from __future__ import annotations

from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_dit.backend import LinearKernel, Packed
from portable_dit.capabilities import Capabilities, LinearRequest, Reject
from portable_dit.formats import Encoded
from portable_dit.scaled_products import MatrixUnitLinear
from portable_dit_ascend.device import MODULE, SERVED

MAX_SIDE = 65535
BLOCK = 32
# 0, the default, rounds the power of two down and so clips the largest values; 1 rounds up, as formats.py
# does (CANN, aclnnDynamicMxQuant, read 2026-11-30).
SCALES_ROUNDED_UP = 1


def type_number(name: str) -> int:
    """The vendor's number for a type that its operators take as int, such as float8_e4m3fn."""
    number: int = getattr(import_module(MODULE), name)
    return number


class NpuLinear(MatrixUnitLinear):
    """What the native kernels share."""

    dtypes = frozenset({"bfloat16", "float16"})
    multiple = (1, 1)

    def refuse_further(self, request: LinearRequest, capabilities: Capabilities) -> Reject | None:
        for what, size in (("in_features", request.in_features), ("out_features", request.out_features)):
            if size > MAX_SIDE:
                return Reject(what, f"{size} {what.replace('_', ' ')}: the operator takes {MAX_SIDE}")
        return None


class Int8Linear(NpuLinear):
    """int8 with a scale for each input row and each output channel."""

    def __init__(self) -> None:
        super().__init__("int8_row", "quant_matmul")

    def pack(self, weight: Encoded, dtype: torch.dtype) -> Packed:
        assert weight.scales is not None
        return {"values": weight.values.t().contiguous(), "scales": weight.scales.reshape(-1)}  # [K, N], [N]

    def quantize_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Values [M, K] and scales [M]."""
        values, scales = torch.ops.npu.npu_dynamic_quant(x.contiguous(), dst_type=torch.int8)
        return values, scales

    def arrange(self, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        return values, scales.reshape(-1)

    def apply_quantized(
        self, values: Tensor, scales: Tensor, packed: Packed, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        out: Tensor = torch.ops.npu.npu_quant_matmul(
            values,
            packed["values"],
            packed["scales"],
            pertoken_scale=scales,
            bias=bias,
            output_dtype=dtype,
        )
        return out


class Mxfp8Linear(NpuLinear):
    """e4m3 in blocks of 32 with power-of-two scales: A5 alone.

    Scales of two neighbouring blocks lie together: [..., K / 64, 2] bytes.
    """

    multiple = (BLOCK, 1)

    def __init__(self) -> None:
        super().__init__("mxfp8", "quant_matmul")

    def pack(self, weight: Encoded, dtype: torch.dtype) -> Packed:
        """Values stay [N, K] and are read transposed; scales become [K / 64, N, 2]."""
        assert weight.scales is not None
        scales = weight.scales.view(torch.uint8)  # [N, K / 32]
        scales = F.pad(scales, (0, scales.shape[1] % 2))
        pairs = scales.view(scales.shape[0], -1, 2).transpose(0, 1).contiguous()
        return {"values": weight.values, "scales": pairs}

    def quantize_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Values [M, K] and scales [M, K / 64, 2]."""
        values, scales = torch.ops.npu.npu_dynamic_mx_quant(
            x.contiguous(),
            axis=-1,
            round_mode="rint",
            dst_type=type_number("float8_e4m3fn"),
            block_size=BLOCK,
            scale_alg=SCALES_ROUNDED_UP,
        )
        return values, scales

    def apply_quantized(
        self, values: Tensor, scales: Tensor, packed: Packed, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        scale_type = type_number("float8_e8m0fnu")
        out: Tensor = torch.ops.npu.npu_quant_matmul(
            values,
            packed["values"].t(),
            packed["scales"],
            pertoken_scale=scales,
            bias=None if bias is None else bias.float(),
            output_dtype=dtype,
            scale_dtype=scale_type,
            pertoken_scale_dtype=scale_type,
            group_sizes=[1, 1, BLOCK],
        )
        return out


class Int8WeightLinear(LinearKernel):
    """int8 weights, input left alone.

    The operator would take the scales in the input's type, which rounds them; so it multiplies by ones and
    the scales follow in the output.
    """

    def __init__(self) -> None:
        super().__init__("int8_weight_only", "weight_quant_matmul")

    def refuse(self, request: LinearRequest, capabilities: Capabilities) -> Reject | None:
        arch = capabilities.device.arch
        if arch not in SERVED:
            return Reject("arch", f"serves {', '.join(SERVED)}, not {arch}")
        if request.dtype != "bfloat16":  # in float16 sums of int8 values overflow
            return Reject("dtype", f"takes bfloat16, not {request.dtype}")
        if max(request.in_features, request.out_features) > MAX_SIDE:
            return Reject("in_features", f"the operator takes at most {MAX_SIDE} features")
        return None

    def pack(self, weight: Encoded, dtype: torch.dtype) -> Packed:
        assert weight.scales is not None
        scales = weight.scales.reshape(-1)  # [N]
        return {
            "values": weight.values.t().contiguous(),
            "scales": scales,
            "ones": torch.ones_like(scales, dtype=dtype),
        }

    def apply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        sums: Tensor = torch.ops.npu.npu_weight_quant_batchmatmul(
            x.contiguous(), packed["values"], antiquant_scale=packed["ones"]
        )
        out = sums.float().mul_(packed["scales"])
        return (out if bias is None else out.add_(bias)).to(x.dtype)


def linear_kernels() -> dict[str, tuple[LinearKernel, ...]]:
    """All kernels by format, best first."""
    return {"int8_row": (Int8Linear(),), "mxfp8": (Mxfp8Linear(),), "int8_weight_only": (Int8WeightLinear(),)}
