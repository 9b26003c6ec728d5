"""One of several processes that torchrun started, each running the same program with the same requests.

    torchrun --nproc-per-node 4 -m portable_dit run --distributed-executor-backend torchrun ...

Rank 0 has the pictures; elsewhere a result holds none, and nothing is written or printed. Replicas share the
images of a request out among them, and rank 0 gathers them. A rank that fails leaves word in torchrun's own
store, so that the others, who only see an exchange break, name it too; torchrun then ends them all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from portable_dit.errors import PortableDitError, RankError, RecipeError
from portable_dit.parallel.collectives import Pulse
from portable_dit.request import ResolvedRequest
from portable_dit.result import Drawn, Event, Finished, Outcome, Result
from portable_dit.setup import Setup
from portable_dit.workers import RankReport
from portable_dit.workers.rank import Rank, Task
from portable_dit.workers.replicas import Share, joined, moved, shares_of
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
        requests: Sequence[ResolvedRequest],
        emit: Callable[[int, Event], None],
        cancelled: Callable[[int], bool],
        previews: Sequence[bool],
    ) -> tuple[Outcome, ...]:
        shares = shares_of(requests, self._data)
        own = shares[self._worker.mesh.replica]

        def tell(k: int, event: Event) -> None:
            if self.leads and (known := moved(event, own[k].first)) is not None:
                emit(own[k].place, known)

        with self._named("drawing"):
            parts: tuple[Outcome, ...] = ()
            if own:
                parts = self._thread.call(
                    lambda soon: self._worker.draw(
                        [share.request for share in own],
                        partial(soon, tell),
                        lambda k: cancelled(own[k].place),
                        [previews[share.place] for share in own],
                    )
                )
            everyone = self._gathered(parts)
        if not self.leads:
            outcomes = self._without_pictures(requests, own, parts)
            for place, outcome in enumerate(outcomes):
                if isinstance(outcome, Result):
                    emit(place, Finished(outcome))
            return outcomes
        leaders = everyone[:: self._world // self._data]
        return self._whole(requests, shares, leaders, emit)

    def _whole(
        self,
        requests: Sequence[ResolvedRequest],
        shares: Sequence[Sequence[Share]],
        outcomes: Sequence[tuple[Outcome, ...]],
        emit: Callable[[int, Event], None],
    ) -> tuple[Outcome, ...]:
        """What became of each request over all replicas, whose other leaders' events stayed there."""
        whole: list[Outcome] = []
        for place, request in enumerate(requests):
            parts = [
                (share.first, outcome)
                for own, found in zip(shares, outcomes, strict=True)
                for share, outcome in zip(own, found, strict=True)
                if share.place == place
            ]
            errors = [part for _, part in parts if isinstance(part, PortableDitError)]
            if errors:
                whole.append(errors[0])
                continue
            result = joined([part for _, part in parts if isinstance(part, Result)])
            here = sum(share.request.images for share in shares[0] if share.place == place)
            for image in range(here, request.images):
                emit(place, Drawn(image, result.images[image]))
            emit(place, Finished(result))
            whole.append(result)
        return tuple(whole)

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

    def _without_pictures(
        self, requests: Sequence[ResolvedRequest], own: Sequence[Share], parts: Sequence[Outcome]
    ) -> tuple[Outcome, ...]:
        """What this process knows of each request, of which it may have had no image to draw."""
        plan = self._worker.setup.plan
        nothing = Result((), {}, None, plan.backend, plan.device, plan.kernels, (), ())
        known = {share.place: part for share, part in zip(own, parts, strict=True)}
        found = [known.get(place, nothing) for place in range(len(requests))]
        return tuple(replace(one, images=()) if isinstance(one, Result) else one for one in found)


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
