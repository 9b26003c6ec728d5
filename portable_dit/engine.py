"""Engine: a recipe loaded once, drawing request after request.

    with Engine.load("cpu/h3-mini") as engine:
        engine.generate(Request("a red apple")).save("apple.png")

The same calls serve any layout: what draws is this process, or others that it started (`workers`).
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from portable_dit import DEFAULT_RECIPE
from portable_dit.errors import PortableDitError, RecipeError, RequestError
from portable_dit.plan import Plan
from portable_dit.recipe import Recipe
from portable_dit.request import ReferenceSource, Request, ResolvedRequest
from portable_dit.result import Event, Outcome, Queued, Result
from portable_dit.setup import Setup, fetch, set_up
from portable_dit.workers import RankReport, Workers, start_workers


def generate(
    prompt: str,
    *,
    references: Sequence[ReferenceSource] = (),
    size: tuple[int, int] | None = None,
    seed: int = 0,
    images: int = 1,
    recipe: Recipe | str | Path = DEFAULT_RECIPE,
) -> Result:
    """Pictures in one line, with the built-in model unless a recipe says otherwise.

    Loads the model anew each time; for more than a few calls, keep an `Engine`.
    """
    request = Request(prompt, references=references, size=size, seed=seed, images=images)
    with Engine.load(recipe) as engine:
        return engine.generate(request)


class Engine:
    """A loaded model. Make it with `Engine.load`; each replica of it draws one call's requests at a time."""

    def __init__(self, setup: Setup, workers: Workers) -> None:
        self.setup = setup
        self.workers: Workers | None = workers
        self.places = workers.replicas  # how many requests are drawn at once
        self._free = threading.BoundedSemaphore(self.places)
        self._closing = threading.Lock()  # two that each took some of all places would wait for each other
        self._callers: set[int] = set()  # threads that wait for their pictures
        self._process = os.getpid()

    @classmethod
    def load(
        cls,
        recipe: Recipe | Setup | str | Path = DEFAULT_RECIPE,
        overrides: Mapping[str, Any] | None = None,
        *,
        strict: bool = False,
        on_component: Callable[[str], None] = lambda name: None,
        on_bytes: Callable[[str, int, int], None] = lambda name, done, total: None,
    ) -> Engine:
        """The engine for a recipe (its name, its file, or itself), or for what `set_up` decided before.

        Whatever is wrong with the recipe is refused before a byte of weights is read. strict: a wish that
        could only be met with a change is refused too. on_component: told the name of each component as it
        loads. on_bytes: told how much of it was read, and how much there is. Weights on a hub are downloaded
        first, if they are not here.
        """
        if isinstance(recipe, Setup) and (overrides or (strict and not recipe.strict)):
            raise RecipeError("overrides and strict: a set-up is decided already. Give them to set_up.")
        setup = recipe if isinstance(recipe, Setup) else set_up(recipe, overrides, strict=strict)
        setup = fetch(setup)
        return cls(setup, start_workers(setup, on_component=on_component, on_bytes=on_bytes))

    @property
    def plan(self) -> Plan:
        return self.setup.plan

    @property
    def reports(self) -> tuple[RankReport, ...]:
        """What each process of the layout loaded; empty when this one does it all."""
        return self._ready().reports

    @property
    def leads(self) -> bool:
        """False in a process of several whose results hold no pictures, since another has them (torchrun)."""
        return self._ready().leads

    def generate(
        self,
        request: Request | ResolvedRequest | str,
        *,
        on_event: Callable[[Event], None] = lambda event: None,
        cancelled: Callable[[], bool] = lambda: False,
        previews: bool = False,
    ) -> Result:
        """The pictures of a request.

        on_event: told what `stream` would yield, on this thread, while the drawing goes on. cancelled: asked
        before each step or more often, not always on this thread; CancelledError is raised when it says yes.
        previews: steps carry a small picture each, at the cost of a small decode. Ctrl-C, or an error in
        on_event, is raised at once; what is being drawn stops after the step it is in, and the engine can
        draw again.
        """
        (outcome,) = self.generate_all(
            [request],
            on_event=lambda place, event: on_event(event),
            cancelled=lambda place: cancelled(),
            previews=[previews],
        )
        if isinstance(outcome, PortableDitError):
            try:
                raise outcome
            finally:
                del outcome  # else it would hold itself through this frame
        return outcome

    def generate_all(
        self,
        requests: Sequence[Request | ResolvedRequest | str],
        *,
        on_event: Callable[[int, Event], None] = lambda place, event: None,
        cancelled: Callable[[int], bool] = lambda place: False,
        previews: Sequence[bool] | None = None,
    ) -> tuple[Outcome, ...]:
        """What becomes of each of several requests: its result, or the error that `generate` would raise.

        Images of one shape are denoised side by side, as many as the recipe's `batch` allows, where that
        changes no bit of any. on_event, cancelled: as for `generate`, with the place of a request among them.
        previews: for each. What goes wrong with more than one request is raised.
        """
        if isinstance(requests, str):
            raise RequestError(f"requests: a list is needed, such as [{requests!r}], and not one prompt.")
        if previews is not None and len(previews) != len(requests):
            raise RequestError(f"previews: {len(previews)} for {len(requests)} requests. Say one for each.")
        checked = [self._checked(request) for request in requests]
        right = {place: one for place, one in enumerate(checked) if isinstance(one, ResolvedRequest)}
        drawn = self._draw(right, on_event, cancelled, previews) if right else {}
        return tuple(
            one if isinstance(one, PortableDitError) else drawn[place] for place, one in enumerate(checked)
        )

    def _draw(
        self,
        requests: Mapping[int, ResolvedRequest],
        on_event: Callable[[int, Event], None],
        cancelled: Callable[[int], bool],
        previews: Sequence[bool] | None,
    ) -> dict[int, Outcome]:
        """What becomes of requests that are right, by their place among all."""
        self._ready()  # before a place is waited for, which may never be free in a fork
        places = list(requests)
        for place in places:
            on_event(place, Queued())
        with self._alone():
            outcomes = self._ready().draw(
                [requests[place] for place in places],
                lambda k, event: on_event(places[k], event),
                lambda k: cancelled(places[k]),
                [previews is not None and previews[place] for place in places],
            )
        return dict(zip(places, outcomes, strict=True))

    def stream(self, request: Request | ResolvedRequest | str, *, previews: bool = False) -> Iterator[Event]:
        """The events of a request as they happen, the result in the last. Closing the iterator cancels it.

        A request that breaks a rule raises here, before the first event.
        """
        return self._stream(self._resolved(request), previews)

    def _stream(self, request: ResolvedRequest, previews: bool) -> Iterator[Event]:
        events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        stop = threading.Event()

        with ThreadPoolExecutor(1, thread_name_prefix="stream") as pool:
            drawing = pool.submit(
                self.generate, request, on_event=events.put, cancelled=stop.is_set, previews=previews
            )
            drawing.add_done_callback(lambda done: events.put(None))
            try:
                while (event := events.get()) is not None:
                    yield event
                drawing.result()
            finally:
                stop.set()

    def close(self) -> None:
        """Lets go of the model and gives its memory back; the engine cannot draw any more."""
        if self._process != os.getpid():
            return  # what was loaded is the other process's
        with self._closing, self._alone(places=self.places):
            workers, self.workers = self.workers, None
        if workers is not None:
            workers.close()

    @contextmanager
    def _alone(self, places: int = 1) -> Iterator[None]:
        """A place to draw in; a request that is made while another's event is told would wait for itself."""
        me = threading.get_ident()
        if me in self._callers:
            raise PortableDitError(
                "this engine is drawing, and was called from inside on_event. Call it when generate is done."
            )
        with ExitStack() as held:
            for _ in range(places):
                self._free.acquire()
                held.callback(self._free.release)
            self._callers.add(me)
            held.callback(self._callers.discard, me)
            yield

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _resolved(self, request: Request | ResolvedRequest | str) -> ResolvedRequest:
        if isinstance(request, ResolvedRequest):
            self.setup.require_fit(request)
            return request
        if not isinstance(request, Request | str):
            raise RequestError(f"request: a Request or a prompt is needed, not {type(request).__name__}.")
        return self.setup.resolve(Request(request) if isinstance(request, str) else request)

    def _checked(self, request: Request | ResolvedRequest | str) -> ResolvedRequest | PortableDitError:
        try:
            return self._resolved(request)
        except PortableDitError as error:
            return error

    def _ready(self) -> Workers:
        if self.workers is None:
            raise PortableDitError("this engine is closed. Load another with Engine.load.")
        if self._process != os.getpid():
            raise PortableDitError(
                "another process loaded this engine, and this fork of it has neither its threads nor its "
                "device. Load an engine in each process, after the fork."
            )
        return self.workers
