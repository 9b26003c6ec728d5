"""One of several processes that torchrun started, each running the same program with the same requests.

    torchrun --nproc-per-node 4 -m portable_dit run --distributed-executor-backend torchrun ...

Rank 0 has the pictures; elsewhere a result holds none, and nothing is written or printed. Replicas share the
images of a request out among them, and rank 0 gathers them. A rank that fails leaves word in torchrun's own
store, so that the others, who only see an exchange break, name it too; torchrun then ends them all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from portable_dit.errors import RankError, RecipeError
from portable_dit.loading import Setup
from portable_dit.parallel.collectives import Pulse, split_evenly
from portable_dit.request import ResolvedRequest
from portable_dit.result import Drawn, Event, Result
from portable_dit.workers import RankReport
from portable_dit.workers.rank import Rank, Task
from portable_dit.workers.replicas import joined, moved
from portable_dit.workers.thread import DrawingThread, Tell

V = TypeVar("V")
WORD = "portable_dit.failed"
WORD_SECONDS = 2.0  # for the rank that failed to leave word
TOLD = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"


class OneOfMany:
    """See `workers.Workers`. leads: this process has the pictures."""

    replicas = 1

    def __init__(
        self,
        setup: Setup,
        *,
        on_component: Callable[[str], None],
        on_bytes: Callable[[str, int, int], None],
    ) -> None:
        layout = setup.plan.layout
        _require_torchrun(layout.world)
        limit = timedelta(seconds=setup.recipe.rank_timeout_seconds)
        self._rank, self._data = int(os.environ["RANK"]), layout.data
        self._world = layout.world
        self.leads = self._rank == 0
        self._store = next(rendezvous("env://", timeout=limit))[0]
        task = Task(
            setup.recipe, setup.strict, self._rank, int(os.environ["LOCAL_RANK"]), replicas=layout.data
        )
        self._pulse = Pulse()
        self._thread = DrawingThread()

        def load(tell: Tell) -> tuple[Rank, RankReport]:
            rank = Rank(task, store=self._store, pulse=self._pulse)
            return rank, rank.load(partial(tell, on_component), partial(tell, on_bytes))

        with self._named("loading"):
            self._worker, report = self._thread.call(load)
            self._everyone = dist.new_group(backend="gloo", timeout=limit)
            self.reports: tuple[RankReport, ...] = tuple(self._gathered(report))

    def draw(
        self,
        request: ResolvedRequest,
        emit: Callable[[Event], None],
        cancelled: Callable[[], bool],
        previews: bool,
    ) -> Result:
        lengths = split_evenly(request.images, self._data)
        replica = self._worker.mesh.replica
        first, images = sum(lengths[:replica]), lengths[replica]

        def tell(event: Event) -> None:
            if self.leads and (known := moved(event, first)) is not None:
                emit(known)

        with self._named("drawing"):
            part = None
            if images:
                share = replace(request, seed=request.seed + first, images=images)
                part = self._thread.call(
                    lambda soon: self._worker.draw(share, partial(soon, tell), cancelled, previews)
                )
            parts = [result for result in self._gathered(part) if result is not None and result.images]
        if self.leads:
            whole = joined(parts)
            for image in range(lengths[0], request.images):  # of other replicas, whose events stay there
                emit(Drawn(image, whole.images[image]))
            return whole
        return self._nothing() if part is None else replace(part, images=())

    def close(self) -> None:
        self._thread.call(lambda tell: self._worker.leave())
        self._thread.end()

    def _gathered(self, value: V) -> list[V]:
        """Everyone's value on rank 0, none elsewhere."""
        found: list[V] = [value] * self._world
        dist.gather_object(value, found if self.leads else None, dst=0, group=self._everyone)
        return found if self.leads else []

    @contextmanager
    def _named(self, during: str) -> Iterator[None]:
        """What breaks inside is raised with the rank that broke first."""
        whole, where = False, f"rank {self._rank} of {self._world}"
        try:
            yield
            whole = True
        except RuntimeError as error:
            if self._pulse.waits:
                raise RankError(self._word() or f"{where}, in {self._pulse.doing}: {error}") from error
            raise
        finally:
            if not whole and not self._pulse.waits:
                self._store.set(WORD, f"{where} failed while {during}: {sys.exc_info()[1]}")

    def _word(self) -> str | None:
        """What the rank that failed first has left, None when it could not."""
        try:
            self._store.wait([WORD], timedelta(seconds=WORD_SECONDS))
        except RuntimeError:
            return None
        word: bytes = self._store.get(WORD)
        return word.decode()

    def _nothing(self) -> Result:
        """The result of a replica that had no image to draw."""
        plan = self._worker.setup.plan
        return Result((), {}, None, plan.backend, plan.device, plan.kernels, (), ())


def _require_torchrun(world: int) -> None:
    """Raises RecipeError when torchrun has not started this process, or not as many as the layout needs."""
    command = f"torchrun --nproc-per-node {world} -m portable_dit run ..."
    missing = [name for name in TOLD if name not in os.environ]
    if missing:
        raise RecipeError(
            f"executor=torchrun: this process was not started by torchrun ({', '.join(missing)} not set). "
            f"Type {command}, or say executor=mp, which starts the processes itself."
        )
    started = os.environ["WORLD_SIZE"]
    if started != str(world):
        raise RecipeError(
            f"executor=torchrun: {started} processes were started and the layout uses {world}. Type {command}"
        )
