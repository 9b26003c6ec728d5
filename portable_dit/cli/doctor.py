"""`portable-dit doctor`: what works on this machine, with numbers, and what to do about what does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from portable_dit.cli.terminal import as_json as to_json

if TYPE_CHECKING:
    from portable_dit.conformance.outcome import Outcome

LEGEND = """
Kernels, each at the case where it is furthest off. error: relative, of the worst row; a format of 8 bits
rounds by some percent, which is what it is. tolerance: twice the error of plain torch. time, plain: ms of the
kernel and of the same in plain torch on this device, the best of five runs."""


def doctor(
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="Also check that what this recipe asks for works.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option("--backend", help="Examine this backend instead of the one that would be taken."),
    ] = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Also show every kernel, with its error and its time.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Examine this machine; exit code 1 if something that was asked for cannot work."""
    from portable_dit.doctor import examine

    report = examine(recipe, backend)
    if as_json:
        typer.echo(to_json(report.as_dict()))
    else:
        for check in report.checks:
            typer.echo(f"{check.status:8} {check.name}: {check.detail}")
            if check.advice:
                typer.echo(f"         -> {check.advice}")
        if report.probes and not kernels:
            typer.echo("         --kernels shows each of them")
        elif report.probes:
            typer.echo(LEGEND)
            typer.echo(_row("op", "kernel", "dtype", "result", "error", "tolerance", "time", "plain"))
            for probe in report.probes:
                typer.echo(_probe(probe))
    if not report.ok:
        raise typer.Exit(1)


def _probe(probe: Outcome) -> str:
    if probe.error is None or probe.seconds is None or probe.plain_seconds is None:
        return _row(probe.op, probe.kernel, probe.dtype, probe.status, probe.detail)
    return _row(
        probe.op,
        probe.kernel,
        probe.dtype,
        probe.status,
        f"{probe.error:.1e}",
        f"{probe.tolerance:.1e}",
        f"{probe.seconds * 1e3:.2f}",
        f"{probe.plain_seconds * 1e3:.2f}",
    )


def _row(op: str, kernel: str, dtype: str, result: str, *rest: str) -> str:
    return f"  {op:24} {kernel:12} {dtype:9} {result:12} " + " ".join(f"{cell:>9}" for cell in rest)
