"""`portable-dit backends`: every plugin with its status and, where it is not used, the reason."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer


def backends(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """List every backend and plugin: what it found here, or why it cannot be used."""
    from portable_dit.plugins import load_plugins

    plugins = load_plugins()
    if as_json:
        data = {
            "plugins": [asdict(status) for status in plugins.status],
            "backends": {
                id: [asdict(device) for device in backend.devices()]
                for id, backend in plugins.backends.items()
            },
        }
        typer.echo(json.dumps(data))
        return
    for status in plugins.status:
        mark = "ok    " if status.ok else "broken"
        missing = f"no device: {status.reason}" if status.reason else "no device found"
        found = ", ".join(status.devices) or missing
        typer.echo(f"{mark}  {status.name:12}  {status.origin:28}  {found if status.ok else status.reason}")
