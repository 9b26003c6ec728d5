"""The pipeline profiler: how long each part of the model takes, in the log and as a Chrome trace.

The parts are those that every model has (`embed -> blocks -> head`, and the VAE), under the names that are
customary for diffusion pipelines:

    text_encoder.forward    the prompt and its references into text states
    model.forward           one evaluation of the DiT, from latents to velocity; of a batch, for each picture
    patch_embed.forward     its beginning: latents, text and time into hidden rows
    final_layer.forward     its end: hidden rows into velocity
    vae.decode              latents into pixels, all tiles

The device is waited for before and after each, so a profiled request is somewhat slower than another. Open
the trace with chrome://tracing or Perfetto.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from portable_dit.errors import OutputError
from portable_dit.models.spec import Denoiser, Model
from portable_dit.request import ResolvedRequest
from portable_dit.result import Event, Finished, Outcome
from portable_dit.setup import Setup
from portable_dit.workers.inline import ThisProcess

MAX_EVENTS = 1_000_000  # some 150 MB of trace


class Profiler:
    """Times of parts, request after request. wait: returns when the device has nothing queued."""

    def __init__(self, path: Path, wait: Callable[[], None], log: Callable[[str], None]) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"--profile {path}: cannot be written ({error.strerror}).") from error
        self._file.write("[\n]\n")
        self._wait = wait
        self._log = log
        self._start = time.perf_counter()
        self._events: list[dict[str, Any]] = []
        self._adding = threading.Lock()  # a request may end while one beside it is still measured
        self._written = 0

    @contextmanager
    def part(self, name: str, **facts: Any) -> Iterator[None]:
        """Measures what happens inside under a name."""
        self._wait()
        begin = time.perf_counter()
        yield
        self._wait()
        self.add(name, begin, time.perf_counter(), **facts)

    def now(self) -> float:
        """The time when the device has nothing queued."""
        self._wait()
        return time.perf_counter()

    def add(self, name: str, begin: float, end: float, **facts: Any) -> None:
        """An event of the trace: microseconds since the profiler started."""
        at = {"ts": round((begin - self._start) * 1e6, 1), "dur": round((end - begin) * 1e6, 1)}
        event = {"name": name, "ph": "X", "pid": os.getpid(), "tid": 1, **at, "args": facts}
        with self._adding:
            self._events.append(event)

    def end_request(self, title: str) -> None:
        """Logs a line for the request and adds its events to the file, which is whole JSON at any time.

        With those of requests beside it that have not ended. Without events it does nothing.
        """
        with self._adding:
            events, self._events = self._events, []
        if not events:
            return
        seconds: dict[str, list[float]] = {}
        for event in events:
            seconds.setdefault(event["name"], []).append(event["dur"] / 1e3)
        parts = (f"{name} {len(times)} x {sum(times) / len(times):.2f} ms" for name, times in seconds.items())
        self._log(f"profile: {title}: {', '.join(parts)}")
        if self._written < MAX_EVENTS:
            text = ",\n".join(json.dumps(event) for event in events)
            self._file.seek(self._file.seek(0, os.SEEK_END) - len("]\n"))
            self._file.write((",\n" if self._written else "") + text + "]\n")
            self._file.flush()
            self._written += len(events)

    def close(self) -> None:
        """Closes the file, which has been whole since the last request ended."""
        self._file.close()


class ProfiledProcess(ThisProcess):
    """This process as the worker of an engine, measured part by part."""

    def __init__(self, setup: Setup, profiler: Profiler, on_bytes: Callable[[str, int, int], None]) -> None:
        super().__init__(setup, on_component=lambda name: None, on_bytes=on_bytes)
        self._profiler = profiler
        assert self.loaded is not None
        self.loaded = replace(self.loaded, model=cast(Model, _ProfiledModel(self.loaded.model, profiler)))

    def draw(
        self,
        requests: Sequence[ResolvedRequest],
        emit: Callable[[int, Event], None],
        cancelled: Callable[[int], bool],
        previews: Sequence[bool],
    ) -> tuple[Outcome, ...]:
        titles = [f"{one.width}x{one.height}, {one.steps} steps" for one in requests]

        def tell(place: int, event: Event) -> None:
            if isinstance(event, Finished):
                self._profiler.end_request(titles[place])
            emit(place, event)

        try:
            return super().draw(requests, tell, cancelled, previews)
        finally:
            self._profiler.end_request("without pictures")

    def close(self) -> None:
        super().close()
        self._profiler.close()


class _ProfiledModel:
    """A model whose parts are measured; everything else is the model's own."""

    def __init__(self, model: Model, profiler: Profiler) -> None:
        self._model = model
        self._profiler = profiler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def encode_prompt(self, *arguments: Any) -> Any:
        with self._profiler.part("text_encoder.forward"):
            return self._model.encode_prompt(*arguments)

    def prepare(self, *arguments: Any, **options: Any) -> Any:
        with self._profiler.part("prepare"):
            return _ProfiledDenoiser(self._model.prepare(*arguments, **options), self._profiler)

    def decode(self, *arguments: Any, **options: Any) -> Tensor:
        with self._profiler.part("vae.decode"):
            return self._model.decode(*arguments, **options)


class _ProfiledDenoiser:
    """A denoiser whose beginning and end are measured; what lies between is the rest of model.forward."""

    def __init__(self, denoiser: Denoiser, profiler: Profiler) -> None:
        self._denoiser = denoiser
        self._profiler = profiler
        self._begin = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._denoiser, name)

    def embed(self, latents: Tensor, step: int) -> tuple[Tensor, tuple[Any, ...]]:
        self._begin = self._profiler.now()
        with self._profiler.part("patch_embed.forward", step=step + 1):
            return self._denoiser.embed(latents, step)

    def head(self, hidden: Tensor, step: int) -> Tensor:
        with self._profiler.part("final_layer.forward", step=step + 1):
            velocity = self._denoiser.head(hidden, step)
        self._profiler.add("model.forward", self._begin, time.perf_counter(), step=step + 1)
        return velocity
