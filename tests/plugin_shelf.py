"""Plugins that are really installed: distributions with entry points in a folder on sys.path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

BACKEND = """
from portable_dit.backend import Backend
from portable_dit.capabilities import Device
from portable_dit.hooks import hookimpl

class Some(Backend):
    id = "{id}"
    api_version = {version}
    def devices(self):
        return [Device("{id}", 0, "cpu", "{id} card", "x", 1)] * {devices}

@hookimpl
def portable_dit_backends():
    return [Some()]
"""


class Shelf:
    """A folder of installed distributions."""

    def __init__(self, folder: Path, *, name: str) -> None:
        self.folder = folder
        self.name = name

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that finds these plugins, and everything else where this one does."""
        return {"PYTHONPATH": os.pathsep.join([str(self.folder), *filter(None, sys.path)])}

    def install(self, name: str, source: str) -> None:
        module = f"pdit_test_{self.name}_{name}".replace("-", "_")
        (self.folder / f"{module}.py").write_text(source)
        info = self.folder / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[portable_dit.backends]\n{name} = {module}\n")

    def backend(self, id: str, *, devices: int = 1, version: object = 1, more: str = "") -> None:
        self.install(id, BACKEND.format(id=id, devices=devices, version=version) + more)
