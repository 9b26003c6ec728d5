"""A machine with Ascend NPUs, CANN and torch_npu, as far as Python code can tell.

Variants: "a2" an Atlas 800I A2, "a3" an Atlas 800T A3, "a5" an Atlas 350, "310p" a chip that is not served.
The operators have the vendor's semantics, defaults included; written from its documents, and sharing no code
with the backend. Letters: B batch, S tokens, N heads, D head_dim.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from mock_vendor.collectives import gloo_as
from mock_vendor.device import add_device, device_module, put_into
from mock_vendor.signatures import as_recorded, define_operators, log_call, recorded
from mock_vendor.streams import GraphRules, graph_types, stream_module
from torch import Tensor

SIGNATURES = Path(__file__).parents[1] / "signatures"
GIB = 1 << 30
# SoC number, name, memory of one device.
CHIPS = {
    "a2": (225, "Ascend910B4-1", 64 * GIB),
    "a3": (250, "Ascend910_9391", 64 * GIB),
    "a5": (260, "Ascend950PR_9599", 112 * GIB),
    "310p": (202, "Ascend310P3", 24 * GIB),
}
TYPE_NUMBERS = {"float8_e4m3fn": 292, "float8_e8m0fnu": 293, "float4_e2m1fn_x2": 296}
SCALAR_TYPES = {1: torch.int8, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16, 3: torch.int32}


def install(variant: str) -> None:
    soc, name, total = CHIPS[variant]
    kind = add_device(
        "npu",
        count=2,
        total_bytes=total,
        no_dtypes=frozenset({torch.float64}),
        lacks=frozenset({"_scaled_mm", "_scaled_mm_v2", "_int_mm"}),
    )
    record = recorded(SIGNATURES, "torch_npu")
    graph, capture = graph_types(
        kind, GraphRules(side_streams=False, collectives=False, fatal=True), first_name="npu_graph"
    )
    module = ModuleType("torch.npu")
    put_into(
        module,
        device_module(kind)
        | stream_module()
        | {
            "NPUGraph": graph,
            "graph": as_recorded(record, "torch.npu.graph", capture),
            "get_device_name": lambda device=None: name,
            "get_device_properties": lambda device=None: SimpleNamespace(name=name, total_memory=total),
            "get_device_capability": lambda device=None: None,
            "get_soc_version": lambda: soc,
        },
    )
    torch._register_device_module("npu", module)
    torch_npu = ModuleType("torch_npu")
    torch_npu.__spec__ = ModuleSpec("torch_npu", None)  # transformers asks whether it could be imported
    torch_npu.npu = module
    put_into(torch_npu, TYPE_NUMBERS)
    sys.modules["torch_npu"] = torch_npu
    on_a5 = {"npu::npu_dynamic_mx_quant": mx_quant}
    define_operators(record, BODIES | (on_a5 if soc >= 260 else {}))
    for operator in record.operators:
        short = operator.removeprefix("npu::")
        _log_operator(short)
        setattr(torch_npu, short, getattr(torch.ops.npu, short, None))
    gloo_as("hccl", kind, takes_device_id=False)


def _log_operator(name: str) -> None:
    packet = getattr(torch.ops.npu, name, None)
    if packet is None:
        return

    def logged(*args: Any, **kwargs: Any) -> Any:
        log_call(f"npu::{name}", len(args), list(kwargs))
        return packet(*args, **kwargs)

    logged.default = packet.default  # type: ignore[attr-defined]  # torch's C++ side asks for it by this name
    setattr(torch.ops.npu, name, logged)


def attend(
    query: Tensor, key: Tensor, value: Tensor, drop: Tensor | None, scale: float, sparse_mode: int
) -> tuple[Tensor, Tensor]:
    """BSND attention in float32 with a mask of what is dropped; gives the scores' log-sum-exp [B, N, Sq]."""
    (batch, rows_q, heads, dim), rows_k = query.shape, key.shape[1]
    for tensor in (query, key, value):
        assert tensor.is_contiguous(), "inputs must be contiguous"
    assert heads % key.shape[2] == 0
    assert heads * dim < 65535
    key, value = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (key, value))
    scores = torch.einsum("bqnd,bknd->bnqk", query.float(), key.float()) * scale
    if sparse_mode == 3:
        assert drop is not None
        assert drop.shape == (2048, 2048), "sparse_mode 3 takes the compressed mask"
        assert torch.equal(drop.bool(), torch.ones(2048, 2048, dtype=torch.bool).triu(1))
        seen_to = torch.arange(rows_q)[:, None] + rows_k - rows_q
        drop = torch.arange(rows_k)[None, :] > seen_to
    elif drop is not None:
        assert sparse_mode == 0
        allowed = [(batch, 1, rows_q, rows_k), (batch, heads, rows_q, rows_k), (1, 1, rows_q, rows_k)]
        assert tuple(drop.shape) in [*allowed, (rows_q, rows_k)], f"mask {list(drop.shape)} is not broadcast"
        assert drop.is_contiguous()
    if drop is not None:
        assert drop.dtype in (torch.bool, torch.uint8, torch.int8)
        scores = scores.masked_fill(drop.bool(), -torch.inf)  # a row without keys comes out as NaN
    out = torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), value.float())
    return out.to(query.dtype), scores.logsumexp(-1)


