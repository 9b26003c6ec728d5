"""What runs here: each optional kernel library is called once on the device and compared with plain torch.

A wheel that imports proves nothing: FlashAttention's import on chips that they hold no code for and die at
the first call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from portable_dit import ops
from portable_dit.backend import AttentionKernel
from portable_dit.errors import BackendError
from portable_dit.masks import NO_MASK
from portable_dit_cuda.chips import Capability
from portable_dit_cuda.flash import FA3, FA4, SageAttention
from portable_dit_cuda.fusions import rms_norm

# What a library that is not made for this chip, torch or driver has been seen to raise.
FAULTS = (
    ImportError,
    OSError,
    RuntimeError,
    AttributeError,
    TypeError,
    ValueError,
    AssertionError,
    BackendError,
)
CLOSE = 0.03  # relative error of bfloat16 attention on random data, several times what is usual
CLOSE_INT8 = 0.15


@dataclass(frozen=True)
class Probe:
    """version: of a library that works here, None when it does not; reason: why not."""

    version: str | None
    reason: str | None = None


@cache
def probe_libraries(index: int, capability: Capability) -> dict[str, Probe]:
    """Every optional library by distribution name. Calls the device, so the first time takes seconds."""
    device = torch.device("cuda", index)
    return {
        "triton": _probe("triton", (), lambda: _triton_fault(device)),
        "fa3-fwd": _attention(FA3, ("fa3-fwd", "flash-attn-3", "flash_attn_3"), device, capability),
        "flash-attn-4": _attention(FA4, ("flash-attn-4",), device, capability),
        "sageattention": _attention(SageAttention(), ("sageattention",), device, capability, CLOSE_INT8),
    }


def _attention(
    kernel: AttentionKernel,
    names: tuple[str, ...],
    device: torch.device,
    capability: Capability,
    close: float = CLOSE,
) -> Probe:
    least, most = kernel.least, kernel.most  # type: ignore[attr-defined]
    if not least <= capability <= most:
        return Probe(None, f"{kernel.id} is not for compute capability {capability[0]}.{capability[1]}")
    return _probe(names[0], names[1:], lambda: _attention_fault(kernel, device, close))


def _probe(name: str, other_names: tuple[str, ...], fault: Callable[[], str | None]) -> Probe:
    found = next((v for v in (_version(n) for n in (name, *other_names)) if v is not None), None)
    if found is None:
        return Probe(None, f"not installed; pip install {name}")
    try:
        reason = fault()
    except FAULTS as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return Probe(found if reason is None else None, reason)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _attention_fault(kernel: AttentionKernel, device: torch.device, close: float) -> str | None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 160, 2, 128, generator=generator).to(device, torch.bfloat16)
    with torch.inference_mode():
        got = kernel.run(q, k, v, NO_MASK, scale=128**-0.5)
        wanted = ops.attention(q, k, v, NO_MASK, scale=128**-0.5)
    return _fault(got, wanted, close)


def _triton_fault(device: torch.device) -> str | None:
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    return _fault(rms_norm(x, None, 1e-6), ops.rms_norm(x, None, 1e-6), CLOSE)


def _fault(got: Tensor, wanted: Tensor, close: float) -> str | None:
    error = ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
    return None if error < close else f"wrong numbers: relative error {error:.2g} on a small case"
