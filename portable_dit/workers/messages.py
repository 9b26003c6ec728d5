"""What a caller and its ranks say to each other, as frozen data that can be pickled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from portable_dit.errors import PortableDitError
from portable_dit.request import ResolvedRequest
from portable_dit.result import Drawn, Event, Finished, Outcome, Picture, Result
from portable_dit.workers import RankReport
from portable_dit.workers.rank import Task

# To a rank.


@dataclass(frozen=True)
class Join:
    """Join the group that meets at this port of this host, and load."""

    task: Task
    port: int


@dataclass(frozen=True, eq=False)
class Draw:
    """Draw these. previews: for each, whether its steps carry small pictures."""

    requests: tuple[ResolvedRequest, ...]
    previews: tuple[bool, ...]


@dataclass(frozen=True)
class Stop:
    """Stop drawing the request at that place at the next step."""

    place: int


@dataclass(frozen=True)
class Leave:
    """Leave the group and end."""


# From a rank.


@dataclass(frozen=True)
class Component:
    name: str


@dataclass(frozen=True)
class Read:
    name: str
    done: int
    total: int


@dataclass(frozen=True)
class Loaded:
    report: RankReport


@dataclass(frozen=True, eq=False)
class Told:
    """Of the request at that place. Pictures are told once, as they come: a result has none of them."""

    place: int
    event: Event


@dataclass(frozen=True, eq=False)
class Done:
    """The rank is done with all requests. errors: why there is no result, None where there is one."""

    errors: tuple[PortableDitError | None, ...]


@dataclass(frozen=True, eq=False)
class Failed:
    """The rank raised.

    line: the error in one line. error: as it was, when it is one of ours. waits: it was in an exchange, so
    another rank may be the cause. trace: for people who look for the cause.
    """

    line: str
    trace: str
    error: PortableDitError | None
    waits: bool


@dataclass(frozen=True)
class Alive:
    """How far the rank is, as its `collectives.Pulse` says, and the line that its drawing thread is in."""

    count: int
    doing: str
    line: str


Answer = Component | Read | Loaded | Told | Done | Failed | Alive
Order = Join | Draw | Stop | Leave


def told(place: int, event: Event) -> Told:
    """The message of an event, without the pictures that were told before."""
    if isinstance(event, Finished):
        event = Finished(replace(event.result, images=()))
    return Told(place, event)


def done(outcomes: Sequence[Outcome]) -> Done:
    """The message of what became of all requests."""
    return Done(tuple(one if isinstance(one, PortableDitError) else None for one in outcomes))


class Hearing:
    """What a caller hears of some requests: hands events on, with pictures where results lost them."""

    def __init__(self, count: int, emit: Callable[[int, Event], None]) -> None:
        self._emit = emit
        self._pictures: list[list[Picture]] = [[] for _ in range(count)]
        self._results: dict[int, Result] = {}

    def hear(self, told: Told) -> None:
        event, pictures = told.event, self._pictures[told.place]
        if isinstance(event, Drawn):
            pictures.append(event.picture)
        elif isinstance(event, Finished):
            event = Finished(replace(event.result, images=tuple(pictures)))
            self._results[told.place] = event.result
        self._emit(told.place, event)

    def outcomes(self, done: Done) -> tuple[Outcome, ...]:
        return tuple(error or self._results[place] for place, error in enumerate(done.errors))
