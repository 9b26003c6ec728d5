"""The worker: a process that holds one Engine and draws what the server sends it.

    python -m portable_dit.server.worker FD

Apart from the server, so that what kills a device driver kills no server. One thread reads messages, which
the main one obeys once it has loaded; one for each replica of the engine waits for a request's pictures, and
one encodes files, so that the file of one request is made while the next is drawn. The process ends when the
server's end of the socket is closed, however that came about and whatever is going on, be it loading.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import psutil

from portable_dit import __version__
from portable_dit.engine import Engine
from portable_dit.errors import PortableDitError, RecipeError, UserError
from portable_dit.image import Pixels, encode
from portable_dit.png import encode_png
from portable_dit.result import Drawn, Event, Finished, Outcome, Picture, Queued, Result, Started
from portable_dit.result import Stepped as EngineStep
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
    Order,
    PictureFile,
    Ping,
    Pong,
    Stepped,
    Summary,
)
from portable_dit.setup import Setup, fetch, set_up

PREVIEW_SIDE = 512
BROKEN = 70  # exit code after an error that nobody expected; EX_SOFTWARE of sysexits.h


class Worker:
    """One end of the socket, with an engine behind it. clock: in seconds."""

    def __init__(self, connection: Connection, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.connection = connection
        self.clock = clock
        self.sending = threading.Lock()
        self.orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.encoding = ThreadPoolExecutor(1, thread_name_prefix="encoding")
        self.cancelled: set[str] = set()
        self.failed: dict[str, PortableDitError] = {}  # by request: why a file of it could not be made
        self.waiting: dict[Draw, float] = {}  # since when, for a replica that others have taken
        self.moved: dict[Draw, float] = {}  # by what is drawn: when it last moved
        self.idle_since = 0.0  # when the last drawing ended
        self.drawn: set[str] = set()  # the requests of it
        self.process = psutil.Process()

    def run(self) -> None:
        """Loads what the first message says, then obeys until the server is gone."""
        threading.Thread(target=self.listen, name="orders", daemon=True).start()
        load: Load = self.orders.get()
        start = time.perf_counter()
        try:
            self.engine = self.load(load)
        except UserError as error:
            self.send(LoadFailed(str(error), error.exit_code))
            return
        places = self.engine.places
        self.drawing = ThreadPoolExecutor(places, thread_name_prefix="request")
        batch = self.engine.plan.workload.batch
        self.send(Loaded(time.perf_counter() - start, places, batch, facts_of(self.engine.setup)))
        while True:
            self.obey(self.orders.get())

    def listen(self) -> None:
        """Takes orders until the server is gone, and ends the process then, whatever it is doing."""
        code = BROKEN  # where an order cannot be read
        try:
            while True:
                self.orders.put(self.connection.recv())
        except (EOFError, ConnectionError):
            code = 0  # nobody waits for what is still being loaded or drawn
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)

    def load(self, order: Load) -> Engine:
        """The engine, profiled when that is wanted. Raises UserError."""

        def tell(name: str, done: int, total: int) -> None:
            self.send(Loading(name, done, total))

        setup = set_up(order.recipe, strict=order.strict)
        if order.profile is None:
            return Engine.load(setup, on_bytes=tell)
        from portable_dit.server.profiler import ProfiledProcess, Profiler

        if setup.plan.executor != "inline":
            raise RecipeError(
                f"--enable-diffusion-pipeline-profiler: executor={setup.plan.executor} draws in other "
                "processes, and the profiler sees its own alone. Profile a recipe for one device."
            )
        setup = fetch(setup)
        profiler = Profiler(
            order.profile,
            wait=lambda: setup.backend.synchronize(setup.device),
            log=lambda line: print(line, file=sys.stderr, flush=True),
        )
        return Engine(setup, ProfiledProcess(setup, profiler, tell))

    def obey(self, message: Draw | Cancel | Ping) -> None:
        if isinstance(message, Draw):
            self.waiting[message] = self.clock()
            self.drawn |= {order.id for order in message.orders}
            future = self.drawing.submit(self.draw, message)
            future.add_done_callback(partial(self.ended, message))
        elif isinstance(message, Cancel):
            if message.id in self.drawn:  # else it has ended, and nobody would take the id out again
                self.cancelled.add(message.id)
        else:
            self.send(self.pong())

    def pong(self) -> Pong:
        setup = self.engine.setup
        return Pong(
            quiet_seconds=self.quiet_seconds(),
            resident_bytes=self.process.memory_info().rss,
            device_bytes=setup.backend.memory(setup.device),
            energy_joules=setup.backend.energy_joules(setup.device),
        )

    def quiet_seconds(self) -> float:
        """Since when something should have moved. Who waits for a replica that is drawing should not."""
        moved, waiting = tuple(self.moved.values()), tuple(self.waiting.values())
        if not moved and not waiting:
            return 0.0
        return self.clock() - (min(moved) if moved else max(min(waiting), self.idle_since))

    def draw(self, message: Draw) -> tuple[Outcome, ...]:
        """Draws requests; files are handed to the encoding thread as their pixels come."""
        orders = message.orders
        return self.engine.generate_all(
            [replace(order.request, format=None) for order in orders],
            on_event=lambda place, event: self.tell(message, orders[place], event),
            cancelled=lambda place: orders[place].id in self.cancelled,
            previews=[bool(order.preview_steps) for order in orders],
        )

    def tell(self, message: Draw, order: Order, event: Event) -> None:
        if isinstance(event, Queued):
            return
        self.moved[message] = self.clock()
        self.waiting.pop(message, None)
        if isinstance(event, Started):
            self.send(Begun(order.id))  # not behind the files of earlier requests
        elif isinstance(event, EngineStep):
            wanted = event.step in order.preview_steps
            self.encode(order, self.send_step, order.id, event, event.preview if wanted else None)
        elif isinstance(event, Drawn):
            self.encode(order, self.send_file, order, event.picture)
        elif isinstance(event, Finished):
            self.encode(order, self.send_end, order.id, summary_of(event.result), None)

    def encode(self, order: Order, work: Callable[..., None], *arguments: Any) -> None:
        """Runs on the encoding thread, after all that was given to it before."""
        self.encoding.submit(work, *arguments).add_done_callback(partial(self.encoded, order))

    def encoded(self, order: Order, work: Future[None]) -> None:
        error = work.exception()
        if isinstance(error, PortableDitError):
            self.failed[order.id] = error
        elif error is not None:
            self.give_up([order.id], error)

    def send_step(self, id: str, event: EngineStep, preview: Pixels | None) -> None:
        small = None if preview is None else encode_png(shrunk(preview), threads=1)
        self.send(Stepped(id, event.image, event.step, event.steps, small))

    def send_file(self, order: Order, picture: Picture) -> None:
        start = time.perf_counter()
        format = order.request.format or "png"
        data = encode(picture.pixels, picture.record, format=format, quality=order.quality)
        seconds = {**picture.seconds, "encode_png": time.perf_counter() - start}
        file = PictureFile(data, format, picture.width, picture.height, picture.seed, seconds)
        self.send(FileDone(order.id, replace(file, batch=picture.batch, wanted=picture.wanted)))

    def ended(self, message: Draw, drawing: Future[tuple[Outcome, ...]]) -> None:
        """The place is free; what remains of the requests goes through the encoding thread, in order."""
        self.waiting.pop(message, None)
        self.moved.pop(message, None)
        self.idle_since = self.clock()
        ids = tuple(order.id for order in message.orders)
        self.drawn -= set(ids)
        self.cancelled -= set(ids)
        error = drawing.exception()
        if error is not None and not isinstance(error, PortableDitError):
            self.give_up(ids, error)
        outcomes = drawing.result() if error is None else (error,) * len(ids)
        self.send(Free(ids, whole=not any(isinstance(outcome, BaseException) for outcome in outcomes)))
        for order, outcome in zip(message.orders, outcomes, strict=True):
            if isinstance(outcome, PortableDitError):
                self.encode(order, self.send_end, order.id, None, outcome)

    def send_end(self, id: str, summary: Summary | None, error: BaseException | None) -> None:
        error = self.failed.pop(id, None) or error
        self.send(Ended(id, error=error) if error is not None else Ended(id, summary))

    def give_up(self, ids: Sequence[str], error: BaseException) -> None:
        """Ends the process: after an unknown failure the device is not to be trusted with another request."""
        if not isinstance(error, ConnectionError):
            traceback.print_exception(error)
            for id in ids:
                self.send(Ended(id, error=PortableDitError(describe(error)), fatal=True))
        os._exit(BROKEN)

    def send(self, message: Message) -> None:
        with self.sending:
            self.connection.send(message)


def summary_of(result: Result) -> Summary:
    return Summary(dict(result.seconds), result.peak_bytes, result.notes, result.changes)


def describe(error: BaseException) -> str:
    """One line of an unexpected error, without its traceback, which is in the server's log."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}."


