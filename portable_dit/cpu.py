"""The built-in backend: the host's own processor. It implements the whole contract: all paths run anywhere.

Which kernel comes first was measured on an x86 server core with AVX512-BF16 and VNNI, one thread, torch
2.13; the docstrings hold the figures. Not here: float16, which no CPU multiplies at speed (130 ms where
bfloat16 takes 3).

Letters: B batch, S tokens, C channels, N heads (attention) or out features (linear), D head_dim, K in
features, M rows.
"""

from __future__ import annotations

import ctypes
import gc
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from portable_dit import host
from portable_dit.backend import (
    API_VERSION,
    AttentionKernel,
    Backend,
    EmulatedLinear,
    FusedOp,
    LinearKernel,
    Packed,
)
from portable_dit.capabilities import AttentionRequest, Capabilities, Device, LinearRequest, Reject
from portable_dit.formats import FORMATS, QUANTIZED, Agree, quantize_blocks
from portable_dit.hooks import hookimpl
from portable_dit.masks import Causal, Mask, to_keep

if TYPE_CHECKING:
    from portable_dit.ops import Modulation, Rotary

# Instructions that multiply bfloat16 with float32 sums. Without them torch emulates it, slower than float32.
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
INT8_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "i8mm"})
# A layout's devices are processes here, which share the processor: for trying layouts, not for speed.
MOST_PROCESSES = 64
CHUNK_BYTES = 2 << 20  # of scores, so that they stay in the caches


