"""`portable-dit bench`: medians per stage on this machine, or latency and throughput of a running server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from portable_dit import DEFAULT_RECIPE
from portable_dit.cli.options import JsonFlag, RecipeWish, recipe_flags
from portable_dit.cli.terminal import as_json
from portable_dit.errors import UserError

if TYPE_CHECKING:
    from portable_dit.bench import BenchReport
    from portable_dit.request import Request
    from portable_dit.server.bench import Job, Point, ServerReport


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
    num_images: Annotated[
        int, typer.Option("-n", "--num-images", min=1, max=128, help="Pictures of each request.")
    ] = 1,
    requests: Annotated[int, typer.Option(min=1, max=10_000, help="How many requests are measured.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, max=100, help="How many are drawn before.")] = 1,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Measure a running server instead of this machine.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="1,2,4", help="With --server: requests at a time, one row each.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(readable=False, metavar="FILE", help="With --server: prompts, one a line, in turn."),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(readable=False, metavar="FILE", help="With --server: prices, for cost and revenue."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(readable=False, metavar="FILE", help="With --server: write a plot as SVG.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Measure how long a picture takes."""
    from portable_dit.request import Request, parse_size

    if server is not None:
        from portable_dit.server.bench import Job

        _require_no_recipe(wish)
        report = _bench_server(
            server,
            Job(
                (prompt,) if prompts is None else _read_prompts(prompts),
                tuple(_read_reference(name) for name in image or ()),
                size,
                num_images,
            ),
            concurrency=_counts("1" if concurrency is None else concurrency),
            requests=requests,
            warmup=warmup,
            prices=prices,
            plot=plot,
            quiet=json,
        )
        if json:
            typer.echo(as_json(asdict(report)))
        if not all(point.pictures for point in report.points):
            raise typer.Exit(1)
        return
    for name, value in (
        ("concurrency", concurrency),
        ("prompts", prompts),
        ("prices", prices),
        ("plot", plot),
    ):
        if value is not None:
            raise UserError(f"--{name}: measures a server. Say --server URL too, or leave it out.")
    request = Request(
        prompt, size=parse_size(size) if size else None, images=num_images, references=tuple(image or ())
    )
    _bench_here(wish, request, requests=requests, warmup=warmup, json=json)


def _bench_here(wish: RecipeWish, request: Request, *, requests: int, warmup: int, json: bool) -> None:
    from portable_dit.catalog import read_spec
    from portable_dit.setup import resolve_request, set_up

    recipe = wish.load()
    if recipe.provenance["prompt_cache_mib"] == "default":  # a prompt that is not read is not measured
        recipe = RecipeWish(wish.ref, {**wish.overrides, "prompt_cache_mib": 0}).load()
    resolve_request(request, recipe, read_spec(recipe))
    from portable_dit.bench import bench as measure

    def show(number: int) -> None:
        if sys.stderr.isatty():
            typer.echo(f"request {number + 1}/{requests}", err=True)

    report = measure(set_up(recipe), request, requests=requests, warmup=warmup, on_request=show)
    if json:
        typer.echo(as_json(asdict(report)))
    else:
        _print(report)


def _print(report: BenchReport) -> None:
    typer.echo(f"{report.model} on {report.device} ({report.backend})")
    each = f" of {report.images} pictures" if report.images > 1 else ""
    typer.echo(f"{report.size}, {report.steps} steps, {report.requests} requests{each}")
    if report.batch > 1:
        typer.echo(f"side by side {report.side_by_side:.1f} pictures, of {report.batch} that may be")
    typer.echo(f"loading {report.load_seconds:.2f} s")
    typer.echo(f"{'stage':<12} {'median':>9} {'least':>9} {'most':>9}   seconds")
    for row, median in report.median.items():
        typer.echo(f"{row:<12} {median:9.4f} {report.least[row]:9.4f} {report.most[row]:9.4f}")
    typer.echo(f"{'one step':<12} {report.step:9.4f}")
    if report.peak_bytes is not None:
        typer.echo(f"peak memory {report.peak_bytes / 2**20:,.0f} MiB")
    for note in report.notes:
        typer.echo(f"note: {note}", err=True)


def _bench_server(
    url: str,
    job: Job,
    *,
    concurrency: Sequence[int],
    requests: int,
    warmup: int,
    prices: Path | None,
    plot: Path | None,
    quiet: bool,
) -> ServerReport:
    """Measures, with a row on stdout as each number of clients is done, and writes the plot."""
    from portable_dit.image import check_writable, write_atomically
    from portable_dit.server.bench import bench_server, read_prices
    from portable_dit.server.client import Client
    from portable_dit.server.plot import plot as draw

    money = None if prices is None else read_prices(prices)
    if plot is not None:
        check_writable(plot)

    def begin() -> None:
        if not quiet:
            typer.echo(_row(*(name for name, _ in SERVER_COLUMNS)))

    def show(point: Point) -> None:
        if not quiet:
            typer.echo(_row(*(read(point) for _, read in SERVER_COLUMNS)))

    report = bench_server(
        Client.of(url),
        job,
        concurrency=concurrency,
        requests=requests,
        warmup=warmup,
        prices=money,
        on_begin=begin,
        on_point=show,
    )
    for error in report.errors:
        typer.echo(f"note: {error}", err=True)
    if plot is not None:
        write_atomically(plot, draw(report).encode())
    return report


def _row(*cells: str) -> str:
    return " ".join(f"{cell:>11}" for cell in cells)


def _or_dash(value: float | None, format: str) -> str:
    return "-" if value is None else f"{value:{format}}"


SERVER_COLUMNS: tuple[tuple[str, Callable[[Point], str]], ...] = (
    ("clients", lambda point: str(point.concurrency)),
    ("pictures", lambda point: str(point.pictures)),
    ("failures", lambda point: str(point.failures)),
    ("together", lambda point: _or_dash(point.side_by_side, ".1f")),
    ("p50 s", lambda point: _or_dash(point.p50, ".3f")),
    ("p95 s", lambda point: _or_dash(point.p95, ".3f")),
    ("p99 s", lambda point: _or_dash(point.p99, ".3f")),
    ("per hour", lambda point: f"{point.pictures_per_hour:,.0f}"),
    ("device day", lambda point: f"{point.pictures_per_device_day:,.0f}"),
    ("joules", lambda point: _or_dash(point.joules_per_picture, ".1f")),
    ("cost", lambda point: _or_dash(point.cost_per_picture, ".6f")),
    ("revenue/h", lambda point: _or_dash(point.revenue_per_device_hour, ".2f")),
)


def _require_no_recipe(wish: RecipeWish) -> None:
    if wish.overrides or wish.ref != DEFAULT_RECIPE:
        raise UserError(
            "--server: it has a recipe of its own. Leave --recipe and the flags that change it out."
        )


def _read_reference(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except (OSError, ValueError) as error:
        raise UserError(f"--image {name}: cannot be read ({error}). Name a picture's file.") from error


def _read_prompts(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise UserError(f"--prompts {path}: cannot be read ({error}). Name a text file.") from error
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise UserError(f"--prompts {path}: holds no prompt. Put one on each line.")
    return prompts


def _counts(text: str) -> list[int]:
    """ "1,2,4" as numbers. Raises UserError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= 1024 for part in parts):
        raise UserError(f"--concurrency {text}: whole numbers from 1 to 1024 with commas, as in 1,2,4,8.")
    return [int(part) for part in parts]
