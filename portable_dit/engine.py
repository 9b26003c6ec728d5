"""Engine: a recipe loaded once, drawing request after request.

    with Engine.load("cpu/h3-mini") as engine:
        engine.generate(Request("a red apple")).save("apple.png")

Text encoder, preparation, denoise loop, VAE and file encoding run one after the other for each image, except
that the file of one image is encoded while the next is drawn. Images of a request are drawn one at a time,
each from its own noise, so a picture does not depend on its batch mates.

Letters: B batch, C channels, h w latent cells, H W pixels.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from portable_dit import DEFAULT_RECIPE, __version__
from portable_dit.errors import (
    BackendError,
    CancelledError,
    DeviceMemoryError,
    PortableDitError,
    RecipeError,
    RequestError,
)
from portable_dit.image import Pixels, encode, resize
from portable_dit.loading import LoadedModel, Setup, fetch, load_model, set_up
from portable_dit.models.spec import COMPONENTS
from portable_dit.plan import Plan
from portable_dit.recipe import Recipe
from portable_dit.request import ReferenceSource, Request, ResolvedRequest
from portable_dit.result import (
    STAGES,
    Decoded,
    Drawn,
    Encoded,
    Event,
    Finished,
    Picture,
    Queued,
    Result,
    Started,
    Stepped,
)
from portable_dit.sampling import denoise

KEPT = "prompt: its text states were kept from an earlier request (prompt_cache_mib)"


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
    """A loaded model on one device. Make it with `Engine.load`; one request is drawn at a time."""

    def __init__(self, setup: Setup, loaded: LoadedModel) -> None:
        self.setup = setup
        self._loaded: LoadedModel | None = loaded
        self._drawing = threading.Lock()
        self._drawing_thread: int | None = None

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
        with _memory_explained(setup, "loading", ""):
            return cls(setup, load_model(setup, on_component=on_component, on_bytes=on_bytes))

    @property
    def plan(self) -> Plan:
        return self.setup.plan

    def generate(
        self,
        request: Request | ResolvedRequest | str,
        *,
        on_event: Callable[[Event], None] = lambda event: None,
        cancelled: Callable[[], bool] = lambda: False,
        previews: bool = False,
    ) -> Result:
        """The pictures of a request.

        on_event: told what `stream` would yield, on this thread. cancelled: asked before each step;
        CancelledError is raised when it says yes. previews: steps carry a small picture each, at the cost of
        a small decode.
        """
        resolved = self._resolved(request)
        on_event(Queued())
        with self._alone():
            drawing = _Drawing(self.setup, self._ready(), resolved, on_event, cancelled, previews)
            result = drawing.run()
        on_event(Finished(result))
        return result

    def stream(self, request: Request | ResolvedRequest | str, *, previews: bool = False) -> Iterator[Event]:
        """The events of a request as they happen, the result in the last. Closing the iterator cancels it.

        A request that breaks a rule raises here, before the first event.
        """
        return self._stream(self._resolved(request), previews)

    def _stream(self, request: ResolvedRequest, previews: bool) -> Iterator[Event]:
        events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        stop = threading.Event()

        with ThreadPoolExecutor(1, thread_name_prefix="drawing") as pool:
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
        with self._alone():
            loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.release()
            del loaded
            self.setup.backend.trim(self.setup.device)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One request at a time; one that is made while another's event is told would wait for itself."""
        if self._drawing_thread == threading.get_ident():
            raise PortableDitError(
                "this engine is drawing, and was called from inside on_event. Call it when generate is done."
            )
        with self._drawing:
            self._drawing_thread = threading.get_ident()
            try:
                yield
            finally:
                self._drawing_thread = None

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

    def _ready(self) -> LoadedModel:
        if self._loaded is None:
            raise PortableDitError("this engine is closed. Load another with Engine.load.")
        return self._loaded


@dataclass(frozen=True, eq=False)
class _Undeveloped:
    """An image whose file is still being encoded."""

    picture: Picture
    encoding: Future[tuple[bytes, float]] | None

    def is_ready(self) -> bool:
        return self.encoding is None or self.encoding.done()


