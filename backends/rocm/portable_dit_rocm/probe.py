"""What runs here: each optional kernel library is called once on the device and compared with plain torch.

A package that imports proves nothing: `aiter` on the Python index is another one, and kernels are compiled at
their first call, for chips that may not be this one. That first call of AITER takes minutes and is kept on
disk; whoever draws with it would wait for it in any case.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from portable_dit import ops
from portable_dit.errors import BackendError
from portable_dit.masks import NO_MASK
from portable_dit_rocm.attention import AITER_ATTENTION, FLASH_ATTN, FlashAttention
from portable_dit_rocm.chips import AITER

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
log = logging.getLogger("portable_dit")


@dataclass(frozen=True)
class Probe:
    """version: of a library that works here, None when it does not; reason: why not."""

    version: str | None
    reason: str | None = None


@cache
def probe_libraries(index: int, arch: str) -> dict[str, Probe]:
    """Every optional library by name. Calls the device, so the first time takes seconds, or minutes."""
    return {
        "aiter": _probe(AITER_ATTENTION, "aiter", ("amd-aiter", "aiter"), AITER, index, arch),
        "flash-attn": _probe(FLASH_ATTN, "flash_attn", ("flash-attn",), (), index, arch),
    }


def _probe(
    kernel: FlashAttention,
    module: str,
    distributions: tuple[str, ...],
    archs: tuple[str, ...],
    index: int,
    arch: str,
) -> Probe:
    if find_spec(module) is None:
        return Probe(None, f"not installed; {arch} runs on torch's own attention")
    if archs and arch not in archs:
        return Probe(None, f"has no kernels for {arch}")
    log.info("probing %s, which compiles its kernels at the first call", module)
    try:
        reason = _fault(kernel, torch.device("cuda", index))
    except FAULTS as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return Probe(_version(distributions) if reason is None else None, reason)


def _version(distributions: tuple[str, ...]) -> str:
    found = (_installed(name) for name in distributions)
    return next((v for v in found if v is not None), "unknown")  # a source tree that is only on the path


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _fault(kernel: FlashAttention, device: torch.device) -> str | None:
    """How far one small call is from the plain body, when it is too far."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 160, 2, 128, generator=generator).to(device, torch.bfloat16)
    with torch.inference_mode():
        got = kernel.run(q, k, v, NO_MASK, scale=128**-0.5).float()
        wanted = ops.attention(q, k, v, NO_MASK, scale=128**-0.5).float()
    error = ((got - wanted).norm() / wanted.norm()).item()
    return None if error < CLOSE else f"wrong numbers: relative error {error:.2g} on a small case"