def fused_infer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:
    assert input_layout == "BSND"
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert query.shape[2] == num_heads
    assert key.shape[2] == (num_key_value_heads or num_heads)
    assert query.shape[3] % 16 == 0
    assert query.shape[3] <= 512
    out, lse = attend(query, key, value, atten_mask, scale, sparse_mode)
    return out, lse[..., None] if softmax_lse_flag else torch.empty(0)


def fusion(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    *rest: Any,
) -> tuple[Any, ...]:
    if torch.npu.is_current_stream_capturing():
        raise RuntimeError("npu_fusion_attention: the operator synchronizes and cannot be captured")
    assert input_layout == "BSND"
    assert head_num == query.shape[2]
    assert keep_prob == 1.0
    assert query.shape[3] <= 768
    out, lse = attend(query, key, value, atten_mask, scale, sparse_mode)
    peak = lse[..., None].expand(-1, -1, -1, 8)
    return out, peak.contiguous(), torch.ones_like(peak), torch.empty(0), 0, 0, 0


def dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    assert input.dtype in (torch.bfloat16, torch.float16)
    assert dst_type in (None, 1)
    scales = input.float().abs().amax(-1) / 127
    values = (input.float() / scales.clamp_min(1e-30)[..., None]).round().clamp(-128, 127)
    return values.to(torch.int8), scales


