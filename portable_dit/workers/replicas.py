"""Replicas: whole models side by side. A request goes to one that is free; its pictures may go to several."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from portable_dit.parallel.collectives import split_evenly
from portable_dit.request import ResolvedRequest
from portable_dit.result import Decoded, Drawn, Encoded, Event, Result, Started, Stepped
from portable_dit.workers import RankReport


class Replica(Protocol):
    """Ranks that hold one model together."""

    reports: tuple[RankReport, ...]

    def start(
        self, on_component: Callable[[str], None], on_bytes: Callable[[str, int, int], None]
    ) -> None: ...

    def draw(
        self,
        request: ResolvedRequest,
        emit: Callable[[Event], None],
        cancelled: Callable[[], bool],
        previews: bool,
    ) -> Result: ...

    def close(self) -> None: ...


class Replicas:
    """See `workers.Workers`. A request of several images takes as many replicas as are free."""

    leads = True

    def __init__(
        self,
        members: Sequence[Replica],
        *,
        on_component: Callable[[str], None],
        on_bytes: Callable[[str, int, int], None],
    ) -> None:
        self._members = members
        self.replicas = len(members)
        self._free: queue.SimpleQueue[Replica] = queue.SimpleQueue()
        with ThreadPoolExecutor(len(members), thread_name_prefix="loading") as pool:
            silent = (lambda name: None, lambda name, done, total: None)
            told = [(on_component, on_bytes), *[silent] * (len(members) - 1)]
            starts = [pool.submit(m.start, *tell) for m, tell in zip(members, told, strict=True)]
        try:
            for start in starts:
                start.result()
        finally:
            if any(start.exception() for start in starts):
                self.close()
        for member in members:
            self._free.put(member)

    @property
    def reports(self) -> tuple[RankReport, ...]:
        return tuple(report for member in self._members for report in member.reports)

    def draw(
        self,
        request: ResolvedRequest,
        emit: Callable[[Event], None],
        cancelled: Callable[[], bool],
        previews: bool,
    ) -> Result:
        taken = [self._free.get()]
        try:
            with suppress(queue.Empty):  # the others are drawing
                while len(taken) < request.images:
                    taken.append(self._free.get_nowait())
            if len(taken) == 1:
                return taken[0].draw(request, emit, cancelled, previews)
            return _draw_shared(taken, request, emit, cancelled, previews)
        finally:
            for member in taken:
                self._free.put(member)

    def close(self) -> None:
        for member in self._members:
            member.close()


def _draw_shared(
    members: Sequence[Replica],
    request: ResolvedRequest,
    emit: Callable[[Event], None],
    cancelled: Callable[[], bool],
    previews: bool,
) -> Result:
    """The images of one request over several replicas, in turn of their seeds; one that fails stops all."""
    lengths = split_evenly(request.images, len(members))
    stop = threading.Event()
    events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()

    def share(member: Replica, first: int, images: int) -> Result:
        part = replace(request, seed=request.seed + first, images=images)

        def tell(event: Event) -> None:
            if (event_of_all := moved(event, first)) is not None:
                events.put(event_of_all)

        whole = False
        try:
            result = member.draw(part, tell, stop.is_set, previews)
            whole = True
            return result
        finally:
            if not whole:
                stop.set()
            events.put(None)

    emit(Started(request.images, request.steps))
    with ThreadPoolExecutor(len(members), thread_name_prefix="replica") as pool:
        shares = [
            pool.submit(share, member, sum(lengths[:place]), lengths[place])
            for place, member in enumerate(members)
        ]
        try:
            running = len(shares)
            while running:
                if cancelled():
                    stop.set()
                try:
                    event = events.get(timeout=0.1)
                except queue.Empty:
                    continue
                if event is None:
                    running -= 1
                else:
                    emit(event)
        finally:
            stop.set()
    failures = [share.exception() for share in shares]
    for failure in sorted(filter(None, failures), key=lambda error: type(error).__name__ == "CancelledError"):
        raise failure
    return joined([share.result() for share in shares])


def moved(event: Event, first: int) -> Event | None:
    """An event of a replica as one of the whole request, whose images begin at `first` there."""
    match event:
        case Started():
            return None
        case Encoded():
            return event if first == 0 else None
        case Stepped() | Decoded() | Drawn():
            return replace(event, image=event.image + first)
        case _:
            return event


def joined(results: Sequence[Result]) -> Result:
    """Several replicas' results as one; stages ran side by side, so their times are the longest."""
    first = results[0]
    peaks = [result.peak_bytes for result in results if result.peak_bytes is not None]
    stages = {stage: max(result.seconds[stage] for result in results) for stage in first.seconds}
    return replace(
        first,
        images=tuple(image for result in results for image in result.images),
        seconds=stages,
        peak_bytes=max(peaks, default=None),
        notes=tuple(dict.fromkeys(note for result in results for note in result.notes)),
        changes=tuple(dict.fromkeys(change for result in results for change in result.changes)),
    )
