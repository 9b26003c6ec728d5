"""Running the application: uvicorn, and what SIGTERM, a second SIGTERM and Ctrl-C mean."""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from portable_dit.errors import RecipeError, UserError
from portable_dit.recipe import Recipe
from portable_dit.server.app import create_app
from portable_dit.server.messages import LoadFailed
from portable_dit.server.service import Service
from portable_dit.server.settings import Limits, Settings

LEAST_READ_BYTES = 16 * 1024  # in each read_seconds, of a caller that is slow to read its answer
FORGET = struct.pack("ii", 1, 0)  # on closing, what the system still holds for the caller is thrown away
STOP_NOW_SECONDS = 2  # for those who wait to be told that there will be nothing
LAST_WORDS_SECONDS = 10  # for answers that are being sent when the server has nothing left to draw


def serve(
    recipe: Recipe, settings: Settings, *, log: Callable[[str], None], on_bound: Callable[[int], None]
) -> None:
    """Serves until a signal. The first drains: what was accepted is finished. The second ends it now.

    on_bound: told the port, once it answers. Raises the error of a recipe that cannot be loaded.
    """
    failures: list[LoadFailed] = []

    def fail(failed: LoadFailed) -> None:
        failures.append(failed)
        server.stop_now()

    app = create_app(recipe, settings, on_fatal=fail, log=log)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=_protocol(settings.limits),
        ws="none",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=settings.limits.connections,
        timeout_graceful_shutdown=LAST_WORDS_SECONDS,
        h11_max_incomplete_event_size=64 * 1024,
    )
    server = _Server(config, app.state.service, log, on_bound)
    with _bound(settings) as listening:
        server.run(sockets=[listening])
    if failures:
        raise _error_of(failures[0])


def _bound(settings: Settings) -> socket.socket:
    """The socket to listen on. Raises UserError when it cannot be had."""
    host, port = settings.host, settings.port
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except socket.gaierror as error:
        listening.close()
        raise UserError(
            f"--host {host}: no address of this machine ({error.strerror}). Say 127.0.0.1 for this machine "
            "alone, or 0.0.0.0 for all that reach it."
        ) from error
    except OSError as error:
        listening.close()
        raise UserError(
            f"--host {host} --port {port}: cannot be listened on ({error.strerror}). Another server may be "
            "there; --port 0 takes a free port."
        ) from error
    return listening


def _error_of(failed: LoadFailed) -> RecipeError:
    error = RecipeError(failed.message)
    error.exit_code = failed.exit_code
    return error


class _Server(uvicorn.Server):
    """uvicorn with signals of our own."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        log: Callable[[str], None],
        on_bound: Callable[[int], None],
    ) -> None:
        super().__init__(config)
        self.service = service
        self.log = log
        self.on_bound = on_bound
        self.draining = False

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_bound(sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        name, loop = signal.Signals(sig).name, asyncio.get_running_loop()
        if self.draining:
            self.log(f"{name} again: stopping now")
            loop.call_soon_threadsafe(self.stop_now)
            return
        self.draining = True
        waiting = len(self.service.tickets)
        self.log(f"{name}: finishing {waiting} accepted requests, then stopping; once more stops now")
        loop.call_soon_threadsafe(self._start_drain)

    def stop_now(self) -> None:
        """Whoever waits is told so, and has this long to hear it."""
        self.service.abandon()
        self.should_exit = True
        asyncio.get_running_loop().call_later(STOP_NOW_SECONDS, self._cut_off)

    def _cut_off(self) -> None:
        self.force_exit = True

    def _start_drain(self) -> None:
        self.service.spawn(self._drain())

    async def _drain(self) -> None:
        await self.service.drain()
        self.should_exit = True


def _protocol(limits: Limits) -> type[H11Protocol]:
    """uvicorn's HTTP, with an end to connections that never say what they want, or do not read the answer."""

    class Impatient(H11Protocol):
        head_timer: asyncio.TimerHandle | None = None
        last: RequestResponseCycle | None = None  # the request before the head that is awaited
        read_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._await_head()  # of a further request, which has begun and is not whole

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            for timer in (self.head_timer, self.read_timer):
                if timer is not None:
                    timer.cancel()

        def _await_head(self) -> None:
            if self.head_timer is not None:
                if self.last is self.cycle:
                    return  # since the first byte of it
                self.head_timer.cancel()
            self.last = self.cycle
            self.head_timer = self.loop.call_later(limits.header_seconds, self._close_if_silent)

        def _close_if_silent(self) -> None:
            self.head_timer = None
            if self.cycle is self.last:
                self.transport.close()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._await_reader()

        def resume_writing(self) -> None:
            super().resume_writing()
            if self.read_timer is not None:
                self.read_timer.cancel()

        def _await_reader(self) -> None:
            unread = self.transport.get_write_buffer_size()
            self.read_timer = self.loop.call_later(limits.read_seconds, self._drop_if_not_read, unread)

        def _drop_if_not_read(self, before: int) -> None:
            # Nothing is written meanwhile: what is gone was read. To close would wait for the reader.
            if before - self.transport.get_write_buffer_size() < LEAST_READ_BYTES:
                own = self.transport.get_extra_info("socket")
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, FORGET)
                self.transport.abort()
            else:
                self._await_reader()

    return Impatient