def shrunk(pixels: Pixels) -> Pixels:
    """A preview [h, w, 3] of at most PREVIEW_SIDE, by leaving out rows and columns."""
    stride = -(-max(pixels.shape[:2]) // PREVIEW_SIDE)
    return pixels[::stride, ::stride]


def facts_of(setup: Setup) -> dict[str, Any]:
    """What people and programs may know of a loaded engine."""
    import torch

    plan = setup.plan.as_dict()
    return {
        "model": setup.spec.id,
        "recipe": plan.pop("recipe"),
        "plan": plan,
        "kernels": plan["kernels"],
        "notes": list(setup.notes),
        "devices": setup.plan.layout.world,
        "batch": setup.plan.workload.batch,
        "versions": {
            "portable-dit": __version__,
            "torch": str(torch.__version__),  # a class of torch's own, which the server would have to import
            "python": sys.version.split()[0],
            **backend_versions(setup),
        },
    }


def backend_versions(setup: Setup) -> dict[str, str]:
    """The version of the package that the backend comes from, when it is one of its own."""
    from importlib.metadata import PackageNotFoundError, version

    name = type(setup.backend).__module__.partition(".")[0].replace("_", "-")
    if name == "portable-dit":
        return {}
    try:
        return {name: version(name)}
    except PackageNotFoundError:  # a folder on the path, not installed
        return {name: "unknown"}


def main() -> None:
    # Ctrl-C and a service manager's stop reach every process of the group; the server decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        Worker(Connection(int(sys.argv[1]))).run()
    except ConnectionError:
        os._exit(0)  # the server has gone


if __name__ == "__main__":
    main()
