"""A machine with AMD devices and a ROCm build of torch, as far as Python code can tell.

Variants: "gfx942" an MI325X, "gfx950" an MI350X, "gfx1100" a Radeon, with AITER and FlashAttention; "+bare"
without them, "+aiter0.1.7" with that version, "+impostor" with the other package of that name. Written from
the vendors' documents and sources; shares no code with the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mock_vendor.collectives import gloo_as
from mock_vendor.device import add_device, device_module, put_into
from mock_vendor.maths import attend, product_of_blocks, scaled_dot_product
from mock_vendor.signatures import add_module, install_functions, logged, recorded
from mock_vendor.streams import GraphRules, graph_types, stream_module
from torch import Tensor

aten = torch.ops.aten
SIGNATURES = Path(__file__).parents[1] / "signatures"
GIB = 1 << 30
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Properties:
    """What torch.cuda.get_device_properties gives."""

    name: str
    gcnArchName: str  # noqa: N815
    total_memory: int
    major: int
    minor: int


CHIPS = {
    "gfx942": Properties("AMD Instinct MI325X", "gfx942:sramecc+:xnack-", 256 * GIB, 9, 4),
    "gfx950": Properties("AMD Instinct MI350X", "gfx950:sramecc+:xnack-", 288 * GIB, 9, 5),
    "gfx1100": Properties("AMD Radeon PRO W7900", "gfx1100", 48 * GIB, 11, 0),
}
E4M3 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}


def install(variant: str) -> None:
    chip, *features = variant.split("+")
    properties = CHIPS[chip]
    kind = add_device(
        "cuda",
        count=2,
        total_bytes=properties.total_memory,
        functions={F.scaled_dot_product_attention: logged("aten::scaled_dot_product_attention", attention)},
        operators={
            aten._scaled_mm_v2.default: logged("aten::_scaled_mm_v2", scaled_product(chip)),
        },
    )
    rules = GraphRules(collectives=False, side_streams=False)
    graph, capture = graph_types(kind, rules, first_name="cuda_graph")
    names = {
        "CUDAGraph": graph,
        "graph": logged("torch.cuda.graph", capture),
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
    }
    put_into(torch.cuda, device_module(kind) | stream_module() | names)
    torch.version.hip, torch.version.cuda = "6.4.43484", None
    gloo_as("nccl", kind)
    if "impostor" in features:
        add_module("aiter")  # async iterators
        return
    if "bare" not in features:
        version = next((f.removeprefix("aiter") for f in features if f.startswith("aiter")), None)
        install_libraries(chip, version)


def install_libraries(chip: str, version: str | None) -> None:
    aiter = recorded(SIGNATURES, "aiter", version)
    install_functions(
        aiter,
        {
            "aiter.flash_attn_func": aiter_attention,
            "aiter.gemm_a8w8": a8w8(chip),
            "aiter.gemm_a8w8_blockscale": blockscale(chip),
            "aiter.rms_norm": rms_norm,
            "aiter.silu_and_mul": silu_and_mul,
        },
    )
    install_functions(
        recorded(SIGNATURES, "flash-attn", "2.8.3"), {"flash_attn.flash_attn_func": flash_attention}
    )


# --- torch's own functions, on host tensors ---


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
    """[B, N, S, D]. AOTriton's two kernels, and math where neither is allowed or fits."""
    sizes = query.shape[1] == key.shape[1] == value.shape[1]
    half = query.dtype in HALVES
    flash = torch.backends.cuda.flash_sdp_enabled() and half and sizes and attn_mask is None
    efficient = torch.backends.cuda.mem_efficient_sdp_enabled() and sizes
    if not (flash or efficient or torch.backends.cuda.math_sdp_enabled()):
        raise RuntimeError("No available kernel. Aborting execution.")
    out = scaled_dot_product(query, key, value, attn_mask, causal=is_causal, scale=scale)
    wrong = query.shape[-1] > 256  # reported corrupt
    # Numbers of the implementation in the open are spoiled too, so that nobody lands there unseen.
    return out if (flash or efficient) and not wrong else torch.full_like(out, torch.nan)


