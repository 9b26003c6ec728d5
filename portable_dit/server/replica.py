"""Replica: a worker process as the server sees it. Started, pinged, fed from the queue, started again.

A worker that dies, hangs or stops answering takes with it what it draws, with a 503 that says so, and
nothing else: what it had not begun gets its turn back, and the queue waits until the next worker has loaded.
There it is alone until it has begun, so that who kills the next worker too is known, and has killed its last.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from portable_dit.errors import PortableDitError
from portable_dit.server.messages import (
    Begun,
    Cancel,
    Draw,
    Ended,
    FileDone,
    Free,
    Load,
    Loaded,
    LoadFailed,
    Loading,
    Message,
    Ping,
    Pong,
    Stepped,
)
from portable_dit.server.metrics import Metrics
from portable_dit.server.queue import FairQueue
from portable_dit.server.refusal import refusal_of, worker_lost
from portable_dit.server.ticket import Ticket

PING_SECONDS = 1.0
SILENT_SECONDS = 5.0  # without an answer it is not ready
DEAD_SECONDS = 30.0  # without an answer it is ended
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 30.0
MOST_LOST = 2  # workers before a request has begun: the first may be another's fault, the next it has alone
STABLE_SECONDS = 60.0  # a worker that lived so long is started again without a pause


class Replica:
    """stall_seconds: most time without progress of a drawing. on_fatal: told when nothing can be loaded."""

    def __init__(
        self,
        load: Load,
        queue: FairQueue,
        metrics: Metrics,
        *,
        stall_seconds: float,
        on_loaded: Callable[[], None],
        on_fatal: Callable[[LoadFailed], None],
        log: Callable[[str], None],
    ) -> None:
        self.load = load
        self.queue = queue
        self.metrics = metrics
        self.stall_seconds = stall_seconds
        self.on_loaded = on_loaded
        self.on_fatal = on_fatal
        self.log = log
        self.facts: Mapping[str, Any] | None = None
        self.loading: Loading | None = None
        self.pong: Pong | None = None
        self.starts = 0
        self.current: dict[str, Ticket] = {}
        self._drawn: dict[tuple[str, ...], list[Ticket]] = {}  # by place that is taken
        self._told = asyncio.Event()  # that a request has begun or ended
        self._batch = 1
        self._answered = 0.0
        self._loaded = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="to-worker")
        self._free = asyncio.Semaphore(0)
        self._gone = asyncio.Event()
        self._stopping = False

    @property
    def ready(self) -> bool:
        """It has loaded and answered a ping within the last seconds."""
        return self._loaded and time.monotonic() - self._answered < SILENT_SECONDS

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def drawing(self) -> list[Ticket]:
        """Those that it has begun; a cancelled one until the device has left it."""
        return [ticket for ticket in self.current.values() if ticket.status != "queued"]

    async def run(self) -> None:
        """Keeps a worker alive until `stop`."""
        pause = FIRST_PAUSE_SECONDS
        while not self._stopping:
            started = time.monotonic()
            try:
                self._start()
            except OSError as error:  # no process or no file is to be had, for now
                end = f"cannot be started ({error})"
            else:
                end = f"gone (exit {await self._live()})"
            if self._stopping:
                return
            pause = FIRST_PAUSE_SECONDS if time.monotonic() - started > STABLE_SECONDS else pause
            self.log(f"worker: {end}; starting another in {pause:.1f} s")
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def _live(self) -> int:
        """From a worker's start until it is gone, and what it had is seen to; its exit code."""
        tasks = [asyncio.create_task(work()) for work in (self._feed, self._watch)]
        await self._gone.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        code = await self._reap()
        self._abandon(code)
        return code

    async def stop(self) -> None:
        """Ends the worker now, whatever it does."""
        self._stopping = True
        if self._process is not None:
            self._process.kill()
            await self._gone.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._loaded, self.pong = False, None
        with ours, theirs:
            # The current folder must not be where Python looks for modules first: it may hold a torch.py.
            environment = {**os.environ, "PYTHONSAFEPATH": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "portable_dit.server.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # ours is the server's answer, its address; whatever a library prints is for people
                env=environment,
            )
            self._connection = Connection(ours.detach())
        self._free, self._gone = asyncio.Semaphore(0), asyncio.Event()
        self.starts += 1
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, args=(loop, self._connection), daemon=True).start()
        self._send(self.load)

    def _listen(self, loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
        """Carries messages of one worker to the event loop until it is gone; on a thread of its own."""
        with contextlib.suppress(RuntimeError):  # the loop was closed first
            try:
                while True:
                    loop.call_soon_threadsafe(self._hear, connection.recv())
            except (EOFError, OSError):
                pass
            finally:  # also where nobody can read what it says
                loop.call_soon_threadsafe(self._gone.set)

    def _send(self, message: Any) -> None:
        """Off the event loop, in order, since references of a request may fill the socket."""
        connection = self._connection
        assert connection is not None

        def send() -> None:
            with contextlib.suppress(OSError):  # it is gone, which the listening thread tells
                connection.send(message)

        self._sender.submit(send)

    def _hear(self, message: Message) -> None:
        if isinstance(message, Pong):
            self.pong, self._answered = message, time.monotonic()
        elif isinstance(message, Loading):
            self.loading = message
        elif isinstance(message, Loaded):
            self.facts, self._loaded, self._answered = message.facts, True, time.monotonic()
            self._batch = message.batch
            self.on_loaded()
            for _ in range(message.places):
                self._free.release()
            self.log(f"worker: {message.facts['model']} loaded in {message.seconds:.1f} s (pid {self.pid})")
        elif isinstance(message, LoadFailed):
            self._stopping = True
            self.on_fatal(message)
        elif isinstance(message, Free):
            self._free.release()
            tickets = self._drawn.pop(message.ids)
            begun = [ticket.started for ticket in tickets if ticket.started is not None]
            if message.whole and begun:  # what was cancelled took less than its work
                self.queue.measured(tickets, time.monotonic() - min(begun))
        elif (ticket := self.current.get(message.id)) is not None:
            self._hear_of(ticket, message)

    def _hear_of(self, ticket: Ticket, message: Begun | Stepped | FileDone | Ended) -> None:
        if isinstance(message, Begun) and not ticket.is_over:
            ticket.start()
            self._told.set()
            self.metrics.queue_seconds.observe(time.monotonic() - ticket.accepted)
        elif isinstance(message, Stepped):
            self.metrics.steps.inc()
            if not ticket.is_over:
                ticket.step(message)
        elif isinstance(message, FileDone) and not ticket.is_over:
            self.metrics.drawn(message.file)
            ticket.add(message.file)
        elif isinstance(message, Ended):
            if message.fatal and ticket.status == "queued" and (ticket.id,) not in self._drawn:
                return  # it may be a mate's fault: what has not begun waits again when the worker is gone
            del self.current[ticket.id]
            self._told.set()
            self._end(ticket, message)

    def _end(self, ticket: Ticket, message: Ended) -> None:
        if message.summary is not None:
            self.metrics.finished(message.summary)
            ticket.finish(message.summary)
        elif isinstance(message.error, PortableDitError):
            error = worker_lost(str(message.error)) if message.fatal else refusal_of(message.error)
            if error.status_code >= 500:
                self.log(f"error: request {ticket.id}: {_first_line(message.error)}")
            ticket.fail(error)

    async def _feed(self) -> None:
        """One request after the other to the worker, as soon as it has a place that is free, each with those
        behind it that may share its steps. Nobody waits for mates.
        """
        while True:
            await self._free.acquire()
            first = await self._next()
            tickets = [first, *self.queue.take_beside(first, self._batch)]
            for ticket in tickets:
                self.current[ticket.id] = ticket
                ticket.on_cancel(lambda id=ticket.id: self._send(Cancel(id)))  # type: ignore[misc]
            self._drawn[tuple(ticket.id for ticket in tickets)] = tickets
            self._send(Draw(tuple(ticket.order() for ticket in tickets)))

    async def _next(self) -> Ticket:
        """Whose turn it is. One that has lost a worker waits until the next has nothing else, and nobody
        comes beside it before it has begun.
        """
        while True:
            await self._until(lambda: all(t.started or not t.lost for t in self.current.values()))
            ticket = await self.queue.take()
            if not (ticket.lost and self.current):
                return ticket
            self.queue.give_back(ticket)
            await self._until(lambda: not self.current)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._told.clear()
            await self._told.wait()

    async def _watch(self) -> None:
        """Pings; ends a worker that does not answer, or whose drawing shows no progress."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            if not self._loaded:
                continue
            self._send(Ping())
            quiet = 0.0 if self.pong is None else self.pong.quiet_seconds
            if time.monotonic() - self._answered > DEAD_SECONDS or quiet > self.stall_seconds:
                self.log(
                    f"worker: no progress for {max(quiet, DEAD_SECONDS):.0f} s; ending it (pid {self.pid})"
                )
                assert self._process is not None
                self._process.kill()
                return

    async def _reap(self) -> int:
        """The exit code of a worker whose socket is closed."""
        self._loaded = False
        process, connection = self._process, self._connection
        assert process is not None
        assert connection is not None
        try:
            code = await asyncio.to_thread(process.wait, 5)
        except subprocess.TimeoutExpired:  # it closed its socket and lives on
            process.kill()
            code = await asyncio.to_thread(process.wait)
        connection.close()
        return code

    def _abandon(self, code: int) -> None:
        """What the worker was busy with ends with an honest error. What it had not begun waits again."""
        abandoned, self.current = self.current, {}
        self._drawn.clear()
        if not self._stopping:
            self.metrics.worker_deaths.inc()
        for ticket in abandoned.values():
            reason = f"it ended with exit code {code} while it drew this request."
            if ticket.status == "queued" and not self._stopping:
                ticket.lost += 1
                if ticket.lost < MOST_LOST:
                    self.queue.give_back(ticket)
                    continue
                reason = f"{MOST_LOST} ended before they began this request, the last with exit code {code}."
                self.log(f"error: request {ticket.id}: the worker was lost: {reason}")
            ticket.fail(worker_lost(reason))


def _first_line(error: BaseException) -> str:
    """Of an error of ranks, without the last words, which were logged as they came."""
    return (str(error).splitlines() or [type(error).__name__])[0].removesuffix(" Its last words:")
