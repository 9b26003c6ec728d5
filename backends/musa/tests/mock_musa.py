"""A machine with Moore Threads devices and torch_musa, as far as Python code can tell.

Variants: "mp_31" an S5000, "mp_22" an S4000, with MATE; "+bare" without it, "+mate99bbf1f" with that version,
"+impostor" with the other package of that name. Written from the vendor's sources; shares no code with the
backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
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
    """What torch.musa.get_device_properties gives."""

    name: str
    major: int
    minor: int
    total_memory: int


CHIPS = {
    "mp_31": Properties("MTT S5000", 3, 1, 80 * GIB),
    "mp_22": Properties("MTT S4000", 2, 2, 48 * GIB),
}


def install(variant: str) -> None:
    chip, *features = variant.split("+")
    properties = CHIPS[chip]
    define_fused_operators()
    kind = add_device(
        "musa",
        count=2,
        total_bytes=properties.total_memory,
        no_dtypes=frozenset({torch.float64}),
        lacks=frozenset({"_scaled_mm_v2", "_int_mm"}),
        functions={F.scaled_dot_product_attention: logged("aten::scaled_dot_product_attention", attention)},
        operators={aten._scaled_mm.default: logged("aten::_scaled_mm", scaled_product(chip))},
    )
    rules = GraphRules(collectives=False, side_streams=False, max_live=2048)
    graph, capture = graph_types(kind, rules, first_name="musa_graph")
    module = ModuleType("torch_musa")
    module.__spec__ = ModuleSpec("torch_musa", None)  # accelerate asks whether it could be imported
    names = {
        "MUSAGraph": graph,
        "graph": logged("torch.musa.graph", capture),
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
    }
    put_into(module, device_module(kind) | stream_module() | names)
    sys.modules["torch_musa"] = module
    torch._register_device_module("musa", module)
    torch.version.musa = "4.3.6"
    gloo_as("mccl", kind)
    if "impostor" in features:
        add_module("mate")  # a helper for tests
    elif "bare" not in features:
        version = next((f.removeprefix("mate") for f in features if f.startswith("mate")), None)
        record = recorded(SIGNATURES, "mate", version or "e65c501")
        bodies = {
            "mate.mha_interface.flash_attn_varlen_func": flash_attention,
            "mate.gemm.gemm_fp8_nt_groupwise": groupwise,
        }
        install_functions(record, bodies)


# --- torch's own functions and the vendor's operators, on host tensors ---


def define_fused_operators() -> None:
    """Two operators that the vendor's build of torch has in `aten`."""
    record = recorded(SIGNATURES, "torch_musa", "2.7.1")
    library = torch.library.Library("aten", "FRAGMENT")
    for name, body in (("_fused_rmsnorm_forward", fused_rms_norm), ("swish_glu", swish_glu)):
        library.define(record.operators[f"aten::{name}"])
        library.impl(name, logged(f"aten::{name}", body), "CompositeExplicitAutograd")
    globals()["_library"] = library  # its operators go when it goes


