"""`portable-dit run`: pictures from prompts, on this machine, in one load.

Everything that can be refused is refused before the model is loaded: recipe, prompts, sizes, references,
output. Files appear whole under their names or not at all. stdout is the answer: paths, or with --json one
line per prompt.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from portable_dit.cli.options import JsonFlag, RecipeWish, StrictFlag, recipe_flags
from portable_dit.cli.terminal import as_json
from portable_dit.cli.wishes import Wishes
from portable_dit.errors import OutputError, RequestError, at_most

if TYPE_CHECKING:
    from portable_dit.cli.jobs import Job
    from portable_dit.engine import Engine
    from portable_dit.request import Request, ResolvedRequest
    from portable_dit.result import Event, Result, SavedImage
    from portable_dit.setup import Setup


@dataclass(frozen=True)
class Work:
    """A job whose request is checked and whose files can be written.

    ready: the request can be drawn as it is; else its references hold no pixels and are read again in turn,
    since those of thousands of prompts would not fit the memory together.
    """

    job: Job
    request: ResolvedRequest
    targets: tuple[Path, ...]
    ready: bool


@recipe_flags
def run(
    wish: RecipeWish,
    wishes: Wishes,
    strict: StrictFlag = False,
    json: JsonFlag = False,
) -> None:
    """Draw pictures from prompts."""
    from portable_dit.catalog import read_spec
    from portable_dit.cli.jobs import read_jobs
    from portable_dit.setup import fetch, resolve_request, set_up

    jobs = read_jobs(wishes)
    recipe = wish.load()
    spec = read_spec(recipe)
    work = _checked(jobs, lambda request: resolve_request(request, recipe, spec, strict=strict))
    setup = fetch(set_up(recipe, strict=strict))
    if setup.spec != spec:  # the checkpoint was on a hub, and its own configs came with it
        work = _checked(jobs, setup.resolve)
    for item in work:
        setup.require_fit(item.request)
    _draw_all(setup, work, json)


def _draw_all(setup: Setup, work: Sequence[Work], json: bool) -> None:
    from portable_dit.engine import Engine

    total = sum(item.request.images * (item.request.steps + 1) for item in work)
    with _progress(total, json) as bar:
        # Not closed: the process ends with it.
        engine = Engine.load(setup, on_component=bar.loading, on_bytes=bar.read)
        for report in engine.reports if engine.leads else ():
            read = f"{report.bytes_read / 1e6:,.1f} MB of weights in {report.seconds:.1f} s"
            typer.echo(f"rank {report.rank}: {report.device}, {read}, process {report.process}", err=True)
        for item in work:
            fresh = item if item.ready else replace(item, request=setup.resolve(item.job.request))
            _draw(engine, fresh, bar, json)


def _checked(jobs: tuple[Job, ...], resolve: Callable[[Request], ResolvedRequest]) -> list[Work]:
    """All jobs with their requests resolved and their places tried, or one error that lists every problem."""
    taken: dict[str, str] = {}
    found = [_work_or_problem(job, resolve, taken, alone=len(jobs) == 1) for job in jobs]
    problems = [item for item in found if isinstance(item, RequestError | OutputError)]
    if problems:
        raise type(problems[0])(at_most([str(problem) for problem in problems]))
    work = [item for item in found if isinstance(item, Work)]
    stale = [_stale_reference(job, item, taken) for job, item in zip(jobs, work, strict=True)]
    if any(stale):
        raise RequestError(at_most([problem for problem in stale if problem]))
    return work


def _stale_reference(job: Job, work: Work, taken: dict[str, str]) -> str | None:
    """Why a reference is not what the line wants: another line of the same run will write that file."""
    own = {os.path.realpath(target) for target in work.targets}
    for source in job.request.references:
        if not isinstance(source, str):
            continue
        place = os.path.realpath(source)
        if place in taken and place not in own:
            return (
                f"{job.place}{source} is written by {taken[place]} in the same run, and references are read "
                "before the first picture is drawn. Draw it in a run before."
            )
    return None


def _work_or_problem(
    job: Job, resolve: Callable[[Request], ResolvedRequest], taken: dict[str, str], *, alone: bool
) -> Work | RequestError | OutputError:
    from portable_dit.image import check_writable
    from portable_dit.result import numbered

    try:
        request = resolve(job.request)
        targets = numbered(job.output, request.images)
        for target in targets:
            check_writable(target, most_bytes=3 * request.width * request.height * len(targets))
        _claim(targets, job.place, taken)
    except (RequestError, OutputError) as error:
        return type(error)(f"{job.place}{error}")
    ready = alone or not request.references
    return Work(job, request if ready else request.without_pixels(), targets, ready)


def _claim(targets: tuple[Path, ...], place: str, taken: dict[str, str]) -> None:
    """Two prompts must not write the same file, since only the later one would be left."""
    for target in targets:
        file = os.path.realpath(target)
        if file in taken:
            raise RequestError(
                f"{target} is written by {taken[file]} too. Give each line an output of its own."
            )
        taken[file] = place.removesuffix(": ")


def _draw(engine: Engine, work: Work, bar: Bar, json: bool) -> None:
    """Draws one prompt, writing each picture as it is done."""
    from portable_dit.result import Drawn

    saved: list[SavedImage] = []

    def watch(event: Event) -> None:
        bar.show(event)
        if isinstance(event, Drawn):
            target = work.targets[event.image]
            saved.append(event.picture.save(target, format=work.request.format))
            if not json:
                bar.answer(str(target))

    result = engine.generate(work.request, on_event=watch)
    if not engine.leads:
        return
    if json:
        typer.echo(as_json(_answer(result, saved, work)))
    else:
        for change in result.changes:
            typer.echo(f"note: {change}", err=True)


def _answer(result: Result, saved: list[SavedImage], work: Work) -> dict[str, Any]:
    """What --json prints for one prompt."""
    return {
        "images": [{**asdict(image), "path": str(image.path)} for image in saved],
        "prompt": work.request.prompt,
        "seconds": dict(result.seconds) | {"steps": [list(p.step_seconds) for p in result.images]},
        "peak_bytes": result.peak_bytes,
        "backend": result.backend,
        "device": result.device,
        "kernels": {name: dict(ops) for name, ops in result.kernels.items()},
        "notes": list(result.notes),
    }


class Bar:
    """Progress for people; this one shows nothing, for pipes."""

    def loading(self, component: str) -> None:
        """A component is being loaded."""

    def read(self, component: str, done: int, total: int) -> None:
        """So many bytes of it were read."""

    def show(self, event: Event) -> None:
        """Something happened."""

    def answer(self, text: str) -> None:
        """Prints a line of the answer on stdout."""
        typer.echo(text)


class TerminalBar(Bar):
    """Progress as one line on stderr."""

    def __init__(self, progress: Any, task: Any) -> None:
        self.progress = progress
        self.task = task
        self.start = time.perf_counter()

    def loading(self, component: str) -> None:
        self.start = time.perf_counter()
        self.progress.update(self.task, description=f"loading {component}")

    def read(self, component: str, done: int, total: int) -> None:
        rate = done / 1e9 / max(time.perf_counter() - self.start, 1e-6)
        figures = f"{done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate:.1f} GB/s"
        self.progress.update(self.task, description=f"loading {component}: {figures}")

    def answer(self, text: str) -> None:
        self.progress.stop()  # takes the line away, which may stand on the same terminal as stdout
        typer.echo(text)
        self.progress.start()

    def show(self, event: Event) -> None:
        from portable_dit.result import Decoded, Encoded, Stepped

        if isinstance(event, Encoded):
            self.progress.update(self.task, description="drawing")
        elif isinstance(event, Stepped):
            name = f"image {event.image + 1}, step {event.step}/{event.steps}"
            self.progress.update(self.task, description=name, advance=1)
        elif isinstance(event, Decoded):
            self.progress.update(self.task, description=f"image {event.image + 1}, writing", advance=1)


@contextmanager
def _progress(total: int, json: bool) -> Iterator[Bar]:
    """A progress line on a terminal, and nothing anywhere else."""
    if json or not sys.stderr.isatty():
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    # Redirecting, rich's default, would carry the answer from stdout to stderr.
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as progress:
        yield TerminalBar(progress, progress.add_task("loading", total=total))
