"""The service behind the routes: from a wish to a ticket in the queue, and everything that lives as long as
the server does."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import psutil
from fastapi import Request as HttpRequest

from portable_dit.catalog import read_spec
from portable_dit.errors import PortableDitError, near
from portable_dit.models.spec import ModelSpec
from portable_dit.recipe import Recipe
from portable_dit.request import Request, ResolvedRequest, parse_size
from portable_dit.server.job_store import JobStore
from portable_dit.server.messages import Load, LoadFailed
from portable_dit.server.metrics import Metrics
from portable_dit.server.queue import FairQueue
from portable_dit.server.references import check_files
from portable_dit.server.refusal import CLIENT_LEFT, FIELDS, ApiError, refusal_of
from portable_dit.server.remote import Fetcher
from portable_dit.server.replica import Replica
from portable_dit.server.schema import Sampling
from portable_dit.server.settings import Settings
from portable_dit.server.ticket import Ticket, cancelled
from portable_dit.setup import resolve_request

RANDOM_SEEDS = 2**31
DECODERS = 2  # requests whose references are decoded at the same time, since each may take much memory
EXPIRY_SECONDS = 60.0
WRITE_SECONDS = 10.0  # of patience with a disk, when all else has ended
STOPPING = "draining"  # code of what a stop refuses and ends
KEEPALIVE_SECONDS = 10.0  # of silence in a stream, after which a comment is sent


class Service:
    """One model behind one queue. on_fatal: told when the recipe cannot be loaded."""

    def __init__(
        self,
        recipe: Recipe,
        settings: Settings,
        *,
        on_fatal: Callable[[LoadFailed], None],
        log: Callable[[str], None],
    ) -> None:
        self.recipe = recipe
        self.settings = settings
        self.log = log
        self.spec: ModelSpec = read_spec(recipe)
        self.started = time.time()
        self.metrics = Metrics()
        self.fetcher = Fetcher(settings.image_hosts)
        self.store = JobStore(
            settings.jobs, keep_seconds=settings.keep_seconds, keep_bytes=settings.keep_bytes
        )
        self.queue = FairQueue(settings.limits)
        self.tickets: dict[str, Ticket] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writing: set[asyncio.Task[Any]] = set()  # those of them that a stop waits for
        self._decoding = asyncio.Semaphore(DECODERS)
        load = Load(recipe, settings.strict, settings.profile)
        self.replicas = [
            Replica(
                load,
                self.queue,
                self.metrics,
                stall_seconds=settings.stall_seconds,
                on_loaded=self._loaded,
                on_fatal=on_fatal,
                log=log,
            )
        ]

    @property
    def model_name(self) -> str:
        return self.settings.model_name or self.spec.id

    @property
    def ready(self) -> bool:
        return self.queue.refusing is None and any(replica.ready for replica in self.replicas)

    def start(self) -> None:
        for replica in self.replicas:
            self.spawn(replica.run())
        self.spawn(self._housekeeping())

    def _loaded(self) -> None:
        """Weights that were on a hub are here now, and their own configs say what the model draws."""
        self.spec = read_spec(self.recipe)

    async def drain(self) -> None:
        """Accepts nothing more and waits until everything that was accepted is over."""
        self._refuse()
        while self.tickets:
            await asyncio.wait([asyncio.ensure_future(ticket.wait()) for ticket in self.tickets.values()])
            await asyncio.sleep(0)

    def abandon(self) -> None:
        """Tells all who wait that there will be no pictures. Jobs stay as they are, for the next start."""
        self._refuse()
        reason = "This server was stopped before the pictures were drawn."
        for ticket in list(self.tickets.values()):
            ticket.fail(ApiError(503, reason, code=STOPPING))

    def _refuse(self) -> None:
        self.queue.refusing = ApiError(
            503,
            "This server is stopping and takes no new requests.",
            code=STOPPING,
            headers={"Retry-After": "10"},
        )

    async def stop(self) -> None:
        """Ends the workers and what they were doing; what became of jobs is written down first."""
        for replica in self.replicas:
            await replica.stop()
        self.abandon()
        if self._writing:
            await asyncio.wait(self._writing, timeout=WRITE_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.store.close()

    def spawn(self, work: Coroutine[Any, Any, None], *, writes: bool = False) -> None:
        """Runs beside the requests; what goes wrong in it is logged. writes: a stop waits for it a while."""
        task = asyncio.create_task(work)
        for tasks in (self._tasks, self._writing) if writes else (self._tasks,):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        task.add_done_callback(self._spawned_done)

    def _spawned_done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.log(f"error: {type(error).__name__}: {error}")

    async def resolve(
        self,
        wish: Sampling,
        prompt: str,
        references: Sequence[bytes],
        *,
        size: tuple[int, int] | None = None,
        format: str | None = None,
        names: Mapping[str, str] = FIELDS,
    ) -> ResolvedRequest:
        """The checked request of a wish. Raises ApiError.

        size: given in another way than wish.size. names: what the call names the fields of a request.
        """
        self._require_model(wish.model)
        limits = self.settings.limits
        images = wish.n or 1
        if images > limits.images:
            rule = f"this server draws at most {limits.images} in one request. Make several for more."
            raise ApiError(400, f"{names['images']}={images}: {rule}", param=names["images"])
        if len(references) > self.spec.max_references:
            rule = f"{self.spec.id} takes at most {self.spec.max_references}. Leave some out."
            field = names["references"]
            raise ApiError(400, f"{field}: {len(references)} were given. {rule}", param=field)
        if wish.size not in (None, "auto"):
            try:
                size = parse_size(wish.size)
            except PortableDitError as error:
                raise ApiError(400, str(error), param="size") from error
        request = Request(
            prompt,
            size=size,
            aspect_ratio=wish.aspect_ratio,
            resolution=wish.resolution,
            steps=wish.num_inference_steps,
            guidance_scale=wish.guidance_scale,
            seed=secrets.randbelow(RANDOM_SEEDS) if wish.seed is None else wish.seed,
            images=images,
            references=tuple(references),
            use_system_prompt=wish.use_system_prompt,
            system_prompt=wish.system_prompt,
            format=format or "png",
        )
        async with self._decoding if references else contextlib.nullcontext():
            resolved = await asyncio.to_thread(self._resolve, request, references, names)
        most_pixels = limits.pixels
        if most_pixels is not None and resolved.width * resolved.height > most_pixels:
            rule = f"this server draws at most {most_pixels:,} pixels. Say a smaller size."
            raise ApiError(400, f"size={resolved.width}x{resolved.height}: {rule}", param="size")
        return resolved

    def _resolve(
        self, request: Request, references: Sequence[bytes], names: Mapping[str, str]
    ) -> ResolvedRequest:
        check_files(references, self.settings.limits, param=names["references"])
        try:
            return resolve_request(request, self.recipe, self.spec, strict=self.settings.strict)
        except PortableDitError as error:
            refusal = refusal_of(error, names)
            if refusal.status_code >= 500:
                self.log(f"error: a request cannot be read: {error}")
            raise refusal from error

    def _require_model(self, name: str | None) -> None:
        if name is not None and name not in (self.model_name, self.spec.id):
            hint = near(name, (self.model_name,))
            raise ApiError(
                404, f"model={name}: not served here.{hint}", code="model_not_found", param="model"
            )

    def accept(
        self,
        request: ResolvedRequest,
        *,
        client: str,
        preview_steps: frozenset[int] = frozenset(),
        quality: int = 92,
        id: str | None = None,
        again: bool = False,
    ) -> Ticket:
        """The ticket of a request, in the queue. Raises ApiError 429 or 503."""
        deadline = time.monotonic() + self.settings.limits.deadline_seconds
        ticket = Ticket(
            request, client=client, deadline=deadline, preview_steps=preview_steps, quality=quality, id=id
        )
        self.queue.put(ticket, again=again)
        self.tickets[ticket.id] = ticket
        self.spawn(self._mind(ticket))
        return ticket

    async def finished(self, ticket: Ticket, http: HttpRequest) -> None:
        """Waits for a ticket on behalf of a caller. Raises its ApiError; a caller who leaves cancels it."""
        waiting = asyncio.ensure_future(ticket.wait())
        leaving = asyncio.ensure_future(has_left(http))
        try:
            await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            leaving.cancel()
            if not ticket.is_over:
                ticket.cancel(cancelled("the caller has left"))
        if ticket.failure is not None:
            raise ticket.failure if not leaving.done() else ApiError(CLIENT_LEFT, "the caller has left")

    async def _mind(self, ticket: Ticket) -> None:
        """Sees to it that a ticket ends in time, and is counted."""
        left = ticket.deadline - time.monotonic()
        waiting = asyncio.ensure_future(ticket.wait())
        await asyncio.wait({waiting}, timeout=left)
        if not ticket.is_over:
            seconds = self.settings.limits.deadline_seconds
            ticket.cancel(
                ApiError(504, f"Not done within the {seconds:g} s that this server allows.", code="deadline")
            )
        await waiting
        if ticket.failure is not None:
            self.metrics.failures.labels(ticket.failure.code or "failed").inc()
        del self.tickets[ticket.id]

    async def _housekeeping(self) -> None:
        while True:
            try:
                await self.store.expire()
            except sqlite3.Error as error:  # the disk may have room the next time
                self.log(f"error: old pictures cannot be dropped: {error}")
            await asyncio.sleep(EXPIRY_SECONDS)

    def measure(self) -> bytes:
        """The metrics as they are now."""
        metrics, pongs = self.metrics, [replica.pong for replica in self.replicas]
        metrics.queue_length.set(len(self.queue.queued()))
        metrics.running.set(sum(len(replica.drawing) for replica in self.replicas))
        metrics.ready.set(sum(replica.ready for replica in self.replicas))
        metrics.resident.set(sum(pong.resident_bytes for pong in pongs if pong is not None))
        metrics.server_resident.set(psutil.Process().memory_info().rss)
        return metrics.text()


async def has_left(http: HttpRequest) -> None:
    """Returns when the caller has closed the connection; the body must have been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def watch(ticket: Ticket, http: HttpRequest) -> AsyncIterator[bool]:
    """True at once and at each change of a ticket, False when nothing has changed for KEEPALIVE_SECONDS.

    Ends when the ticket is over, after a last True, or when the caller has left.
    """
    leaving = asyncio.ensure_future(has_left(http))
    changes = ticket.changes()
    change = asyncio.ensure_future(anext(changes))
    try:
        while True:
            done, _ = await asyncio.wait(
                {change, leaving}, timeout=KEEPALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if leaving in done:
                return
            if not done:
                yield False
                continue
            over = ticket.is_over
            yield True
            if over:
                return
            change = asyncio.ensure_future(anext(changes))
    finally:
        leaving.cancel()
        change.cancel()