def fused_rms_norm(
    input: Tensor, normalized_shape: list[int], eps: float, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    assert normalized_shape == [input.shape[-1]]
    assert weight is None or weight.dtype == input.dtype, "DTypes of input/weight must be the same"
    inverse = (input.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    out = input.float() * inverse
    return (out if weight is None else out * weight.float()).to(input.dtype), inverse[..., 0]


def swish_glu(self: Tensor) -> Tensor:
    gate, value = self.float().chunk(2, dim=-1)
    return (gate / (1 + (-gate).exp()) * value).to(self.dtype)


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
    """[B, N, S, D] by muDNN, or math, whose numbers are spoiled here so that nobody lands there unseen."""
    head_dim, half = query.shape[-1], query.dtype in HALVES
    flash = torch.backends.cuda.flash_sdp_enabled() and half and (head_dim <= 128 or head_dim == 160)
    if not flash and not torch.backends.cuda.math_sdp_enabled():
        raise RuntimeError("No viable backend for scaled_dot_product_attention in musa")
    if query.shape[1] != key.shape[1]:
        raise RuntimeError("muDNN: as many key heads as query heads")
    if attn_mask is not None and attn_mask.shape == (query.shape[0], query.shape[2]):
        attn_mask = attn_mask[:, None, None, :]  # taken for padding
    out = scaled_dot_product(query, key, value, attn_mask, causal=is_causal, scale=scale)
    return out if flash else torch.full_like(out, torch.nan)


def scaled_product(chip: str) -> Callable[..., Tensor]:
    def product(
        self: Tensor,
        mat2: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Tensor | None = None,
        scale_result: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
    ) -> Tensor:
        """e4m3 [M, K] x [K, N]; scales of one or M and of one or N."""
        (rows, inner), outputs = self.shape, mat2.shape[1]
        if chip != "mp_31":
            raise RuntimeError("_scaled_mm is for mp_31 and newer")
        if self.dtype != torch.float8_e4m3fn or mat2.dtype != torch.float8_e4m3fn:
            raise RuntimeError(f"_scaled_mm: {self.dtype} and {mat2.dtype}")
        if self.stride(1) != 1 or mat2.stride(0) != 1 or rows % 32 or inner % 32 or outputs % 32:
            raise RuntimeError("_scaled_mm: row-major times column-major, all sizes multiples of 32")
        if scale_a.dtype != torch.float32 or scale_b.dtype != torch.float32:
            raise RuntimeError("_scaled_mm: float32 scales")
        if scale_a.numel() not in (1, rows) or scale_b.numel() not in (1, outputs):
            raise RuntimeError(f"_scaled_mm: {scale_a.numel()} and {scale_b.numel()} scales")
        if out_dtype is None:  # the inputs' own, which loses the result
            out_dtype = self.dtype
        out = (self.float() @ mat2.float()) * scale_a.view(-1, 1) * scale_b.view(1, -1)
        return (out if bias is None else out + bias.float()).to(out_dtype)

    return product


# --- MATE's functions, on device tensors ---


def flash_attention(given: dict[str, Any]) -> Any:
    """[B, S, N, D], or packed rows with offsets; causal at the last key."""
    q, k, v, scale = (given[n] for n in ("q", "k", "v", "softmax_scale"))
    if not (q.dtype == k.dtype == v.dtype and q.dtype in HALVES) or q.shape[-1] > 512:
        raise RuntimeError(f"MATE: {q.dtype} with {q.shape[-1]} channels")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    assert tuple(given["window_size"]) == (-1, -1)
    if given["cu_seqlens_q"] is None:
        out, lse = attend(q, k, v, scale=scale, causal=given["causal"])
        return (out, lse) if given["return_softmax_lse"] else out
    starts_q, starts_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
    assert starts_q.dtype == starts_k.dtype == torch.int32
    assert given["max_seqlen_q"] is not None
    used = given["seqused_k"]
    parts = []
    for entry in range(len(starts_q) - 1):
        a, b, first = int(starts_q[entry]), int(starts_q[entry + 1]), int(starts_k[entry])
        last = int(starts_k[entry + 1]) if used is None else first + int(used[entry])
        rows = (q[None, a:b], k[None, first:last], v[None, first:last])
        parts.append(attend(*rows, scale=scale, causal=given["causal"])[0][0])
    return torch.cat(parts)


def groupwise(given: dict[str, Any]) -> Tensor:
    """a [M, K], b [N, K]; scales [M, K / 128] and [N / 128, K / 128], K-major."""
    a, b, a_scale, b_scale = (given[n] for n in ("a", "b", "a_scale", "b_scale"))
    if given["out_dtype"] not in (None, torch.bfloat16):
        raise ValueError("Only bf16 and fp16 are supported for out_type!")
    assert given["scale_major_mode"] in (None, "K")
    assert given["scale_granularity_mnk"] in (None, (1, 128, 128))
    blocks = a.shape[1] // 128
    if a_scale.shape != (a.shape[0], blocks) or b_scale.shape != (b.shape[0] // 128, blocks):
        raise RuntimeError("gemm_fp8_nt_groupwise: scales [M, K / 128] and [N / 128, K / 128]")
    assert all(t.is_contiguous() for t in (a, b, a_scale, b_scale))
    return product_of_blocks(a, b, a_scale, b_scale).to(torch.bfloat16)
