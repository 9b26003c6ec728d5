"""The program of one rank that `workers.mp` starts: python -m portable_dit.workers.process FD.

FD is a socket to the process that started it. When that is gone, so is this one: nothing is left behind.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING

from portable_dit.errors import PortableDitError
from portable_dit.workers.messages import (
    Alive,
    Answer,
    Component,
    Draw,
    Failed,
    Join,
    Leave,
    Loaded,
    Order,
    Read,
    Stop,
    done,
    told,
)

if TYPE_CHECKING:
    from portable_dit.parallel.collectives import Pulse

PULSE_SECONDS = 0.5
STARTER_IS_GONE = 3  # exit code; nobody is there to read it


class Seat:
    """The rank's end of the socket: orders come in on a thread, answers go out whole."""

    def __init__(self, descriptor: int) -> None:
        self._connection: Connection[Answer, Order] = Connection(descriptor)
        self._writing = threading.Lock()
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._stopped: frozenset[int] = frozenset()  # places of requests

    def send(self, answer: Answer) -> None:
        with self._writing:
            self._connection.send(answer)

    def listen(self) -> None:
        """Takes orders until the starter is gone; the process ends then, whatever it was doing."""
        while True:
            try:
                order = self._connection.recv()
            except (EOFError, OSError):
                os._exit(STARTER_IS_GONE)
            if isinstance(order, Stop):
                self._stopped |= {order.place}
            else:
                self._stopped = frozenset()
                self.orders.put(order)

    def is_stopped(self, place: int) -> bool:
        """Whether the request at that place is to stop."""
        return place in self._stopped


def main(descriptor: int) -> None:
    """Joins, loads, and draws until told to leave.

    An error of ours ends the requests; any other ends the process, since nobody knows what state it is in.
    """
    from portable_dit.parallel.collectives import Pulse
    from portable_dit.parallel.mesh import find_store
    from portable_dit.workers.rank import Rank

    seat, pulse, working = Seat(descriptor), Pulse(), threading.Event()
    threading.Thread(target=seat.listen, name="orders", daemon=True).start()
    _tell_what_ends_it(seat, pulse)
    join = seat.orders.get()
    assert isinstance(join, Join)
    working.set()
    me = threading.get_ident()
    threading.Thread(target=_report, args=(seat, pulse, working, me), name="pulse", daemon=True).start()
    rank = Rank(join.task, store=find_store("127.0.0.1", join.port), pulse=pulse)
    if rank.mesh.leads:
        report = rank.load(lambda name: seat.send(Component(name)), lambda *read: seat.send(Read(*read)))
    else:
        report = rank.load()
    working.clear()
    seat.send(Loaded(report))
    while not isinstance(order := seat.orders.get(), Leave):
        assert isinstance(order, Draw)
        working.set()
        try:
            outcomes = rank.draw(
                order.requests,
                lambda place, event: seat.send(told(place, event)),
                seat.is_stopped,
                order.previews,
            )
            answer: Answer = done(outcomes)
        except PortableDitError as error:
            answer = Failed(_line(error), traceback.format_exc(), error, waits=False)
        working.clear()
        seat.send(answer)
    rank.leave()


def _report(seat: Seat, pulse: Pulse, working: threading.Event, thread: int) -> None:
    """Says how far the rank is while it works."""
    from portable_dit.workers.rank import innermost_line

    pause = threading.Event()
    while True:
        working.wait()
        where = innermost_line(sys._current_frames()[thread])
        seat.send(Alive(pulse.count, pulse.doing, where))
        pause.wait(PULSE_SECONDS)


def _tell_what_ends_it(seat: Seat, pulse: Pulse) -> None:
    """An error that nobody caught goes to the starter before it ends the process, and is shown there."""

    def caught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        own = error if isinstance(error, PortableDitError) else None
        seat.send(Failed(_line(error), text, own, waits=pulse.waits))

    sys.excepthook = caught


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(int(sys.argv[1]))
