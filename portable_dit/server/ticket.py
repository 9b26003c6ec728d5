"""Ticket: one accepted request, from the queue to its pictures or the reason why there are none.

Lives on the event loop. Whoever waits for it asks for `changes` and reads the state at each; a slow reader
misses steps in between, never the end.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Literal

from portable_dit.request import ResolvedRequest
from portable_dit.server.messages import Order, PictureFile, Stepped, Summary
from portable_dit.server.refusal import ApiError

Status = Literal["queued", "running", "finished", "failed", "cancelled"]
KEPT_PREVIEWS = 16


class Ticket:
    """deadline: on the monotonic clock."""

    def __init__(
        self,
        request: ResolvedRequest,
        *,
        client: str,
        deadline: float,
        preview_steps: frozenset[int] = frozenset(),
        quality: int = 92,
        id: str | None = None,
    ) -> None:
        self.id = id or secrets.token_hex(12)
        self.request = request
        self.client = client
        self.deadline = deadline
        self.preview_steps = preview_steps
        self.quality = quality
        self.accepted = time.monotonic()
        self.started: float | None = None
        self.lost = 0  # workers that ended before they had begun it
        self.status: Status = "queued"
        self.files: list[PictureFile] = []
        self.summary: Summary | None = None
        self.failure: ApiError | None = None
        self._steps: dict[int, int] = {}  # by image, which may be drawn in turn or side by side
        self.previews: dict[int, tuple[Stepped, bytes]] = {}  # by count, the latest only
        self._count = itertools.count()
        self._changed, self._ended = asyncio.Event(), asyncio.Event()
        self._canceller: Callable[[], None] | None = None

    @property
    def pixels(self) -> int:
        """Pixels that it will draw, references included, since they are rows of the same attention."""
        request = self.request
        references = sum(width * height for width, height in (r.size for r in request.references))
        return (request.width * request.height + references) * request.images

    @property
    def steps_done(self) -> int:
        """Of all images."""
        return sum(self._steps.values())

    @property
    def is_over(self) -> bool:
        return self.status in ("finished", "failed", "cancelled")

    def order(self) -> Order:
        return Order(self.id, self.request, self.preview_steps, self.quality)

    def on_cancel(self, cancel: Callable[[], None] | None) -> None:
        """Whom to tell that nobody waits for it any more; None when no worker has it."""
        self._canceller = cancel

    def start(self) -> None:
        """Work on it has begun."""
        self.started = time.monotonic()
        self.status = "running"
        self._tell()

    def step(self, message: Stepped) -> None:
        self._steps[message.image] = message.step
        if message.preview is not None:
            number = next(self._count)
            self.previews[number] = (message, message.preview)
            self.previews.pop(number - KEPT_PREVIEWS, None)
        self._tell()

    def add(self, file: PictureFile) -> None:
        self.files.append(file)
        self._tell()

    def finish(self, summary: Summary) -> None:
        if not self.is_over:
            self.files.sort(key=lambda file: file.seed)  # picture k has seed + k
            self.summary, self.status = summary, "finished"
            self._ended.set()
            self._tell()

    def fail(self, failure: ApiError) -> None:
        """Over without pictures. A cancel keeps its name."""
        if not self.is_over:
            self.failure = failure
            self.status = "cancelled" if failure.code == "cancelled" else "failed"
            self.files.clear()
            self._ended.set()
            self._tell()

    def cancel(self, reason: ApiError) -> None:
        """Over for whoever waits; the device is free again after the step that it is in."""
        if not self.is_over:
            if self._canceller is not None:
                self._canceller()
            self.fail(reason)

    async def changes(self) -> AsyncIterator[None]:
        """Once at once, and then whenever something has changed, the last time when it is over."""
        while True:
            changed, over = self._changed, self.is_over
            yield
            if over:
                return
            await changed.wait()

    async def wait(self) -> None:
        """Until it is over; no step in between wakes who waits."""
        await self._ended.wait()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def cancelled(reason: str) -> ApiError:
    return ApiError(409, f"cancelled: {reason}", code="cancelled")