class _Drawing:
    """One request on its way through the stages."""

    def __init__(
        self,
        setup: Setup,
        loaded: LoadedModel,
        request: ResolvedRequest,
        emit: Callable[[Event], None],
        cancelled: Callable[[], bool],
        previews: bool,
    ) -> None:
        self.setup = setup
        self.loaded = loaded
        self.model = loaded.model
        self.request = request
        self.emit = emit
        self.cancelled = cancelled
        self.previews = previews
        self.tile_batch = setup.plan_of(request).workload.tile_batch
        self.waiting: list[_Undeveloped] = []
        self.pictures: list[Picture] = []

    @torch.inference_mode()
    def run(self) -> Result:
        start = time.perf_counter()
        request = self.request
        self.emit(Started(request.images, request.steps))
        pixels = [reference.pixels for reference in request.references]
        with self._stage("text_encode") as encode_seconds:
            prompt, was_kept = self._encode(pixels)
        self.emit(Encoded(encode_seconds[0]))
        with ThreadPoolExecutor(1, thread_name_prefix="encode") as encoder:
            for image in range(request.images):
                self.waiting.append(self._draw(image, prompt, pixels, encoder))
                self.deliver()
            self.deliver(wait=True)
        seconds = {stage: sum(image.seconds.get(stage, 0.0) for image in self.pictures) for stage in STAGES}
        seconds |= {"text_encode": encode_seconds[0], "total": time.perf_counter() - start}
        plan = self.setup.plan
        return Result(
            images=tuple(self.pictures),
            seconds=seconds,
            peak_bytes=self.setup.backend.peak_bytes(self.setup.device),
            backend=plan.backend,
            device=plan.device,
            kernels=plan.kernels,
            notes=(*self._notes(), *([KEPT] if was_kept else [])),
            changes=(*self.setup.changes, *request.notes, *self._uncaptured()),
        )

    def _encode(self, references: Sequence[Pixels]) -> tuple[Any, bool]:
        """The text states of the request, and whether they were kept from an earlier one."""
        kept = self.loaded.prompts.find(self.request.prompt, references)
        if kept is not None:
            return kept, True
        with self.loaded.on_device("text_encoder"):
            states = self.model.encode_prompt(self.request.prompt, references)
        self.loaded.prompts.keep(self.request.prompt, references, states)
        return states, False

    def _draw(
        self, image: int, prompt: Any, references: Sequence[Pixels], encoder: ThreadPoolExecutor
    ) -> _Undeveloped:
        """One image from its own noise; its file is handed to the encoder's thread."""
        request, model = self.request, self.model
        seed = request.seed + image
        self._raise_if_cancelled()
        schedule = model.schedule(request.steps)
        with self.loaded.on_device("dit"):
            visiting = ("vae",) if references else ()
            with self._stage("prepare") as prepare_seconds, self.loaded.on_device(*visiting):
                size = request.width, request.height
                denoiser = model.prepare(
                    prompt, references, *size, schedule, seed, tile_batch=self.tile_batch
                )
            noise = model.noise(*size, references, seed)
            steps = _StepClock(self, image)
            with self._stage("denoise") as denoise_seconds:
                latents = denoise(
                    denoiser,
                    noise.to(self.setup.device.torch_device),
                    schedule,
                    on_step=steps.tick,
                    cancelled=self.cancelled,
                    run=self.loaded.run_blocks,
                )
            del denoiser
        self._raise_if_cancelled()
        with self._stage("vae_decode") as decode_seconds, self.loaded.on_device("vae"):
            decoded = model.decode(latents, run=self.loaded.run_tiles, tile_batch=self.tile_batch)
            pixels = resize(np.ascontiguousarray(decoded.cpu().numpy()), *request.output_size)  # [H, W, 3]
        self.emit(Decoded(image, decode_seconds[0]))
        seconds = {
            "prepare": prepare_seconds[0],
            "denoise": denoise_seconds[0],
            "vae_decode": decode_seconds[0],
        }
        picture = Picture(pixels, seed, self._record(seed), seconds, tuple(steps.seconds), {})
        if request.format is None:
            return _Undeveloped(picture, None)
        return _Undeveloped(picture, encoder.submit(_timed_encode, picture, request.format))

    def deliver(self, *, wait: bool = False) -> None:
        """Tells of every image whose file is ready, in order; with wait, of all."""
        while self.waiting and (wait or self.waiting[0].is_ready()):
            waiting = self.waiting.pop(0)
            picture = waiting.picture
            if waiting.encoding is not None:
                data, seconds = waiting.encoding.result()
                assert self.request.format is not None
                picture = replace(
                    picture,
                    encoded={self.request.format: data},
                    seconds={**picture.seconds, "encode_png": seconds},
                )
            self.pictures.append(picture)
            self.emit(Drawn(len(self.pictures) - 1, picture))

    def _record(self, seed: int) -> dict[str, Any]:
        """What goes into the file: all that decides the picture, nothing that differs between equal runs."""
        request, plan = self.request, self.setup.plan
        return {
            "version": __version__,
            "model": plan.model,
            "prompt": request.prompt,
            "seed": seed,
            "size": "{}x{}".format(*request.output_size),
            "drawn_size": f"{request.width}x{request.height}",
            "steps": request.steps,
            "guidance_scale": request.guidance_scale,
            "references": [
                {"name": Path(reference.name).name, "size": "{}x{}".format(*reference.original_size)}
                for reference in request.references
            ],
            "recipe": plan.digest,
            "backend": plan.backend,
            "device": plan.device,
            "precision": dict(plan.dtype),
            "quantization": dict(plan.formats),
            "kernels": {name: dict(plan.choices(name)) for name in COMPONENTS},
            "notes": list(self._notes()),
        }

    def _notes(self) -> tuple[str, ...]:
        request = self.request
        drawn = request.width, request.height
        resized = "size {}x{}: drawn at {}x{} and made smaller, as this model is meant to".format(
            *request.output_size, *drawn
        )
        own = request.notes if request.output_size == drawn else (resized, *request.notes)
        return (*self.setup.notes, *own, *self._uncaptured())

    def _uncaptured(self) -> tuple[str, ...]:
        """What the plan has as graphs and the backend could not capture. Strict, it is refused."""
        notes = tuple(
            f"graphs.{name}: the backend did not capture a call, which runs eagerly. Say --enforce-eager."
            for name in sorted(self.loaded.graphs.refused)
        )
        if notes and self.setup.strict:
            raise BackendError("\n".join(f"strict: {note}" for note in notes))
        return notes

    def _raise_if_cancelled(self) -> None:
        if self.cancelled():
            raise CancelledError("cancelled between two stages.")

    @contextmanager
    def _stage(self, name: str) -> Iterator[list[float]]:
        """Measures a stage into the list it gives, device work included, and explains memory errors."""
        seconds = [0.0]
        start = time.perf_counter()
        size = f" at {self.request.width}x{self.request.height}"
        with _memory_explained(self.setup, name, size):
            yield seconds
            self.setup.backend.synchronize(self.setup.device)
        seconds[0] = time.perf_counter() - start


