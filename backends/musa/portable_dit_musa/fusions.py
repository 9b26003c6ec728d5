"""Seams that muDNN computes in one pass over memory, where the plain body takes several."""

from __future__ import annotations

import torch
from torch import Tensor

from portable_dit.backend import FusedOp

ALL_DTYPES = frozenset({"bfloat16", "float16", "float32"})


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """ops.rms_norm in one kernel, float32 statistics inside."""
    out: Tensor = torch.ops.aten._fused_rmsnorm_forward(x, [x.shape[-1]], eps, weight)[0]
    return out


def swiglu(x: Tensor) -> Tensor:
    """ops.swiglu in one kernel; muDNN too takes silu of the first half."""
    out: Tensor = torch.ops.aten.swish_glu(x)
    return out


FUSED_OPS = (
    FusedOp("rms_norm", "mudnn", rms_norm, dtypes=ALL_DTYPES),
    FusedOp("swiglu", "mudnn", swiglu, dtypes=ALL_DTYPES),
)
