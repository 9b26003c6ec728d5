"""The Intel XPU backend of portable-dit. Importing it touches no device."""

from __future__ import annotations

from portable_dit.backend import Backend
from portable_dit.hooks import hookimpl
from portable_dit_xpu.backend import XpuBackend

__all__ = ["XpuBackend"]


@hookimpl
def portable_dit_backends() -> list[Backend]:
    return [XpuBackend()]
