"""The queue: who is accepted, and whose turn it is.

Fair by work, not by count: a client's requests are charged to it in pixels times steps, and the client that
had least is served next (start-time fair queueing; Goyal, Vin and Cheng 1996). So twenty large pictures of
one client do not stand before the small one of another.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Sequence

from portable_dit.server.refusal import ApiError
from portable_dit.server.settings import Limits
from portable_dit.server.ticket import Ticket

FIRST_GUESS_SECONDS = 2.0  # of a request, before one was measured
MOST_RETRY_SECONDS = 600


class FairQueue:
    """Tickets that wait, for one or several workers that draw the same."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.refusing: ApiError | None = None  # why nothing is accepted, None while it is
        self._heap: list[tuple[float, int, Ticket]] = []
        self._taken: list[tuple[float, int, Ticket]] = []  # whose work may not have begun
        self._order = itertools.count()
        self._now = 0.0
        self._charged: dict[str, float] = {}
        self._arrived = asyncio.Event()
        self._seconds_per_work: float | None = None

    def waiting(self) -> list[Ticket]:
        """Those that nobody has taken or cancelled, in the order of their turn."""
        return [ticket for _, _, ticket in sorted(self._heap) if ticket.status == "queued"]

    def queued(self) -> list[Ticket]:
        """Those that wait, for their turn or, where a worker has taken them, for a place on the device."""
        return [*(ticket for _, _, ticket in self._taken if ticket.status == "queued"), *self.waiting()]

    def position(self, ticket: Ticket) -> int | None:
        """How many are served before it; None when it does not wait."""
        queued = self.queued()
        return queued.index(ticket) if ticket in queued else None

    def put(self, ticket: Ticket, *, again: bool = False) -> None:
        """Accepts a ticket, or raises ApiError 429 or 503. again: it was accepted before a restart."""
        if self.refusing is not None and not again:
            raise self.refusing
        if not again:
            self._admit(ticket)
        start = max(self._now, self._charged.get(ticket.client, 0.0))
        self._charged[ticket.client] = start + work_of(ticket)
        self._heap = [turn for turn in self._heap if turn[2].status == "queued"]  # no others are kept alive
        self._heap.append((start, next(self._order), ticket))
        heapq.heapify(self._heap)
        self._arrived.set()

    async def take(self) -> Ticket:
        """The next ticket, whose turn it then is. Cancelling this loses none."""
        while True:
            while self._heap:
                turn = heapq.heappop(self._heap)
                self._now, ticket = max(self._now, turn[0]), turn[2]
                self._charged = {c: end for c, end in self._charged.items() if end > self._now}
                if ticket.status == "queued":
                    self._taken = [*(one for one in self._taken if one[2].status == "queued"), turn]
                    return ticket
            self._arrived.clear()
            await self._arrived.wait()

    def take_beside(self, first: Ticket, pictures: int) -> list[Ticket]:
        """Those whose turn is next, as long as they have the shape of `first` and make up so many pictures
        with it at most. Nobody is overtaken, and who has lost a worker has no mates.
        """
        found: list[Ticket] = []
        left = pictures - first.request.images
        while self._heap and not first.lost:
            turn = self._heap[0]
            start, _, ticket = turn
            if ticket.status == "queued":
                if ticket.lost or ticket.request.shape != first.request.shape or ticket.request.images > left:
                    break
                found.append(ticket)
                self._taken.append(turn)
                left -= ticket.request.images
                self._now = max(self._now, start)
            heapq.heappop(self._heap)
        return found

    def give_back(self, ticket: Ticket) -> None:
        """The turn that it had, for one that was taken and never begun. It is not charged again."""
        turn = next(turn for turn in self._taken if turn[2] is ticket)
        self._taken.remove(turn)
        ticket.on_cancel(None)
        heapq.heappush(self._heap, turn)
        self._arrived.set()

    def measured(self, tickets: Sequence[Ticket], seconds: float) -> None:
        """Tells how long requests took on the device together, from which waiting times are guessed."""
        rate = seconds / sum(work_of(ticket) for ticket in tickets)
        old = self._seconds_per_work
        self._seconds_per_work = rate if old is None else 0.8 * old + 0.2 * rate

    def seconds_ahead(self) -> float:
        """How long the waiting requests will take, as far as can be told."""
        queued = self.queued()
        if self._seconds_per_work is None:
            return FIRST_GUESS_SECONDS * len(queued)
        return self._seconds_per_work * sum(work_of(ticket) for ticket in queued)

    def _admit(self, ticket: Ticket) -> None:
        limits, waiting = self.limits, self.waiting()
        if len(waiting) >= limits.queue:
            raise self._full(f"{len(waiting)} requests wait, and {limits.queue} may")
        own = sum(other.client == ticket.client for other in waiting)
        most = max(limits.queue // 2, 1)
        if own >= most and any(other.client != ticket.client for other in waiting):
            raise self._full(f"{own} requests of this client wait, and {most} may while others wait too")
        pixels = sum(other.pixels for other in waiting)
        if waiting and pixels + ticket.pixels > limits.queue_pixels:
            raise self._full(f"{pixels:,} pixels wait to be drawn, and {limits.queue_pixels:,} may")

    def _full(self, reason: str) -> ApiError:
        seconds = min(max(round(self.seconds_ahead() / 2), 1), MOST_RETRY_SECONDS)
        return ApiError(
            429,
            f"The queue is full: {reason}. Try again in {seconds} s.",
            code="queue_full",
            headers={"Retry-After": str(seconds)},
        )


def work_of(ticket: Ticket) -> float:
    """What a ticket costs the device, in pixels times steps."""
    return float(ticket.pixels * ticket.request.steps)
