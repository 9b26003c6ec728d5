"""Probing: whether an optional kernel library works here. It is called once and compared with plain torch.

A package that imports proves nothing: another one may have its name, and kernels for other chips die at the
first call, or give wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from portable_dit import ops
from portable_dit.backend import AttentionKernel
from portable_dit.errors import BackendError
from portable_dit.masks import NO_MASK

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


@dataclass(frozen=True)
class Probe:
    """version: of a library that works here, None when it does not; reason: why not."""

    version: str | None
    reason: str | None = None


def probe(distributions: tuple[str, ...], fault: Callable[[], str | None]) -> Probe:
    """The probe of a library that is there, under one of these names of its distribution.

    fault: calls it and says what is wrong, None when nothing is.
    """
    try:
        reason = fault()
    except FAULTS as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    if reason is not None:
        return Probe(None, reason)
    return Probe(installed_version(distributions) or "unknown")  # a source tree that is only on the path


def installed_version(distributions: tuple[str, ...]) -> str | None:
    """The version of the first of these distributions that is installed, None when none is."""
    return next((found for name in distributions if (found := _version(name)) is not None), None)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def attention_fault(kernel: AttentionKernel, device: torch.device, *, close: float = CLOSE) -> str | None:
    """What is wrong with one small call of an attention kernel in bfloat16, None when nothing is."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 160, 2, 128, generator=generator).to(device, torch.bfloat16)
    with torch.inference_mode():
        got = kernel.run(q, k, v, NO_MASK, scale=128**-0.5)
        wanted = ops.attention(q, k, v, NO_MASK, scale=128**-0.5)
    return difference(got, wanted, close=close)


def difference(got: Tensor, wanted: Tensor, *, close: float = CLOSE) -> str | None:
    """How far a result is from what is wanted, in words, when it is too far. close: relative."""
    error = ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
    return None if error < close else f"wrong numbers: relative error {error:.2g} on a small case"