def scaled_product(chip: str) -> Callable[..., Tensor]:
    def product(
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
        """[M, K] x [K, N] as hipBLASLt takes them."""
        (rows, inner), outputs = self.shape, mat2.shape[1]
        if self.dtype != E4M3.get(chip) or mat2.dtype != self.dtype:
            raise RuntimeError(f"scaled_mm: {chip} multiplies {E4M3.get(chip)}, not {self.dtype}")
        if self.stride(1) != 1 or mat2.stride(0) != 1:
            raise RuntimeError("scaled_mm: mat_a must be row-major and mat_b column-major")
        if inner % 16 or outputs % 16:
            raise RuntimeError("scaled_mm: trailing dimensions must be divisible by 16")
        recipe = F.ScalingType(recipe_a[0])
        if recipe_a != recipe_b or recipe not in (
            F.ScalingType.TensorWise,
            F.ScalingType.RowWise,
            F.ScalingType.BlockWise1x32,
        ):
            raise RuntimeError("scaled_mm: no such recipe on ROCm")
        a, b, first, second = self.double(), mat2.double(), scale_a[0], scale_b[0]
        if recipe == F.ScalingType.BlockWise1x32:
            if chip != "gfx950" or rows % 32 or inner % 32 or outputs % 32:
                raise RuntimeError("scaled_mm: blocks of 32 on gfx950, all sizes multiples of 32")
            if swizzle_a != [0] or swizzle_b != [0] or first.dtype != torch.float8_e8m0fnu:
                raise RuntimeError("scaled_mm: plain e8m0 scales on ROCm")
            a = a * first.view(rows, -1).double().repeat_interleave(32, dim=1)
            b = b * second.view(outputs, -1).double().repeat_interleave(32, dim=1).t()
            out = a @ b
        else:
            whole = recipe == F.ScalingType.TensorWise
            shapes = ((1,), (1,)) if whole else ((rows, 1), (1, outputs))
            for scale, shape in zip((first, second), shapes, strict=True):
                if scale.dtype != torch.float32 or scale.shape != shape or not scale.is_contiguous():
                    raise RuntimeError(f"scaled_mm: scale {list(scale.shape)}, wanted {shape}")
            if not whole and out_dtype != torch.bfloat16:
                raise RuntimeError("scaled_mm: by row gives bfloat16 only")
            out = (a @ b) * first.double() * second.double()
        return (out if bias is None else out + bias.double()).to(out_dtype or torch.bfloat16)

    return product


# --- the libraries' functions, on device tensors ---


def _attend(given: dict[str, Any], *, max_head_dim: int) -> tuple[Tensor, Tensor]:
    """[B, S, N, D]; causal at the last key, a row that sees nothing gives zeros."""
    q, k, v = given["q"], given["k"], given["v"]
    if not (q.dtype == k.dtype == v.dtype and q.dtype in HALVES):
        raise RuntimeError("FlashAttention only supports fp16 and bf16")
    if q.dim() != 4 or q.shape[-1] % 8 or q.shape[-1] > max_head_dim or q.shape[2] % k.shape[2]:
        raise RuntimeError(f"FlashAttention: shape {list(q.shape)} with {list(k.shape)}")
    assert given["dropout_p"] == 0.0
    assert tuple(given["window_size"])[:2] == (-1, -1)
    scale = given["softmax_scale"] if given["softmax_scale"] is not None else q.shape[-1] ** -0.5
    return attend(q, k, v, scale=scale, causal=given["causal"])


def aiter_attention(given: dict[str, Any]) -> Any:
    out, lse = _attend(given, max_head_dim=256)
    return (out, lse) if given["return_lse"] else out


def flash_attention(given: dict[str, Any]) -> Any:
    out, lse = _attend(given, max_head_dim=256)
    return (out, lse, None) if given["return_attn_probs"] else out


def a8w8(chip: str) -> Callable[[dict[str, Any]], Tensor]:
    def product(given: dict[str, Any]) -> Tensor:
        """XQ [M, K], WQ [N, K], x_scale [M, 1], w_scale [1, N]; int8 unless the values say otherwise."""
        x, w, x_scale, w_scale = (given[n] for n in ("XQ", "WQ", "x_scale", "w_scale"))
        if x.dtype != w.dtype or x.dtype not in (torch.int8, E4M3[chip]):
            raise RuntimeError(f"gemm_a8w8: {x.dtype} on {chip}")
        if x.shape[1] != w.shape[1] or not (x.is_contiguous() and w.is_contiguous()):
            raise RuntimeError("gemm_a8w8: [M, K] and [N, K], both row-major")
        if x_scale.shape != (x.shape[0], 1) or w_scale.shape != (1, w.shape[0]):
            raise RuntimeError("gemm_a8w8: scales [M, 1] and [1, N]")
        assert given["bias"] is None
        out = (x.double() @ w.double().t()) * x_scale.double() * w_scale.double()
        return out.to(given["dtype"] or torch.bfloat16)

    return product


def blockscale(chip: str) -> Callable[[dict[str, Any]], Tensor]:
    def product(given: dict[str, Any]) -> Tensor:
        """x_scale [M, K / 128], w_scale [N / 128, K / 128]."""
        x, w, x_scale, w_scale = (given[n] for n in ("XQ", "WQ", "x_scale", "w_scale"))
        if x.dtype != E4M3[chip] or w.dtype != E4M3[chip]:
            raise RuntimeError(f"gemm_a8w8_blockscale: {x.dtype} on {chip}")
        blocks = x.shape[1] // 128
        if x_scale.shape != (x.shape[0], blocks) or w_scale.shape != (w.shape[0] // 128, blocks):
            raise RuntimeError("gemm_a8w8_blockscale: scales [M, K / 128] and [N / 128, K / 128]")
        assert not given["isBpreshuffled"]
        return product_of_blocks(x, w, x_scale, w_scale).to(given["dtype"] or torch.bfloat16)

    return product


def rms_norm(given: dict[str, Any]) -> Tensor:
    x, weight = given["input"], given["weight"]
    assert x.is_contiguous()
    assert weight.dtype == x.dtype, "weight dtype must match input"
    size = (x.float().square().mean(-1, keepdim=True) + given["epsilon"]).rsqrt()
    return (x.float() * size * weight.float()).to(x.dtype)


def silu_and_mul(given: dict[str, Any]) -> None:
    gate, value = given["input"].float().chunk(2, dim=-1)
    given["out"].copy_(gate / (1 + (-gate).exp()) * value)