def _refuse_dtype(request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
    if request.dtype == "float16":
        return Reject("dtype", "no CPU has fast float16 products; use bfloat16 or float32")
    if request.dtype not in capabilities.dtypes:
        return Reject(
            "dtype", f"this processor has {', '.join(sorted(capabilities.dtypes))}, not {request.dtype}"
        )
    return None


class MatmulAttention(AttentionKernel):
    """bfloat16 attention as two matrix products and a softmax, over chunks of queries to bound the scores.

    At 544 rows, 4x128 heads: 6.2 ms against 7.9 ms of SDPA flash, since only plain products use the
    bfloat16 units. Scores and softmax are float32: scores rounded to bfloat16 would save another 1.5 ms,
    and be wrong by 7 % where they reach 30.
    """

    id = "matmul"

    def refuse(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        if request.return_lse:
            return Reject("lse", "does not give the log-sum-exp")
        if request.dtype != "bfloat16":
            return Reject("dtype", f"takes bfloat16, where it is the fastest, not {request.dtype}")
        return _refuse_dtype(request, capabilities)

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
        batch, rows_q, heads, dim = q.shape
        rows_k, groups = k.shape[1], heads // k.shape[2]
        keep = to_keep(mask, rows_q, rows_k, q.device)
        if keep is not None:
            keep = keep.expand(*keep.shape[:-2], rows_q, rows_k)
        k, v = (t.repeat_interleave(groups, dim=2) if groups > 1 else t for t in (k, v))
        queries = (q.float() * scale).transpose(1, 2).reshape(batch * heads, rows_q, dim)
        keys = k.float().permute(0, 2, 3, 1).reshape(batch * heads, dim, rows_k)
        values = v.transpose(1, 2).reshape(batch * heads, rows_k, dim)
        step = max(CHUNK_BYTES // (batch * heads * rows_k * 4), 64)
        parts = []
        for start in range(0, rows_q, step):
            scores = torch.bmm(queries[:, start : start + step], keys)  # [B * N, step, Sk]
            if keep is not None:
                seen = keep[..., start : start + step, :]
                scores.view(batch, heads, -1, rows_k).masked_fill_(~seen, float("-inf"))
            weights = scores.softmax(dim=-1)
            if keep is not None:
                weights.nan_to_num_(0.0)  # a row that sees nothing
            parts.append(torch.bmm(weights.to(v.dtype), values))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return out.view(batch, heads, rows_q, dim).transpose(1, 2)  # [B, Sq, N, D]


class SdpaAttention(AttentionKernel):
    """torch's scaled_dot_product_attention, pinned to one implementation: a list falls back unseen."""

    def __init__(self, id: str, implementation: SDPBackend) -> None:
        self.id = id
        self._implementation = implementation

    def refuse(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        if request.return_lse:
            return Reject("lse", "torch's function does not give the log-sum-exp")
        if request.num_heads % request.num_kv_heads:
            return Reject(
                "heads", f"{request.num_kv_heads} key heads must divide {request.num_heads} query heads"
            )
        return _refuse_dtype(request, capabilities)

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
        rows_q, rows_k = q.shape[1], k.shape[1]
        # torch aligns is_causal at the first key, ours at the last: the same only when there are as many of
        # both.
        causal = isinstance(mask, Causal) and rows_q == rows_k
        keep = None if causal else to_keep(mask, rows_q, rows_k, q.device)
        with sdpa_kernel(self._implementation):
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=keep,
                is_causal=causal,
                scale=scale,
                enable_gqa=q.shape[2] != k.shape[2],
            )
        return out.transpose(1, 2)  # [B, Sq, N, D]


class MathAttention(AttentionKernel):
    """The plain float32 body, for what the others do not give: the log-sum-exp."""

    def refuse(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        return _refuse_dtype(request, capabilities)


class Int8Linear(LinearKernel):
    """int8 weight by row times int8 input by row, summed in int32.

    At 544 x 384 -> 2048: 2.6 ms with the quantisation of the input, against 4.0 ms in bfloat16 and 9.1 in
    float32.
    """

    quantizes_input = True
    agrees = True

    def __init__(self, format: str) -> None:
        super().__init__(format, "int8_matmul")

    def refuse(self, request: LinearRequest, capabilities: Capabilities) -> Reject | None:
        if request.in_features * 127 * 127 >= 1 << 31:
            return Reject("in_features", f"{request.in_features} products of 127 x 127 overflow int32 sums")
        if not capabilities.multiplies(self.format.name):
            return Reject("instructions", f"this processor has none of {', '.join(sorted(INT8_FLAGS))}")
        return None

    def apply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        return self._apply(x, packed, bias, None)

    def apply_divided(self, x: Tensor, packed: Packed, bias: Tensor | None, agree: Agree) -> Tensor:
        return self._apply(x, packed, bias, agree)

    def _apply(self, x: Tensor, packed: Packed, bias: Tensor | None, agree: Agree | None) -> Tensor:
        values, scales = quantize_blocks(x.float(), self.format, (1, 0), agree=agree)
        sums = torch._int_mm(values, packed["values"].t()).float()  # [M, N]
        out = sums.mul_(scales).mul_(packed["scales"].t())
        return (out if bias is None else out.add_(bias)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """ops.rms_norm in one pass, float32 statistics inside: 8 to 13 % less time at 96 to 544 x 384."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def norm_modulate(x: Tensor, weight: Tensor, eps: float, modulation: Modulation, chunk: int) -> Tensor:
    """ops.norm_modulate with weight and 1 + scale multiplied in the small table.

    At 544 x 384: 94 us against 244. In bfloat16 122 us against 248; 65 against 122 at 96 rows.
    """
    table = modulation.table
    shift = F.embedding(modulation.index, table[:, chunk])  # [B, S, C]
    scale = F.embedding(modulation.index, (1 + table[:, chunk + 1]) * weight)  # [B, S, C]
    return shift.addcmul_(F.rms_norm(x, x.shape[-1:], None, eps), scale)


def gated_residual(x: Tensor, branch: Tensor, modulation: Modulation, chunk: int) -> Tensor:
    """ops.gated_residual with a row gather and one multiply-add: 34 us against 99 at 544 x 384.

    In bfloat16 37 us against 89.
    """
    return torch.addcmul(x, F.embedding(modulation.index, modulation.table[:, chunk]), branch)


def head_norm_rotary(x: Tensor, weight: Tensor | None, eps: float, rotary: Rotary | None) -> Tensor:
    """ops.head_norm_rotary in one norm pass and a rotation in place: 144 us against 215 at 544 x 4 x 128.

    No gain in bfloat16.
    """
    x = F.rms_norm(x, x.shape[-1:], weight, eps)  # a fresh tensor, ours to write on
    if rotary is None:
        return x
    pairs = rotary.cos.shape[-1]
    cos, sin = rotary.cos[:, :, None], rotary.sin[:, :, None]  # [B, S, 1, pairs]
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    turned = (first * cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(turned)
    return x


def swiglu(x: Tensor) -> Tensor:
    """ops.swiglu with the product in place: 148 us against 161 at 544 x 2048; no gain in bfloat16."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(value)


class CpuBackend(Backend):
    """The host's processor, its memory limited by the cgroup it runs in."""

    id = "cpu"
    api_version = API_VERSION

    def devices(self) -> list[Device]:
        arch = " ".join([platform.machine(), *sorted(host.cpu_flags() & (BF16_FLAGS | INT8_FLAGS))])
        return [Device(self.id, 0, "cpu", host.cpu_name(), arch, host.memory()[1])]

    def capabilities(self, device: Device) -> Capabilities:
        flags, onednn = host.cpu_flags(), torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        return Capabilities(
            device=device,
            count=MOST_PROCESSES,
            dtypes=frozenset({"float32"} | ({"bfloat16"} if flags & BF16_FLAGS and onednn else set())),
            native_formats=frozenset({"int8_row"} if flags & INT8_FLAGS and onednn else set()),
            host_shares_memory=True,
            host_bytes=host.memory()[1],
        )

    def energy_joules(self, device: Device) -> float | None:
        return host.energy_joules()

    def trim(self, device: Device) -> None:
        gc.collect()
        if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).malloc_trim(0)

    def attention_kernels(self) -> Sequence[AttentionKernel]:
        return (
            MatmulAttention(),
            SdpaAttention("sdpa_flash", SDPBackend.FLASH_ATTENTION),
            SdpaAttention("sdpa_math", SDPBackend.MATH),
            MathAttention(),
        )

    def linear_kernels(self) -> Mapping[str, Sequence[LinearKernel]]:
        emulated: dict[str, Sequence[LinearKernel]] = {
            name: [EmulatedLinear(name)] for name in QUANTIZED if FORMATS[name].activations
        }
        native = {name: [Int8Linear(name), *emulated[name]] for name in ("int8_row", "int8_row_rotated")}
        return {**emulated, **native}

    def fused_ops(self) -> Mapping[str, Sequence[FusedOp]]:
        float32 = frozenset({"float32"})
        ops = (
            FusedOp("rms_norm", "one_pass", rms_norm),
            FusedOp("norm_modulate", "table", norm_modulate),
            FusedOp("gated_residual", "table", gated_residual),
            FusedOp("head_norm_rotary", "in_place", head_norm_rotary, dtypes=float32),
            FusedOp("swiglu", "in_place", swiglu, dtypes=float32),
        )
        return {op.op: [op] for op in ops}


@hookimpl
def portable_dit_backends() -> list[Backend]:
    return [CpuBackend()]
