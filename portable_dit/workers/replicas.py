"""Replicas: whole models side by side. A request goes to one that is free; its pictures may go to several."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from portable_dit.errors import CancelledError, PortableDitError
from portable_dit.parallel.collectives import split_evenly
from portable_dit.request import ResolvedRequest
from portable_dit.result import (
    Decoded,
    Drawn,
    Encoded,
    Event,
    Finished,
    Outcome,
    Result,
    Started,
    Stepped,
)
from portable_dit.workers import RankReport

POLL_SECONDS = 0.1  # of who waits for a replica, to hear that nobody waits for him


class Replica(Protocol):
    """Ranks that hold one model together."""

    reports: tuple[RankReport, ...]

    def start(
        self, on_component: Callable[[str], None], on_bytes: Callable[[str, int, int], None]
    ) -> None: ...

    def draw(
        self,
        requests: Sequence[ResolvedRequest],
        emit: Callable[[int, Event], None],
        cancelled: Callable[[int], bool],
        previews: Sequence[bool],
    ) -> tuple[Outcome, ...]: ...

    def close(self) -> None: ...


class Replicas:
    """See `workers.Workers`. Several images take as many replicas as are free."""

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
        requests: Sequence[ResolvedRequest],
        emit: Callable[[int, Event], None],
        cancelled: Callable[[int], bool],
        previews: Sequence[bool],
    ) -> tuple[Outcome, ...]:
        first = self._first_free(lambda: all(cancelled(place) for place in range(len(requests))))
        if first is None:
            return tuple(CancelledError("cancelled before it was begun.") for _ in requests)
        taken = [first]
        try:
            with suppress(queue.Empty):  # the others are drawing
                while len(taken) < sum(request.images for request in requests):
                    taken.append(self._free.get_nowait())
            if len(taken) == 1:
                return taken[0].draw(requests, emit, cancelled, previews)
            return _draw_shared(taken, requests, emit, cancelled, previews)
        finally:
            for member in taken:
                self._free.put(member)

    def _first_free(self, cancelled: Callable[[], bool]) -> Replica | None:
        """A replica, since one call may have taken several; None when nobody waits for it any more."""
        while not cancelled():
            with suppress(queue.Empty):
                return self._free.get(timeout=POLL_SECONDS)
        return None

    def close(self) -> None:
        for member in self._members:
            member.close()


@dataclass(frozen=True)
class Share:
    """Some images of a request, in a row. place: of the request among all; first: their number in it."""

    place: int
    first: int
    request: ResolvedRequest


def shares_of(requests: Sequence[ResolvedRequest], replicas: int) -> list[list[Share]]:
    """For each replica its part of all images, in turn, as requests of their own."""
    found: list[list[Share]] = []
    images = [(place, first) for place, request in enumerate(requests) for first in range(request.images)]
    start = 0
    for length in split_evenly(len(images), replicas):
        mine: list[Share] = []
        for place, first in images[start : start + length]:
            if mine and mine[-1].place == place:
                grown = replace(mine[-1].request, images=mine[-1].request.images + 1)
                mine[-1] = replace(mine[-1], request=grown)
            else:
                alone = replace(requests[place], seed=requests[place].seed + first, images=1)
                mine.append(Share(place, first, alone))
        found.append(mine)
        start += length
    return found


def _draw_shared(
    members: Sequence[Replica],
    requests: Sequence[ResolvedRequest],
    emit: Callable[[int, Event], None],
    cancelled: Callable[[int], bool],
    previews: Sequence[bool],
) -> tuple[Outcome, ...]:
    """The images of requests over several replicas, in turn of their seeds.

    A request that fails on one replica stops on all; a replica that fails stops everything.
    """
    shares = shares_of(requests, len(members))
    stopped: set[int] = set()
    heard: queue.SimpleQueue[tuple[Share, Event | Outcome] | None] = queue.SimpleQueue()

    def draw(member: Replica, own: Sequence[Share]) -> None:
        whole = False
        try:
            outcomes = member.draw(
                [share.request for share in own],
                lambda k, event: heard.put((own[k], event)),
                lambda k: own[k].place in stopped,
                [previews[share.place] for share in own],
            )
            for share, outcome in zip(own, outcomes, strict=True):
                if isinstance(outcome, PortableDitError):
                    stopped.add(share.place)
                    heard.put((share, outcome))
            whole = True
        finally:
            if not whole:
                stopped.update(range(len(requests)))
            heard.put(None)

    gathering = _Gathering(requests, shares, emit)
    with ThreadPoolExecutor(len(members), thread_name_prefix="replica") as pool:
        parts = [pool.submit(draw, member, own) for member, own in zip(members, shares, strict=True)]
        try:
            running = len(parts)
            while running:
                stopped.update(place for place in range(len(requests)) if cancelled(place))
                try:
                    value = heard.get(timeout=0.1)
                except queue.Empty:
                    continue
                if value is None:
                    running -= 1
                else:
                    gathering.hear(*value)
        finally:
            stopped.update(range(len(requests)))
    for part in parts:
        part.result()
    return gathering.outcomes()


class _Gathering:
    """What becomes of requests whose images are drawn by several replicas, told as of the whole."""

    def __init__(
        self,
        requests: Sequence[ResolvedRequest],
        shares: Sequence[Sequence[Share]],
        emit: Callable[[int, Event], None],
    ) -> None:
        self._emit = emit
        self._parts: list[dict[int, Outcome | None]] = [{} for _ in requests]  # by first image
        for own in shares:
            for share in own:
                self._parts[share.place][share.first] = None
        for place, request in enumerate(requests):
            emit(place, Started(request.images, request.steps))

    def hear(self, share: Share, value: Event | Outcome) -> None:
        parts = self._parts[share.place]
        if isinstance(value, PortableDitError):
            parts[share.first] = value
        elif isinstance(value, Finished):
            parts[share.first] = value.result
            if all(isinstance(part, Result) for part in parts.values()):
                self._emit(share.place, Finished(joined(self._results(share.place))))
        elif not isinstance(value, Result) and (event := moved(value, share.first)) is not None:
            self._emit(share.place, event)

    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(self._outcome(place) for place in range(len(self._parts)))

    def _outcome(self, place: int) -> Outcome:
        errors = [part for part in self._parts[place].values() if isinstance(part, PortableDitError)]
        # What was stopped because another failed is not the reason.
        errors.sort(key=lambda error: isinstance(error, CancelledError))
        return errors[0] if errors else joined(self._results(place))

    def _results(self, place: int) -> list[Result]:
        parts = self._parts[place]
        return [part for first in sorted(parts) if isinstance(part := parts[first], Result)]


def moved(event: Event, first: int) -> Event | None:
    """An event of a replica as one of the whole request, whose images begin at `first` there."""
    match event:
        case Started() | Finished():
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
