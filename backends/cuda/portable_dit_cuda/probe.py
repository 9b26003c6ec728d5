"""What runs here: each optional kernel library is called once on the device and compared with plain torch.

FlashAttention's wheels import on chips that they hold no code for, and die at the first call.
"""

from __future__ import annotations

from functools import cache

import torch

from portable_dit import ops
from portable_dit.backend import LinearKernel
from portable_dit.formats import decode, encode
from portable_dit.probing import CLOSE, Probe, attention_fault, difference, installed_version, probe
from portable_dit_cuda.attention import OnChips
from portable_dit_cuda.chips import Capability
from portable_dit_cuda.cudnn_attention import LIBRARY as CUDNN
from portable_dit_cuda.cudnn_attention import CudnnFp8Attention
from portable_dit_cuda.flash import FA3, FA4, SageAttention
from portable_dit_cuda.fusions import rms_norm
from portable_dit_cuda.linear import FLASHINFER, FlashInferLinear

CLOSE_8_BITS = 0.15  # relative error of attention with 8-bit scores


@cache
def probe_libraries(index: int, capability: Capability) -> dict[str, Probe]:
    """Every optional library by distribution name. Calls the device, so the first time takes seconds."""
    device = torch.device("cuda", index)
    fa3 = ("fa3-fwd", "flash-attn-3", "flash_attn_3")
    return {
        "triton": _triton(device),
        "fa3-fwd": _attention(FA3, fa3, device, capability),
        "flash-attn-4": _attention(FA4, ("flash-attn-4",), device, capability),
        "sageattention": _attention(SageAttention(), ("sageattention",), device, capability, CLOSE_8_BITS),
        FLASHINFER: _flashinfer(device, capability),
        CUDNN: _attention(CudnnFp8Attention(), (CUDNN,), device, capability, CLOSE_8_BITS),
    }


def _attention(
    kernel: OnChips,
    distributions: tuple[str, ...],
    device: torch.device,
    capability: Capability,
    close: float = CLOSE,
) -> Probe:
    if capability < kernel.least or (kernel.most is not None and capability > kernel.most):
        return Probe(None, f"{kernel.id} is not for compute capability {capability[0]}.{capability[1]}")
    if installed_version(distributions) is None:
        return Probe(None, f"not installed; pip install {distributions[0]}")
    return probe(distributions, lambda: attention_fault(kernel, device, close=close))


def _flashinfer(device: torch.device, capability: Capability) -> Probe:
    """One product. Without flashinfer-jit-cache the library compiles its kernel first, for minutes."""
    if capability < (10, 0):
        return Probe(None, f"mxfp8 is not for compute capability {capability[0]}.{capability[1]}")
    if installed_version((FLASHINFER,)) is None:
        return Probe(None, f"not installed; pip install {FLASHINFER}")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(160, 256, generator=generator).to(device, torch.bfloat16)
    weight = torch.randn(128, 256, generator=generator).to(device)
    return probe((FLASHINFER,), lambda: _product_fault(FlashInferLinear(), x, weight))


def _product_fault(kernel: LinearKernel, x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """What is wrong with one product of x [M, K] and a weight [N, K]; both were rounded by the format."""
    stored = encode(weight, kernel.format.name)
    got = kernel.apply(x, kernel.pack(stored, x.dtype), None)
    return difference(got, x.float() @ decode(stored).t(), close=CLOSE_8_BITS)


def _triton(device: torch.device) -> Probe:
    if installed_version(("triton",)) is None:
        return Probe(None, "not installed; pip install triton")
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    return probe(("triton",), lambda: difference(rms_norm(x, None, 1e-6), ops.rms_norm(x, None, 1e-6)))
