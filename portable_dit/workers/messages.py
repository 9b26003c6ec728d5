"""What a caller and its ranks say to each other, as frozen data that can be pickled."""

from __future__ import annotations

from dataclasses import dataclass

from portable_dit.errors import PortableDitError
from portable_dit.request import ResolvedRequest
from portable_dit.result import Event, Result
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
    request: ResolvedRequest
    previews: bool


@dataclass(frozen=True)
class Stop:
    """Stop drawing at the next step."""


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
    event: Event


@dataclass(frozen=True, eq=False)
class Done:
    """The rank is done with the request. result: the leader's, whose pictures were told as they came."""

    result: Result | None


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
