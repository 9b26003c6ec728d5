"""Bench of a server: so many clients at once, each with its next request as soon as the last is answered.

    report = bench_server(Client.of(url), Job(prompts=(...,)), concurrency=(1, 2, 4), requests=20)

What a point says: latency from the request's first byte to the answer's last, and pictures over the time from
the first request to the last answer, tail included.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from portable_dit.errors import UserError
from portable_dit.refused_values import mistakes
from portable_dit.server.client import Client, ServerError
from portable_dit.yaml_lines import read_document

JOULES_PER_KWH = 3.6e6
BATCHES = "portable_dit_batch_pictures"
Money = Annotated[float, Field(ge=0, strict=False, allow_inf_nan=False)]


class Prices(BaseModel):
    """A price file. See docs/prices.md for the formulas."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    currency: str = "USD"
    device_hour: Money
    """What one device costs in an hour, whether it draws or not."""
    kwh: Money = 0.0
    """What a kilowatt-hour costs, where it is not part of device_hour."""
    picture: Money = 0.0
    """What a picture is sold for."""
    billable_share: Annotated[float, Field(ge=0, le=1, strict=False)] = 1.0
    """How much of the capacity is sold."""


@dataclass(frozen=True)
class Job:
    """What is drawn: prompts in turn, each with the next seed; the rest is the same for all.

    images: pictures of each request.
    """

    prompts: tuple[str, ...]
    references: tuple[bytes, ...] = ()
    size: str | None = None
    images: int = 1


@dataclass(frozen=True)
class Point:
    """One number of clients. Latencies in seconds, of requests; what is None could not be known.

    side_by_side: as in `bench.BenchReport`, of all that the server drew meanwhile.
    """

    concurrency: int
    pictures: int
    failures: int
    seconds: float
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    pictures_per_hour: float
    pictures_per_device_day: float
    side_by_side: float | None
    joules_per_picture: float | None
    cost_per_picture: float | None
    revenue_per_device_hour: float | None


@dataclass(frozen=True)
class ServerReport:
    """A server's points. errors: what the first failures said."""

    url: str
    model: str
    device: str
    devices: int
    size: str
    points: tuple[Point, ...]
    prices: dict[str, Any] | None
    errors: tuple[str, ...]


def read_prices(path: Path) -> Prices:
    """The price file. Raises UserError."""
    document = read_document(path)
    if document.mistakes:
        raise UserError(f"{path}: " + "; ".join(map(str, document.mistakes)))
    try:
        return Prices.model_validate(document.data)
    except ValidationError as error:
        raise UserError(
            f"{path}: {'; '.join(mistakes(error, Prices)).rstrip('.')}. See docs/prices.md."
        ) from error


def bench_server(
    client: Client,
    job: Job,
    *,
    concurrency: Sequence[int],
    requests: int,
    warmup: int = 1,
    prices: Prices | None = None,
    on_begin: Callable[[], None] = lambda: None,
    on_point: Callable[[Point], None] = lambda point: None,
) -> ServerReport:
    """Measures each number of clients with so many requests, after `warmup` requests for each client.

    on_begin: told that the server is there and can draw. on_point: told each measurement.
    """
    model, worker = _served(client)
    on_begin()
    seeds = itertools.count()
    errors: list[str] = []
    points = []
    for clients in concurrency:
        _run(client, job, clients=clients, requests=clients * warmup, seeds=seeds)
        before, drawn = _energy(client), _drawn(client)
        begin = time.perf_counter()
        latencies, failed = _run(client, job, clients=clients, requests=requests, seeds=seeds)
        seconds = time.perf_counter() - begin
        after = _energy(client)
        errors += failed
        joules = None if before is None or after is None or after < before else after - before
        point = make_point(
            clients, latencies, len(failed), seconds, worker["devices"], joules, prices, images=job.images
        )
        points.append(replace(point, side_by_side=_side_by_side(drawn, _drawn(client))))
        on_point(points[-1])
    return ServerReport(
        url=client.url,
        model=model,
        device=worker["plan"]["device"],
        devices=worker["devices"],
        size=job.size or "default",
        points=tuple(points),
        prices=None if prices is None else prices.model_dump(),
        errors=tuple(errors[:5]),
    )


