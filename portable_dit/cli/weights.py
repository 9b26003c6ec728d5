"""`portable-dit weights`: is a checkpoint whole? Torch-free."""

from __future__ import annotations

import json as json_text
import sys
from pathlib import Path
from typing import Annotated

import typer

from portable_dit.cli.options import JsonFlag

app = typer.Typer(no_args_is_help=True, help="Check the files of a checkpoint.")

Folder = Annotated[str, typer.Argument(help="A checkpoint folder, or builtin for the one in the package.")]


@app.command()
def verify(folder: Folder, json: JsonFlag = False) -> None:
    """Compare every file with the manifest, and look for damage and NaN."""
    from portable_dit.manifest import verify as verify_folder

    def show(name: str) -> None:
        if sys.stderr.isatty() and not json:
            typer.echo(f"checking {name}", err=True)

    report = verify_folder(_found(folder), on_file=show)
    if json:
        facts = {"files": report.files, "bytes": report.bytes, "tensors": report.tensors}
        typer.echo(json_text.dumps({"folder": str(report.folder), **facts, "manifest": report.has_manifest}))
        return
    counted = f"{len(report.files)} files, {report.bytes:,} bytes, {report.tensors:,} tensors"
    typer.echo(f"{report.folder}: {counted}: all right")
    if not report.has_manifest:
        typer.echo(
            "note: there is no manifest.json, so contents could only be checked for damage and NaN", err=True
        )


@app.command()
def manifest(folder: Folder) -> None:
    """Print a manifest of the files as they are now, for manifest.json."""
    from portable_dit.errors import WeightsError
    from portable_dit.manifest import make_manifest

    root = _found(folder)
    if not root.is_dir():
        raise WeightsError(f"{root}: no such folder. Name the folder that holds model_index.json.")
    typer.echo(json_text.dumps(make_manifest(root), indent=2))


def _found(folder: str) -> Path:
    from portable_dit.models import BUILTIN, FAMILIES

    if folder == BUILTIN:
        return next(own for family in FAMILIES for own in family.models.values() if own)
    return Path(folder)
