"""The CUDA backend of portable-dit. Importing it touches no device."""

from __future__ import annotations

from portable_dit.backend import Backend
from portable_dit.hooks import hookimpl
from portable_dit_cuda.backend import CudaBackend

__all__ = ["CudaBackend"]


@hookimpl
def portable_dit_backends() -> list[Backend]:
    return [CudaBackend()]
