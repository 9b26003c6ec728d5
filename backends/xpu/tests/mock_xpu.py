"""A machine with Intel GPUs and a build of torch for them, as far as Python code can tell.

Variants: "bmg" an Arc Pro B70, "pvc" a Data Center Max, "xe35" a chip with fp8 units, "mtl" an integrated
one; "+torch2.10" before graphs. Written from torch's source and documents; shares no code with the backend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from mock_vendor.collectives import gloo_as
from mock_vendor.device import add_device, device_module, put_into
from mock_vendor.maths import scaled_dot_product
from mock_vendor.signatures import as_recorded, logged, recorded
from mock_vendor.streams import GraphRules, graph_types, stream_module
from torch import Tensor

aten = torch.ops.aten
SIGNATURES = Path(__file__).parents[1] / "signatures"
FLASH_HEADS = (32, 64, 96, 128, 192)
GIB = 1 << 30


@dataclass(frozen=True)
class Properties:
    """What torch.xpu.get_device_properties gives."""

    name: str
    architecture: int
    total_memory: int
    has_fp64: bool
    has_subgroup_matrix_multiply_accumulate: bool = True
    has_fp16: bool = True
    has_bfloat16_conversions: bool = True
    is_integrated_gpu: bool = False
    driver_version: str = "1.6.33578"


def gmd(major: int, minor: int, revision: int) -> int:
    return (major << 22 | minor << 14 | revision) << 8


CHIPS = {
    "bmg": Properties("Intel(R) Arc(TM) Pro B70 Graphics", gmd(20, 2, 0), 31 * GIB, has_fp64=False),
    "pvc": Properties("Intel(R) Data Center GPU Max 1550", 13136561920, 64 * GIB, has_fp64=True),
    "xe35": Properties("Intel(R) Crescent Island", gmd(35, 11, 0), 160 * GIB, has_fp64=True),
    "mtl": replace(
        Properties("Intel(R) Arc(TM) Graphics", gmd(12, 71, 4), 16 * GIB, has_fp64=True),
        has_subgroup_matrix_multiply_accumulate=False,
        is_integrated_gpu=True,
    ),
}


def install(variant: str) -> None:
    chip, *features = variant.split("+")
    properties = CHIPS[chip]
    version = next((f.removeprefix("torch") for f in features if f.startswith("torch")), None)
    if version is not None:
        torch.__version__ = torch.torch_version.TorchVersion(f"{version}.0+xpu")
    kind = add_device(
        "xpu",
        count=2,
        total_bytes=properties.total_memory,
        no_dtypes=frozenset() if properties.has_fp64 else frozenset({torch.float64}),
        functions={F.scaled_dot_product_attention: logged("aten::scaled_dot_product_attention", attention)},
        operators={
            aten._scaled_mm_v2.default: logged("aten::_scaled_mm_v2", scaled_product),
            aten._int_mm.default: logged("aten::_int_mm", int_product),
        },
    )
    graph, capture = graph_types(
        kind, GraphRules(collectives=False, side_streams=False), first_name="xpu_graph"
    )
    names = {
        "_is_compiled": lambda: True,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
    }
    if version is None:
        names |= {
            "XPUGraph": graph,
            "graph": as_recorded(recorded(SIGNATURES, "torch"), "torch.xpu.graph", capture),
        }
    put_into(torch.xpu, device_module(kind) | stream_module() | names)
    torch.version.xpu = "20250302"
    torch._C._xpu_getCurrentRawStream = lambda index: 0  # torch._dynamo asks for it where XPU is compiled
    gloo_as("xccl", kind)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """[B, N, S, D]. What torch does depends on which implementations are allowed; math is its last resort."""
    chosen = _chosen(query, key, value, attn_mask, enable_gqa)
    assert not (is_causal and attn_mask is not None), "torch refuses both"
    out = scaled_dot_product(query, key, value, attn_mask, causal=is_causal, scale=scale)
    # A run that fell to the implementation in the open gives other numbers here, so that nobody relies on it.
    return out if chosen != "math" else torch.full_like(out, torch.nan)


def _chosen(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> str:
    shared = query.shape[1] != key.shape[1]
    fits = (
        query.dim() == key.dim() == value.dim() == 4
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and min(query.shape[2], key.shape[2]) > 0
        and (enable_gqa or not shared)
        and query.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and (mask is None or mask.shape[-2:] == (query.shape[2], key.shape[2]))
    )
    if torch._C._get_overrideable_sdp_enabled() and fits and query.shape[3] <= 576:
        return "overrideable"
    half = query.dtype in (torch.bfloat16, torch.float16)
    if torch._C._get_flash_sdp_enabled() and fits and half and mask is None and query.shape[3] in FLASH_HEADS:
        return "flash"
    if torch._C._get_math_sdp_enabled():
        return "math"
    raise RuntimeError("No available kernel. Aborting execution.")


def int_product(self: Tensor, mat2: Tensor) -> Tensor:
    """int8 [M, K] x [K, N] -> int32; XPU's oneDNN takes any of the two orders of the second."""
    assert self.dtype == mat2.dtype == torch.int8
    assert self.shape[0] > 16
    assert self.shape[1] % 8 == mat2.shape[1] % 8 == 0
    return (self.double() @ mat2.double()).to(torch.int32)


def scaled_product(
    self: Tensor,
    mat2: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    contraction_dim: tuple[int, ...] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """e4m3 [M, K] x [K, N], the second column-major, under one recipe on both sides."""
    (rows, inner), outputs = self.shape, mat2.shape[1]
    if self.stride(1) != 1 or mat2.stride(0) != 1:
        raise RuntimeError("scaled_mm: mat_a must be row-major and mat_b column-major")
    if inner % 16 or outputs % 16:
        raise RuntimeError("scaled_mm: trailing dimensions must be divisible by 16")
    if recipe_a != recipe_b or use_fast_accum:
        raise RuntimeError("scaled_mm: unsupported recipes, or fast accumulation, which XPU does not have")
    recipe = F.ScalingType(recipe_a[0])
    wanted = {
        F.ScalingType.TensorWise: ((1,), (1,), torch.float32),
        F.ScalingType.RowWise: ((rows, 1), (1, outputs), torch.float32),
        F.ScalingType.BlockWise1x32: ((rows, inner // 32), (outputs, inner // 32), torch.float8_e8m0fnu),
    }[recipe]
    for scale, shape in ((scale_a[0], wanted[0]), (scale_b[0], wanted[1])):
        if scale.numel() != math.prod(shape) or scale.dtype != wanted[2] or not scale.is_contiguous():
            raise RuntimeError(f"scaled_mm: scales {list(scale.shape)} of {scale.dtype}, wanted {wanted}")
    a, b = self.double(), mat2.double()
    if recipe == F.ScalingType.BlockWise1x32:
        if swizzle_a != [0] or swizzle_b != [0]:
            raise RuntimeError("scaled_mm: XPU takes scales in plain order")
        a = a * scale_a[0].view(rows, -1).double().repeat_interleave(32, dim=1)
        b = b * scale_b[0].view(outputs, -1).double().repeat_interleave(32, dim=1).t()
        out = a @ b
    else:
        out = (a @ b) * scale_a[0].double() * scale_b[0].double()
    if bias is not None:
        out = out + bias.double()
    return out.to(out_dtype or torch.bfloat16)
