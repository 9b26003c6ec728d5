"""The MUSA backend of portable-dit. Importing it touches no device and no vendor package."""

from __future__ import annotations

from portable_dit.backend import Backend
from portable_dit.hooks import hookimpl
from portable_dit_musa.backend import MusaBackend

__all__ = ["MusaBackend"]


@hookimpl
def portable_dit_backends() -> list[Backend]:
    return [MusaBackend()]
