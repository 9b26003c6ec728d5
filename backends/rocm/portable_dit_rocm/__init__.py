"""The ROCm backend of portable-dit. Importing it touches no device."""

from __future__ import annotations

from portable_dit.backend import Backend
from portable_dit.hooks import hookimpl
from portable_dit_rocm.backend import RocmBackend

__all__ = ["RocmBackend"]


@hookimpl
def portable_dit_backends() -> list[Backend]:
    return [RocmBackend()]
