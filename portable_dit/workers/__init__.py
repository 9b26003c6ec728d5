"""Workers: the processes that draw for an engine, one for each device, however they are started.

    inline     this process itself
    mp         one process per device of this host, started and watched by this one
    torchrun   this process is one of several that torchrun started, all running the same program
    ray        one actor per device, on one host or several

Each keeps the same promise: a request comes back as a Result, or as the error that is its own; what a process
does wrong is one error on the caller, and names that process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from portable_dit.layout import Layout
from portable_dit.setup import Setup

if TYPE_CHECKING:
    from portable_dit.request import ResolvedRequest
    from portable_dit.result import Event, Outcome


@dataclass(frozen=True)
class RankReport:
    """What one process of a layout loaded. bytes_read: of the checkpoint's files; seconds: for all of it."""

    rank: int
    process: int  # the system's number of it, on the host of the rank
    device: str
    bytes_read: int
    seconds: float


class Workers(Protocol):
    """What an engine draws with.

    replicas: how many requests they draw at once. reports: one for each process, when there are several.
    leads: False in a process whose results hold no pictures, since another has them.
    """

    @property
    def replicas(self) -> int: ...

    @property
    def reports(self) -> tuple[RankReport, ...]: ...

    @property
    def leads(self) -> bool: ...

    def draw(
        self,
        requests: Sequence[ResolvedRequest],
        emit: Callable[[int, Event], None],
        cancelled: Callable[[int], bool],
        previews: Sequence[bool],
    ) -> tuple[Outcome, ...]:
        """What becomes of each request: its pictures, or the error that is its own.

        emit: told the place of a request among them and an event of it, on the caller's thread. cancelled:
        whether the request at a place is to stop. previews: whether its steps carry small pictures.
        """
        ...

    def close(self) -> None:
        """Gives back the model's memory and ends what was started; drawing is over."""
        ...


def after_a_failure(layout: Layout) -> str:
    """What becomes of the ranks when one has failed, as the end of the error that says so."""
    if layout.data == 1:
        return "All ranks were ended; the next request starts them again."
    return (
        "The ranks of its replica were ended, and the next request that comes to it starts them again; the "
        "other replicas go on."
    )


def start_workers(
    setup: Setup, *, on_component: Callable[[str], None], on_bytes: Callable[[str, int, int], None]
) -> Workers:
    """The workers of a setup, loaded. on_component, on_bytes: as for `loading.load_model`."""
    match setup.plan.executor:
        case "mp":
            from portable_dit.workers.mp import LocalRanks
            from portable_dit.workers.replicas import Replicas

            groups = [LocalRanks(setup, replica) for replica in range(setup.plan.layout.data)]
            return Replicas(groups, on_component=on_component, on_bytes=on_bytes)
        case "ray":
            from portable_dit.workers.ray import ActorGroup
            from portable_dit.workers.replicas import Replicas

            actors = [ActorGroup(setup, replica) for replica in range(setup.plan.layout.data)]
            return Replicas(actors, on_component=on_component, on_bytes=on_bytes)
        case "torchrun":
            from portable_dit.workers.torchrun import OneOfMany

            return OneOfMany(setup, on_component=on_component, on_bytes=on_bytes)
        case _:
            from portable_dit.workers.inline import ThisProcess

            return ThisProcess(setup, on_component=on_component, on_bytes=on_bytes)
