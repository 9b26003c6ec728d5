"""Whether MATE runs here: it is called once on the device and compared with plain torch.

The package `mate` on the Python index is another one; and this one's kernels are for mp_31 alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from portable_dit import ops
from portable_dit.errors import BackendError
from portable_dit.masks import NO_MASK
from portable_dit_musa.attention import MATE_ATTENTION
from portable_dit_musa.chips import FP8_FROM, arch_name, version_of

# What a library that is not made for this chip, torch or driver raises.
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


@dataclass(frozen=True)
class Probe:
    """version: of a library that works here, None when it does not; reason: why not."""

    version: str | None
    reason: str | None = None


@cache
def probe_mate(index: int, arch: str) -> Probe:
    """MATE by a small call. Compiles kernels the first time."""
    if version_of(arch) < FP8_FROM:
        return Probe(None, f"its kernels are for {arch_name(FP8_FROM)}")
    if find_spec("mate") is None:
        return Probe(None, "not installed; it is built from github.com/MooreThreads/mate")
    try:
        reason = _fault(torch.device("musa", index))
    except FAULTS as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return Probe(_version() if reason is None else None, reason)


def _version() -> str:
    try:
        return version("mate")
    except PackageNotFoundError:
        return "unknown"  # a source tree that is only on the path


def _fault(device: torch.device) -> str | None:
    """How far one small call is from the plain body, when it is too far."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 160, 2, 128, generator=generator).to(device, torch.bfloat16)
    with torch.inference_mode():
        got = MATE_ATTENTION.run(q, k, v, NO_MASK, scale=128**-0.5).float()
        wanted = ops.attention(q, k, v, NO_MASK, scale=128**-0.5).float()
    error = ((got - wanted).norm() / wanted.norm()).item()
    return None if error < CLOSE else f"wrong numbers: relative error {error:.2g} on a small case"
