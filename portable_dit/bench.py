"""Bench: how long each stage of a request takes on a loaded engine, as medians after a warm-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from portable_dit.engine import Engine
from portable_dit.request import Request
from portable_dit.result import STAGES, Result
from portable_dit.setup import Setup

ROWS = (*STAGES, "total")


@dataclass(frozen=True)
class BenchReport:
    """Seconds by stage: median, least and most of the requests. step: of all steps of all requests.

    images: pictures of a request. batch: the most that may be drawn side by side. side_by_side: how many
    were, as the mean over all pictures of how many a picture was drawn among, itself included. peak_bytes:
    of the device from the first measured request on, or since the start where it cannot be reset.
    """

    model: str
    backend: str
    device: str
    size: str
    steps: int
    requests: int
    images: int
    batch: int
    side_by_side: float
    load_seconds: float
    median: Mapping[str, float]
    least: Mapping[str, float]
    most: Mapping[str, float]
    step: float
    peak_bytes: int | None
    kernels: Mapping[str, Mapping[str, str]]
    notes: tuple[str, ...]


def bench(
    setup: Setup,
    request: Request,
    *,
    requests: int = 5,
    warmup: int = 1,
    on_request: Callable[[int], None] = lambda number: None,
) -> BenchReport:
    """Loads the setup and draws the request `warmup` times unmeasured, then `requests` times measured."""
    resolved = setup.resolve(replace(request, format=request.format or "png"))
    start = time.perf_counter()
    with Engine.load(setup) as engine:
        load_seconds = time.perf_counter() - start
        for _ in range(warmup):
            engine.generate(resolved)
        setup.backend.peak_bytes(setup.device, reset=True)
        results: list[Result] = []
        for number in range(requests):
            on_request(number)
            results.append(engine.generate(replace(resolved, seed=resolved.seed + number)))
        peak = setup.backend.peak_bytes(setup.device)
    seconds = {row: [result.seconds[row] for result in results] for row in ROWS}
    pictures = [image for result in results for image in result.images]
    return BenchReport(
        model=setup.plan.model,
        backend=setup.plan.backend,
        device=setup.plan.device,
        size=f"{resolved.width}x{resolved.height}",
        steps=resolved.steps,
        requests=requests,
        images=resolved.images,
        batch=setup.plan.workload.batch,
        side_by_side=statistics.fmean(picture.batch for picture in pictures),
        load_seconds=load_seconds,
        median={row: statistics.median(values) for row, values in seconds.items()},
        least={row: min(values) for row, values in seconds.items()},
        most={row: max(values) for row, values in seconds.items()},
        step=statistics.median(s for picture in pictures for s in picture.step_seconds),
        peak_bytes=peak,
        kernels={name: dict(ops) for name, ops in setup.plan.kernels.items()},
        notes=results[-1].notes,
    )
