"""The Ascend backend of portable-dit. Importing it imports no torch_npu and touches no device."""

from __future__ import annotations

from portable_dit.backend import Backend
from portable_dit.hooks import hookimpl
from portable_dit_ascend.backend import AscendBackend

__all__ = ["AscendBackend"]


@hookimpl
def portable_dit_backends() -> list[Backend]:
    return [AscendBackend()]
