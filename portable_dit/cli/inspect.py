"""`portable-dit inspect`: how a picture was made, read from the file itself, without model or torch."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated, Any

import typer

from portable_dit.cli.options import JsonFlag
from portable_dit.cli.terminal import printable

MOST_DEPTH = 4  # our records are flatter; the file may come from anybody


def inspect(
    file: Annotated[
        Path, typer.Argument(readable=False, help="A PNG, JPEG or WebP that portable-dit wrote.")
    ],
    json: JsonFlag = False,
) -> None:
    """Show prompt, seed, recipe and kernels of a picture."""
    from portable_dit.image import read_record

    record = read_record(file)
    if json:
        typer.echo(json_text.dumps(record))
        return
    for key, value in record.items():
        typer.echo(printable(f"{key}: {_say(value)}"))


def _say(value: Any, depth: int = 0) -> str:
    if depth > MOST_DEPTH:
        return json_text.dumps(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}={_say(inner, depth + 1)}" for key, inner in value.items())
    if isinstance(value, list):
        return "; ".join(_say(inner, depth + 1) for inner in value) or "none"
    return "none" if value is None else str(value)
