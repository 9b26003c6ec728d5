"""`portable-dit inspect`: how a picture was made, read from the file itself, without model or torch."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated, Any

import typer

from portable_dit.cli.options import JsonFlag


def inspect(
    file: Annotated[Path, typer.Argument(help="A PNG, JPEG or WebP that portable-dit wrote.")],
    json: JsonFlag = False,
) -> None:
    """Show prompt, seed, recipe and kernels of a picture."""
    from portable_dit.image import read_record

    record = read_record(file)
    if json:
        typer.echo(json_text.dumps(record))
        return
    for key, value in record.items():
        typer.echo(f"{key}: {_say(value)}")


def _say(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={_say(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return "; ".join(_say(inner) for inner in value) or "none"
    return "none" if value is None else str(value)
