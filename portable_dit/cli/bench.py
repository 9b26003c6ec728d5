"""`portable-dit bench`: medians per stage on this machine, after a warm-up."""

from __future__ import annotations

import json as json_text
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from portable_dit.cli.options import JsonFlag, RecipeWish, recipe_flags

if TYPE_CHECKING:
    from portable_dit.bench import BenchReport


@recipe_flags
def bench(
    wish: RecipeWish,
    prompt: Annotated[
        str, typer.Option(help="What to draw; the time hardly depends on it.")
    ] = "a red apple on a blue background",
    image: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="A reference image; repeatable.")
    ] = None,
    size: Annotated[str | None, typer.Option(metavar="WxH", help="Size of the picture in pixels.")] = None,
    requests: Annotated[int, typer.Option(min=1, max=10_000, help="How many requests are measured.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, max=100, help="How many are drawn before.")] = 1,
    json: JsonFlag = False,
) -> None:
    """Measure how long a picture takes."""
    from portable_dit.catalog import read_spec
    from portable_dit.loading import resolve_request, set_up
    from portable_dit.request import Request, parse_size

    recipe = wish.load()
    if recipe.provenance["prompt_cache_mib"] == "default":  # a prompt that is not read is not measured
        recipe = RecipeWish(wish.ref, {**wish.overrides, "prompt_cache_mib": 0}).load()
    request = Request(
        prompt,
        size=parse_size(size) if size else None,
        references=tuple(image or ()),
    )
    resolve_request(request, recipe, read_spec(recipe))
    from portable_dit.bench import bench as measure

    def show(number: int) -> None:
        if sys.stderr.isatty():
            typer.echo(f"request {number + 1}/{requests}", err=True)

    report = measure(set_up(recipe), request, requests=requests, warmup=warmup, on_request=show)
    if json:
        typer.echo(json_text.dumps(asdict(report)))
    else:
        _print(report)


def _print(report: BenchReport) -> None:
    typer.echo(f"{report.model} on {report.device} ({report.backend})")
    typer.echo(f"{report.size}, {report.steps} steps, {report.requests} requests")
    typer.echo(f"loading {report.load_seconds:.2f} s")
    typer.echo(f"{'stage':<12} {'median':>9} {'least':>9} {'most':>9}   seconds")
    for row, median in report.median.items():
        typer.echo(f"{row:<12} {median:9.4f} {report.least[row]:9.4f} {report.most[row]:9.4f}")
    typer.echo(f"{'one step':<12} {report.step:9.4f}")
    if report.peak_bytes is not None:
        typer.echo(f"peak memory {report.peak_bytes / 2**20:,.0f} MiB")
    for note in report.notes:
        typer.echo(f"note: {note}", err=True)