def _served(client: Client) -> tuple[str, dict[str, Any]]:
    """(the model, facts of a worker) of a server that can draw. Raises ServerError."""
    info = client.get("/server_info")
    try:
        model, worker = str(info["model"]), dict(info["workers"][0])
    except (LookupError, TypeError, ValueError) as error:
        raise ServerError(
            f"{client.url}: answers, and is no server of portable-dit: /server_info names no worker. "
            f"{client.advice}"
        ) from error
    if "plan" not in worker:
        raise ServerError(f"{client.url}: no worker has loaded yet. Wait until /ready answers 200.")
    return model, worker


def make_point(
    clients: int,
    latencies: Sequence[float],
    failures: int,
    seconds: float,
    devices: int,
    joules: float | None,
    prices: Prices | None,
    *,
    images: int = 1,
) -> Point:
    """The figures of one measurement, of requests of so many images; money by docs/prices.md's formulas."""
    count = len(latencies) * images
    per_hour = 3600 * count / seconds
    each = None if joules is None or not count else joules / count
    cost = revenue = None
    if prices is not None and count:
        cost = prices.device_hour * devices / per_hour + (each or 0.0) / JOULES_PER_KWH * prices.kwh
        revenue = per_hour * prices.picture * prices.billable_share / devices
    return Point(
        concurrency=clients,
        pictures=count,
        failures=failures,
        seconds=seconds,
        mean=statistics.fmean(latencies) if count else None,
        p50=percentile(latencies, 50),
        p95=percentile(latencies, 95),
        p99=percentile(latencies, 99),
        pictures_per_hour=per_hour,
        pictures_per_device_day=24 * per_hour / devices,
        side_by_side=None,
        joules_per_picture=each,
        cost_per_picture=cost,
        revenue_per_device_hour=revenue,
    )


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value that so many percent are not above, between neighbours in proportion; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _run(
    client: Client, job: Job, *, clients: int, requests: int, seeds: itertools.count[int]
) -> tuple[list[float], list[str]]:
    """(latencies of what was drawn, what went wrong) of so many requests by so many clients."""
    latencies: list[float] = []
    errors: list[str] = []
    left = iter(range(requests))
    taking = threading.Lock()

    def work() -> None:
        while True:
            with taking:
                number, seed = next(left, None), next(seeds)
            if number is None:
                return
            begin = time.perf_counter()
            try:
                prompt = job.prompts[number % len(job.prompts)]
                client.draw(prompt, job.references, size=job.size, seed=seed * job.images, n=job.images)
            except ServerError as error:
                errors.append(str(error))
            else:
                latencies.append(time.perf_counter() - begin)

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return latencies, errors


def _energy(client: Client) -> float | None:
    """What the devices have used so far; None where one does not say. Told with a ping, once a second."""

    def told() -> list[float | None]:
        return [worker["energy_joules"] for worker in client.get("/server_info")["workers"]]

    if None in told():
        return None
    time.sleep(1.1)
    return sum(joules for joules in told() if joules is not None)


def _drawn(client: Client) -> tuple[float, float]:
    """(pictures so far, how many each was drawn among, added up), as the metrics have them."""
    found = dict.fromkeys(("count", "sum"), 0.0)
    for line in client.text("/metrics").splitlines():
        name, _, value = line.rpartition(" ")
        for kind in found:
            if name == f"{BATCHES}_{kind}":
                found[kind] = float(value)
    return found["count"], found["sum"]


def _side_by_side(before: tuple[float, float], after: tuple[float, float]) -> float | None:
    count, total = (late - early for early, late in zip(before, after, strict=True))
    return total / count if count > 0 else None
