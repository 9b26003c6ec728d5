"""Seams that AITER computes in one pass over memory, where the plain body takes several."""

from __future__ import annotations

import torch
from torch import Tensor

from portable_dit.backend import FusedOp
from portable_dit.capabilities import Capabilities, FusionRequest, Reject, Request
from portable_dit_rocm.attention import library_function
from portable_dit_rocm.chips import AITER, refuse_library

ALIGNMENT = 8  # channels that a thread reads at once


class AiterOp(FusedOp):
    """A fused function of AITER; refused where it is not installed or has no kernels for the chip."""

    def check(self, request: Request, capabilities: Capabilities) -> Reject | None:
        assert isinstance(request, FusionRequest)
        arch = capabilities.device.arch
        if arch not in AITER:
            return Reject("arch", f"has kernels for {', '.join(AITER)}, not {arch}")
        if request.channels % ALIGNMENT:
            return Reject("channels", f"{request.channels} channels are no multiple of {ALIGNMENT}")
        return refuse_library("aiter", capabilities) or super().check(request, capabilities)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """ops.rms_norm in one kernel instead of four, float32 statistics inside."""
    gain = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device) if weight is None else weight
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # [M, C]
    out: Tensor = library_function("aiter", "rms_norm")(rows, gain, eps)
    return out.view(x.shape)


def swiglu(x: Tensor) -> Tensor:
    """ops.swiglu in one kernel; AITER too takes silu of the first half."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # [M, 2F]
    out = torch.empty(rows.shape[0], rows.shape[1] // 2, dtype=x.dtype, device=x.device)
    library_function("aiter", "silu_and_mul")(out, rows)
    return out.view(*x.shape[:-1], -1)  # [..., F]


HALVES = frozenset({"bfloat16", "float16"})
FUSED_OPS = (
    AiterOp("rms_norm", "aiter", rms_norm, dtypes=HALVES),
    AiterOp("swiglu", "aiter", swiglu, dtypes=HALVES),
)
