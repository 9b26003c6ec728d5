"""`portable-dit conformance NAME`: everything that a backend claims, tried on its device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from portable_dit.cli.terminal import tell
from portable_dit.errors import OutputError


def conformance(
    backend: Annotated[str, typer.Argument(metavar="NAME", help="The backend, as recipes call it.")],
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="CATEGORY", help="Try this category alone; repeatable."),
    ] = None,
    kernel: Annotated[
        str | None, typer.Option(metavar="ID", help="Of attention, linear and fused, this kernel alone.")
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, max=100, help="Runs of each kernel; the best one is its time.")
    ] = 3,
    soak: Annotated[
        int, typer.Option(min=1, max=100_000, help="How often the same picture is drawn in the soak.")
    ] = 50,
    json: Annotated[
        Path | None,
        typer.Option("--json", readable=False, metavar="F", help="Write the whole report there as JSON."),
    ] = None,
    junit: Annotated[
        Path | None,
        typer.Option("--junit", readable=False, metavar="F", help="Write the report there as JUnit XML."),
    ] = None,
) -> None:
    """Try all that a backend claims on its device; exit code 1 if a claim is not kept."""
    from portable_dit.conformance.report import as_json, as_junit, as_table
    from portable_dit.conformance.suite import run_suite

    for file in (json, junit):
        if file is not None and not file.absolute().parent.is_dir():
            raise OutputError(f"{file}: its folder does not exist. Make it, or write elsewhere.")
    report = run_suite(
        backend,
        categories=only or (),
        kernel=kernel,
        repeats=repeats,
        soak=soak,
        on_category=lambda name: tell(f"{name} ..."),
    )
    for file, text in ((json, as_json), (junit, as_junit)):
        if file is not None:
            _write(file, text(report))
    typer.echo(as_table(report), nl=False)
    for failure in report.failures:
        tell(f"FAIL {failure.op} {failure.kernel} {failure.case} {failure.dtype}: {failure.detail}")
    if not report.ok:
        raise typer.Exit(1)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{file}: cannot be written ({error.strerror}). Write elsewhere.") from error
