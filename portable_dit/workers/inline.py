"""The worker that is this process: one device, nothing started but the thread that draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from portable_dit.drawing import memory_explained
from portable_dit.loaded import LoadedModel
from portable_dit.loading import load_model
from portable_dit.request import ResolvedRequest
from portable_dit.result import Event, Outcome
from portable_dit.setup import Setup
from portable_dit.stages import draw_all
from portable_dit.workers import RankReport
from portable_dit.workers.thread import DrawingThread, Tell


class ThisProcess:
    """See `workers.Workers`."""

    replicas = 1
    leads = True
    reports: tuple[RankReport, ...] = ()

    def __init__(
        self,
        setup: Setup,
        *,
        on_component: Callable[[str], None],
        on_bytes: Callable[[str, int, int], None],
    ) -> None:
        self._setup = setup
        self._thread = DrawingThread()

        def load(tell: Tell) -> LoadedModel:
            with memory_explained(setup, "loading", ""):
                return load_model(
                    setup, on_component=partial(tell, on_component), on_bytes=partial(tell, on_bytes)
                )

        with ExitStack() as undo:
            undo.callback(self._thread.end)  # waits until what was loaded or written is gone: the next tensor
            self.loaded: LoadedModel | None = self._thread.call(load)
            undo.pop_all()

    def draw(
        self,
        requests: Sequence[ResolvedRequest],
        emit: Callable[[int, Event], None],
        cancelled: Callable[[int], bool],
        previews: Sequence[bool],
    ) -> tuple[Outcome, ...]:
        def work(tell: Tell) -> tuple[Outcome, ...]:
            assert self.loaded is not None
            return draw_all(self._setup, self.loaded, requests, partial(tell, emit), cancelled, previews)

        return self._thread.call(work)

    def close(self) -> None:
        self._thread.call(self._release)
        self._thread.end()

    def _release(self, tell: Tell) -> None:
        loaded, self.loaded = self.loaded, None
        if loaded is not None:
            loaded.release()
            del loaded
            self._setup.backend.trim(self._setup.device)