class _StepClock:
    """Times denoise steps and tells of each."""

    def __init__(self, drawing: _Drawing, image: int) -> None:
        self.drawing = drawing
        self.image = image
        self.seconds: list[float] = []
        self._last = time.perf_counter()

    def tick(self, step: int, latents: Tensor) -> None:
        drawing = self.drawing
        drawing.setup.backend.synchronize(drawing.setup.device)
        self.seconds.append(time.perf_counter() - self._last)
        preview = None
        if drawing.previews and step < drawing.request.steps:
            with drawing.loaded.on_device("vae"):
                preview = np.ascontiguousarray(drawing.model.preview(latents).cpu().numpy())  # [h, w, 3]
        drawing.emit(Stepped(self.image, step, drawing.request.steps, self.seconds[-1], preview))
        drawing.deliver()
        self._last = time.perf_counter()


def _timed_encode(picture: Picture, format: str) -> tuple[bytes, float]:
    start = time.perf_counter()
    data = encode(picture.pixels, picture.record, format=format)
    return data, time.perf_counter() - start


@contextmanager
def _memory_explained(setup: Setup, stage: str, size: str) -> Iterator[None]:
    """Turns "out of memory" of torch or the system into what was resident and which key would make room."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        short = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
        if not short or isinstance(error, PortableDitError):
            raise
        plan, memory = setup.plan, setup.backend.memory(setup.device)
        resident = ", ".join(
            f"{name} {plan.bytes.components[name].weights / 2**20:,.0f} MiB" for name in COMPONENTS
        )
        free = (
            ""
            if memory is None
            else f" {memory[0] / 2**20:,.0f} of {memory[1] / 2**20:,.0f} MiB are free now."
        )
        advice = "Draw a smaller picture, or stop other programs on the device."
        if not setup.capabilities.host_shares_memory:
            moved = "--set offload.text_encoder=component --set offload.dit=layerwise"
            advice += f" Or move weights to the host with {moved}."
        raise DeviceMemoryError(
            f"{plan.model}{size}: out of memory during {stage} on {plan.device}. Weights: {resident}.{free} "
            f"{advice}"
        ) from error
