"""Seams of the models on the NPU's fused operators, each one pass where the plain body makes several.

Letters: B batch, S tokens, C channels, N heads, D head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_dit.backend import FusedOp
from portable_dit.capabilities import Capabilities, FusionRequest, Reject, Request
from portable_dit.ops import Modulation, Rotary
from portable_dit_ascend.device import SERVED

MAX_ROTARY_DIM = 896


class NpuOp(FusedOp):
    """A fused operator; refused on chips that this package does not know."""

    def check(self, request: Request, capabilities: Capabilities) -> Reject | None:
        assert isinstance(request, FusionRequest)
        arch = capabilities.device.arch
        if arch not in SERVED:
            return Reject("arch", f"serves {', '.join(SERVED)}, not {arch}")
        if request.op == "head_norm_rotary" and request.channels >= MAX_ROTARY_DIM:
            return Reject("head_dim", f"takes heads below {MAX_ROTARY_DIM}, not {request.channels}")
        return super().check(request, capabilities)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """ops.rms_norm in one pass, statistics in float32."""
    gain = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device) if weight is None else weight
    out: Tensor = torch.ops.npu.npu_rms_norm(x, gain, epsilon=eps)[0]
    return out


def norm_modulate(x: Tensor, weight: Tensor, eps: float, modulation: Modulation, chunk: int) -> Tensor:
    """ops.norm_modulate: the norm in one pass, scale and shift in another."""
    table = modulation.table
    shift = F.embedding(modulation.index, table[:, chunk])  # [B, S, C]
    scale = F.embedding(modulation.index, 1 + table[:, chunk + 1])  # [B, S, C]
    return torch.addcmul(shift, rms_norm(x, weight, eps), scale)


def head_norm_rotary(x: Tensor, weight: Tensor | None, eps: float, rotary: Rotary | None) -> Tensor:
    """ops.head_norm_rotary: the norm in one pass, the rotation in another, channels beyond it kept."""
    x = rms_norm(x, weight, eps)
    if rotary is None:
        return x
    turned = 2 * rotary.cos.shape[-1]
    # The operator takes the tables at full width, one entry for each channel: [B, S, 1, D].
    cos, sin = (torch.cat([t, t], dim=-1)[:, :, None] for t in (rotary.cos, rotary.sin))
    rows = x if turned == x.shape[-1] else x[..., :turned].contiguous()
    out: Tensor = torch.ops.npu.npu_rotary_mul(rows, cos, sin, rotary_mode="half")
    return out if turned == x.shape[-1] else torch.cat([out, x[..., turned:]], dim=-1)


def swiglu(x: Tensor) -> Tensor:
    """ops.swiglu in one pass; the operator, too, puts silu on the first half."""
    out: Tensor = torch.ops.npu.npu_swiglu(x, dim=-1)
    return out


FUSED_OPS = (
    NpuOp("rms_norm", "npu", rms_norm),
    NpuOp("norm_modulate", "npu", norm_modulate),
    NpuOp("head_norm_rotary", "npu", head_norm_rotary),
    NpuOp("swiglu", "npu", swiglu),
)
