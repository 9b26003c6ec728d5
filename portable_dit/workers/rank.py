"""One rank: what a process that shares a model with others does, whoever started it.

It joins its group, loads its part, and draws what it is told, at the same time as the others; it says how far
it is while it works.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from portable_dit.drawing import memory_explained
from portable_dit.loaded import LoadedModel
from portable_dit.loading import load_model
from portable_dit.parallel.collectives import Pulse
from portable_dit.parallel.mesh import Mesh, join_mesh, leave_mesh
from portable_dit.recipe import Recipe
from portable_dit.request import ResolvedRequest
from portable_dit.result import Event, Outcome
from portable_dit.setup import Setup, set_up
from portable_dit.stages import draw_all
from portable_dit.workers import RankReport

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

LATER_SECONDS = 60.0  # after the watcher's own limit, so that its error, which names the rank, comes first


@dataclass(frozen=True)
class Task:
    """What a rank is told when it starts. device: which of its host's devices it drives."""

    recipe: Recipe
    strict: bool
    rank: int
    device: int
    replicas: int = 1


class Rank:
    """A rank that has joined its group. Make it, load it, draw with it."""

    def __init__(self, task: Task, *, store: Store | None, pulse: Pulse) -> None:
        self.pulse = pulse
        self.task = task
        self.setup: Setup = set_up(task.recipe, strict=task.strict, rank=task.device)
        self.setup.backend.activate(self.setup.device)
        self.mesh: Mesh = join_mesh(
            self.setup.plan.layout,
            task.rank,
            self.setup.backend,
            self.setup.device,
            store=store,
            timeout_seconds=task.recipe.rank_timeout_seconds + LATER_SECONDS,
            pulse=pulse,
            replicas=task.replicas,
        )
        self._loaded: LoadedModel | None = None

    def load(
        self,
        on_component: Callable[[str], None] = lambda name: None,
        on_bytes: Callable[[str, int, int], None] = lambda name, done, total: None,
    ) -> RankReport:
        """Loads this rank's part of the model; the callbacks are as for `loading.load_model`."""
        start = time.perf_counter()

        def component(name: str) -> None:
            self.pulse.beat(f"loading {name}")
            on_component(name)

        def read(name: str, done: int, total: int) -> None:
            self.pulse.beat(f"loading {name}")
            on_bytes(name, done, total)

        with memory_explained(self.setup, "loading", ""):
            self._loaded = load_model(self.setup, mesh=self.mesh, on_component=component, on_bytes=read)
        seconds = time.perf_counter() - start
        device = self.setup.device.torch_device
        return RankReport(self.task.rank, os.getpid(), device, self._loaded.bytes_read, seconds)

    def draw(
        self,
        requests: Sequence[ResolvedRequest],
        emit: Callable[[int, Event], None],
        cancelled: Callable[[int], bool],
        previews: Sequence[bool],
    ) -> tuple[Outcome, ...]:
        """This rank's part of some requests. The leader's events are told, and its results hold pictures."""
        assert self._loaded is not None

        def tell(place: int, event: Event) -> None:
            self.pulse.beat(f"drawing, after {type(event).__name__}")
            if self.mesh.leads:
                emit(place, event)

        return draw_all(self.setup, self._loaded, requests, tell, cancelled, previews)

    def leave(self) -> None:
        """Lets go of the model and of the group."""
        if self._loaded is not None:
            self._loaded.release()
            self._loaded = None
        leave_mesh()


def innermost_line(frame: FrameType) -> str:
    """Where a thread is: its innermost line inside this package, else its innermost."""
    inside: FrameType | None = frame
    while inside is not None and "portable_dit" not in inside.f_code.co_filename:
        inside = inside.f_back
    found = inside or frame
    return f"{found.f_code.co_name}, {os.path.basename(found.f_code.co_filename)}:{found.f_lineno}"