def mx_quant(
    input: Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int = 296,
    block_size: int = 32,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """e4m3 values and bytes of scales in pairs, [..., K / 64, 2]; 4-bit values by default."""
    assert axis in (-1, input.dim() - 1)
    assert input.dtype in (torch.bfloat16, torch.float16)
    assert block_size == 32
    if dst_type != 292:
        halves = (*input.shape[:-1], input.shape[-1] // 2)
        return torch.zeros(halves, dtype=torch.uint8), torch.zeros((*input.shape, 2), dtype=torch.uint8)
    groups = -(-input.shape[-1] // 32)
    x = torch.nn.functional.pad(input.float(), (0, groups * 32 - input.shape[-1]))
    blocks = x.view(*input.shape[:-1], groups, 32).double()
    peak = blocks.abs().amax(-1)
    if scale_alg == 1:
        exponent = (peak / 448).clamp_min(2.0**-127).log2().ceil()
    else:
        exponent = peak.clamp_min(2.0**-119).log2().floor() - 8
    values = (blocks / torch.exp2(exponent)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = (exponent + 127).to(torch.uint8)
    scales = torch.nn.functional.pad(scales, (0, groups % 2)).view(*input.shape[:-1], -1, 2)
    return values.view(*input.shape[:-1], -1)[..., : input.shape[-1]].contiguous(), scales


def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: list[int] | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    (rows, inner), outputs = x1.shape, x2.shape[1]
    assert x2.shape[0] == inner, "the weight is [K, N]"
    assert max(inner, outputs) <= 65535
    if x1.dtype is torch.int8:
        assert scale.shape == (outputs,)
        out = x1.double() @ x2.double() * scale.double()
        if pertoken_scale is not None:
            assert pertoken_scale.shape == (rows,)
            assert pertoken_scale.dtype is torch.float32
            out = out * pertoken_scale.double()[:, None]
    else:
        out = _mx_product(x1, x2, scale, pertoken_scale, (scale_dtype, pertoken_scale_dtype), group_sizes)
        assert bias is None or bias.dtype is torch.float32, "bias of an MX product is float32"
    if bias is not None:
        assert bias.dtype in (torch.float32, torch.int32, SCALAR_TYPES[output_dtype or 1])
        out = out + bias.double()
    if output_dtype is None:
        return out.round().clamp(-128, 127).to(torch.int8)
    return out.to(SCALAR_TYPES[output_dtype])


def _mx_product(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    pertoken_scale: Tensor | None,
    scale_types: tuple[int | None, int | None],
    group_sizes: list[int] | None,
) -> Tensor:
    (rows, inner), outputs = x1.shape, x2.shape[1]
    pairs = math.ceil(math.ceil(inner / 32) / 2)
    assert x1.dtype is x2.dtype is torch.float8_e4m3fn
    assert scale_types == (293, 293), "types of the scales must be told"
    assert group_sizes == [1, 1, 32]
    assert scale.dtype is torch.uint8
    assert tuple(scale.shape) == (pairs, outputs, 2), f"scales {list(scale.shape)}"
    assert pertoken_scale is not None
    assert tuple(pertoken_scale.shape) == (rows, pairs, 2)
    left = torch.exp2(pertoken_scale.double() - 127).reshape(rows, -1).repeat_interleave(32, dim=1)
    right = torch.exp2(scale.double() - 127).transpose(0, 1).reshape(outputs, -1).repeat_interleave(32, dim=1)
    return (x1.double() * left[:, :inner]) @ (x2.double() * right[:, :inner].t())


def weight_quant_matmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> Tensor:
    assert weight.shape == (x.shape[1], antiquant_scale.numel())
    assert antiquant_scale.dtype is x.dtype
    out = (x.double() @ (weight.double() * antiquant_scale.double())).to(x.dtype)
    return out if bias is None else out + bias


def rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    assert gamma.shape == self.shape[-1:]
    inverse = (self.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (self.float() * inverse * gamma.float()).to(self.dtype), inverse


def rotary_mul(
    self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    width = self.shape[-1]
    assert self.dim() == 4
    assert width % 2 == 0
    assert width < 896
    for table in (r1, r2):
        assert table.dim() == 4
        assert table.shape[-1] == width, "tables have full width"
        assert table.dtype is self.dtype
    if rotary_mode == "half":
        first, second = self.float().chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    else:
        turned = torch.stack([-self[..., 1::2], self[..., ::2]], dim=-1).flatten(-2).float()
    return (self.float() * r1.float() + turned * r2.float()).to(self.dtype)


def swiglu(self: Tensor, dim: int = -1) -> Tensor:
    gate, value = self.float().chunk(2, dim=dim)
    return (torch.nn.functional.silu(gate) * value).to(self.dtype)


BODIES: dict[str, Callable[..., Any]] = {
    "npu::npu_fused_infer_attention_score": fused_infer,
    "npu::npu_fusion_attention": fusion,
    "npu::npu_dynamic_quant": dynamic_quant,
    "npu::npu_quant_matmul": quant_matmul,
    "npu::npu_weight_quant_batchmatmul": weight_quant_matmul,
    "npu::npu_rms_norm": rms_norm,
    "npu::npu_rotary_mul": rotary_mul,
    "npu::npu_swiglu": swiglu,
}
