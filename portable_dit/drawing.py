"""One request on its way through the stages of a loaded model.

Text encoder, preparation, denoise loop, VAE and file encoding run one after the other for each image, except
that the file of one image is encoded while the next is drawn. Images of a request are drawn one at a time,
each from its own noise, so a picture does not depend on its batch mates.

Letters: B batch, C channels, h w latent cells, H W pixels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from portable_dit import __version__
from portable_dit.errors import (
    BackendError,
    CancelledError,
    DeviceMemoryError,
    PictureError,
    PortableDitError,
)
from portable_dit.image import Pixels, encode, resize
from portable_dit.loaded import LoadedModel
from portable_dit.loading import Setup
from portable_dit.models.spec import COMPONENTS
from portable_dit.pixels import is_finite, to_host, to_pixels
from portable_dit.request import ResolvedRequest
from portable_dit.result import STAGES, Decoded, Drawn, Encoded, Event, Picture, Result, Started, Stepped
from portable_dit.sampling import denoise

KEPT = "prompt: its text states were kept from an earlier request (prompt_cache_mib)"


@dataclass(frozen=True, eq=False)
class _Undeveloped:
    """An image whose file is still being encoded."""

    picture: Picture
    encoding: Future[tuple[bytes, float]] | None

    def is_ready(self) -> bool:
        return self.encoding is None or self.encoding.done()


class Drawing:
    """One request on its way through the stages.

    On several devices each rank runs the same drawing, and what is sent between them keeps them in step; the
    one that leads has the pictures.
    """

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
        self.mesh = loaded.mesh
        self.leads = loaded.mesh is None or loaded.mesh.leads
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
                self._draw(image, prompt, pixels, encoder)
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
        prompt, system = self.request.prompt, self.request.system_prompt
        words = prompt if system is None else f"{system}\0{prompt}"  # no request holds a NUL
        kept = self.loaded.prompts.find(words, references)
        if kept is not None:
            return kept, True
        with self.loaded.on_device("text_encoder"):
            states = self.model.encode_prompt(prompt, references, system)
        self.loaded.prompts.keep(words, references, states)
        return states, False

    def _draw(
        self, image: int, prompt: Any, references: Sequence[Pixels], encoder: ThreadPoolExecutor
    ) -> None:
        """One image from its own noise; its file is handed to the encoder's thread."""
        request, model = self.request, self.model
        seed = request.seed + image
        self._raise_if_cancelled()
        schedule = model.schedule(request.steps)
        with self.loaded.on_device("dit"):
            visiting = ("vae",) if references else ()
            with self._stage("prepare") as prepare_seconds, self.loaded.on_device(*visiting):
                size = request.width, request.height
                scale = request.guidance_scale
                branches = model.spec.branches(scale)
                denoiser = model.prepare(
                    prompt,
                    references,
                    *size,
                    schedule,
                    seed,
                    tile_batch=self.tile_batch,
                    guidance=scale,
                    branches=self.loaded.branches(branches),
                )
            noise = model.noise(*size, references, seed)
            steps = _StepClock(self, image)
            with self._stage("denoise") as denoise_seconds:
                latents = denoise(
                    denoiser,
                    noise.to(self.setup.device.torch_device),
                    schedule,
                    on_step=steps.tick,
                    cancelled=self._is_cancelled,
                    run=self.loaded.runner(denoiser),
                    combine=None
                    if scale is None
                    else self.loaded.combiner(model.spec.branches(scale), scale, request.guidance_rescale),
                )
            del denoiser
        self._require_finite(latents, "dit")
        self._raise_if_cancelled()
        pixels, decode_seconds = self._decode(latents)
        if pixels is None:
            return
        self.emit(Decoded(image, decode_seconds))
        seconds = {
            "prepare": prepare_seconds[0],
            "denoise": denoise_seconds[0],
            "vae_decode": decode_seconds,
        }
        picture = Picture(pixels, seed, self._record(seed), seconds, tuple(steps.seconds), {})
        encoding = request.format and encoder.submit(_timed_encode, picture, request.format)
        self.waiting.append(_Undeveloped(picture, encoding or None))

    def _decode(self, latents: Tensor) -> tuple[Pixels | None, float]:
        """The picture [H, W, 3] and the seconds that it took; None where this rank is not the leader."""
        if self.mesh is not None and not self.mesh.decodes:
            self._require_finite(None, "vae")
            return None, 0.0
        with self._stage("vae_decode") as seconds, self.loaded.on_device("vae"):
            values = self.model.decode(latents, run=self.loaded.run_tiles, tile_batch=self.tile_batch)
            self._require_finite(values, "vae")
            if not self.leads:
                return None, 0.0
            host = to_host(to_pixels(values), pinned=self.setup.capabilities.pinned_memory)
            pixels = resize(host.numpy(), *self.request.output_size)
        return pixels, seconds[0]

    def _require_finite(self, values: Tensor | None, component: str) -> None:
        """Raises PictureError on every rank where what the leader has of a component holds NaN or infinity.

        As bytes they would be a black picture. values: None on a rank that has none.
        """
        finite = values is None or is_finite(values)
        if finite if self.mesh is None else self.mesh.agree(finite):
            return
        plan = self.setup.plan
        dtype, held = plan.dtype[component], plan.formats[component]
        advice = ["--set precision=float32"] * (dtype != "float32")
        advice += [f"no quantization.{component}"] * (held is not None)
        cause = (
            f"Numbers beyond what {held or dtype} holds do that: try {' or '.join(advice)}."
            if advice
            else "In float32 only the weights do that: see what `portable-dit weights verify` says of them."
        )
        raise PictureError(
            f"{plan.model}: what came out of the {component} holds NaN or infinity, so there is no picture. "
            f"{cause}"
        )

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
            **({"guidance_rescale": request.guidance_rescale} if request.guidance_rescale else {}),
            **({"system_prompt": request.system_prompt} if request.system_prompt else {}),
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

    def _is_cancelled(self) -> bool:
        """Whether to stop, which is the leader's to say: ranks that stop alone leave the others waiting."""
        wish = self.leads and self.cancelled()
        return wish if self.mesh is None else self.mesh.agree(wish)

    def _raise_if_cancelled(self) -> None:
        if self._is_cancelled():
            raise CancelledError("cancelled between two stages.")

    @contextmanager
    def _stage(self, name: str) -> Iterator[list[float]]:
        """Measures a stage into the list it gives, device work included, and explains memory errors."""
        seconds = [0.0]
        start = time.perf_counter()
        size = f" at {self.request.width}x{self.request.height}"
        with memory_explained(self.setup, name, size):
            yield seconds
            self.setup.backend.synchronize(self.setup.device)
        seconds[0] = time.perf_counter() - start


class _StepClock:
    """Times denoise steps and tells of each."""

    def __init__(self, drawing: Drawing, image: int) -> None:
        self.drawing = drawing
        self.image = image
        self.seconds: list[float] = []
        self._last = time.perf_counter()

    def tick(self, step: int, latents: Tensor) -> None:
        drawing = self.drawing
        drawing.setup.backend.synchronize(drawing.setup.device)
        self.seconds.append(time.perf_counter() - self._last)
        preview = None
        if drawing.leads and drawing.previews and step < drawing.request.steps:
            with drawing.loaded.on_device("vae"):
                preview = to_pixels(drawing.model.preview(latents)).cpu().numpy()  # [h, w, 3]
        drawing.emit(Stepped(self.image, step, drawing.request.steps, self.seconds[-1], preview))
        drawing.deliver()
        self._last = time.perf_counter()


def _timed_encode(picture: Picture, format: str) -> tuple[bytes, float]:
    start = time.perf_counter()
    data = encode(picture.pixels, picture.record, format=format)
    return data, time.perf_counter() - start


@contextmanager
def memory_explained(setup: Setup, stage: str, size: str) -> Iterator[None]:
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
