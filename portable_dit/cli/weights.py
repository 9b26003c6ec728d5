"""`portable-dit weights`: is a checkpoint whole, a made-up one to try things with, and the cache."""

from __future__ import annotations

import json as json_text
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from portable_dit.cli.options import JsonFlag

RANDOM_CHECKPOINTS = {"h3-image": "h3_image", "hunyuan-image-3": "hunyuan_image_3"}  # model -> its folder
app = typer.Typer(no_args_is_help=True, help="Check, make up and cache the files of a checkpoint.")

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


@app.command()
def init(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", readable=False, help="A new or empty folder.")
    ] = None,
    model: Annotated[str, typer.Option(help="Whose layout: h3-image or hunyuan-image-3.")] = "h3-image",
    config: Annotated[str, typer.Option(help="tiny, or full (135 and 170 GB).")] = "tiny",
    dialect: Annotated[
        str | None,
        typer.Option(
            help="Whose files it is like. h3-image: original, diffusers, comfy, comfy-curve, int8-convrot, "
            "fp8 or w4a8. hunyuan-image-3: instruct, base or distil. The first is the default."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides every number.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the files and tensors.")] = False,
    json: JsonFlag = False,
) -> None:
    """Write a checkpoint of random weights in the exact layout of the real one."""
    from portable_dit.errors import OutputError, WeightsError, near

    maker = RANDOM_CHECKPOINTS.get(model)
    if maker is None:
        raise WeightsError(
            f"model {model!r}: has no random checkpoint.{near(model, list(RANDOM_CHECKPOINTS))}"
        )
    module = import_module(f"portable_dit.models.{maker}.random_checkpoint")
    dialect = dialect or next(iter(module.DIALECTS))

    def show(path: str, size: int) -> None:
        if sys.stderr.isatty() and not json:
            typer.echo(f"writing {path}, {size:,} bytes", err=True)

    if dry_run:
        files = module.plan_random(config, dialect)
    elif output is None:
        raise WeightsError("-o: missing. Name a new or empty folder, or say --dry-run to see its files.")
    else:
        try:
            files = module.write_random(output, config=config, dialect=dialect, seed=seed, on_file=show)
        except OSError as error:
            raise OutputError(f"-o {output}: cannot be written ({error.strerror}). Name another.") from error
    if json:
        tensors = [
            {
                "path": f.path,
                "bytes": f.bytes,
                "tensors": {n: [d, list(s)] for n, (d, s) in f.tensors.items()},
            }
            for f in files
        ]
        folder = None if output is None else str(output)
        typer.echo(json_text.dumps({"folder": folder, "written": not dry_run, "files": tensors}))
        return
    if dry_run:
        for file in files:
            typer.echo(f"{file.path}: {file.bytes:,} bytes")
            for name, (dtype, shape) in file.tensors.items():
                typer.echo(f"  {name} {dtype} {list(shape)}")
    total = f"{len(files)} files of weights, {sum(file.bytes for file in files):,} bytes"
    typer.echo(f"{output or model}: {total}" + (", not written" if dry_run else ""))


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all entries.")] = False,
    json: JsonFlag = False,
) -> None:
    """List the weights that were quantised while loading and kept (recipe key `cache: true`)."""
    from portable_dit.weight_cache import cache_entries, cache_folder, clear_cache

    entries = [] if clear else cache_entries()
    freed = clear_cache() if clear else 0
    if json:
        listed = [{"path": str(e.path), "title": e.title, "bytes": e.bytes} for e in entries]
        typer.echo(json_text.dumps({"folder": str(cache_folder()), "entries": listed, "freed_bytes": freed}))
        return
    if clear:
        typer.echo(f"{cache_folder()}: {freed:,} bytes freed")
        return
    for entry in entries:
        typer.echo(f"{entry.title}: {entry.bytes:,} bytes, {entry.path.name}")
    typer.echo(f"{cache_folder()}: {len(entries)} entries, {sum(entry.bytes for entry in entries):,} bytes")


def _found(folder: str) -> Path:
    from portable_dit.models import BUILTIN, FAMILIES

    if folder == BUILTIN:
        return next(own for family in FAMILIES for own in family.models.values() if own)
    return Path(folder)
