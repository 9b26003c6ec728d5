"""The worker that is this process: one device, nothing started."""

from __future__ import annotations

from collections.abc import Callable

from portable_dit.drawing import Drawing, memory_explained
from portable_dit.loaded import LoadedModel
from portable_dit.loading import Setup, load_model
from portable_dit.request import ResolvedRequest
from portable_dit.result import Event, Result
from portable_dit.workers import RankReport


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
        with memory_explained(setup, "loading", ""):
            self.loaded: LoadedModel | None = load_model(setup, on_component=on_component, on_bytes=on_bytes)

    def draw(
        self,
        request: ResolvedRequest,
        emit: Callable[[Event], None],
        cancelled: Callable[[], bool],
        previews: bool,
    ) -> Result:
        assert self.loaded is not None
        return Drawing(self._setup, self.loaded, request, emit, cancelled, previews).run()

    def close(self) -> None:
        loaded, self.loaded = self.loaded, None
        if loaded is not None:
            loaded.release()
            del loaded
            self._setup.backend.trim(self._setup.device)
