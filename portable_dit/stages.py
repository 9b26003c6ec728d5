"""The stages of a loaded model, and requests on their way through them, of which one is the ordinary case.

Text encoder, preparation, denoise loop, VAE and file encoding run one after the other, except that the files
of images are encoded while the next are drawn. Images of one shape, of one request or of several, are
denoised side by side, as many as the recipe's `batch` allows, where that changes no bit of any (`batches`);
all else is done for each alone. So a picture does not depend on its mates, only its time does.

Letters: B batch, C channels, h w latent cells, H W pixels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from portable_dit.drawing import KEPT, Drawing, memory_explained
from portable_dit.errors import DeviceMemoryError, PictureError, PortableDitError, RequestError
from portable_dit.image import Pixels, resize
from portable_dit.loaded import LoadedModel
from portable_dit.models.spec import Denoiser, Schedule
from portable_dit.pixels import is_finite, to_host, to_pixels
from portable_dit.request import ResolvedRequest
from portable_dit.result import Decoded, Encoded, Event, Outcome, Picture, Stepped
from portable_dit.sampling import Embedded, denoise, run_each, run_together
from portable_dit.setup import Setup
from portable_dit.trees import shape_of


def draw_all(
    setup: Setup,
    loaded: LoadedModel,
    requests: Sequence[ResolvedRequest],
    emit: Callable[[int, Event], None],
    cancelled: Callable[[int], bool],
    previews: Sequence[bool],
) -> tuple[Outcome, ...]:
    """What becomes of each request: its result, or why there is none; see `workers.Workers`.

    What goes wrong with one is its own; what goes wrong with the device, or with whoever is told, is raised.
    """
    drawings = [
        Drawing(setup, loaded, request, partial(emit, place), partial(cancelled, place), previews[place])
        for place, request in enumerate(requests)
    ]
    return pass_through(drawings)


@torch.inference_mode()
def pass_through(drawings: Sequence[Drawing]) -> tuple[Outcome, ...]:
    """What becomes of each drawing. All have one set-up and one loaded model."""
    stages = _Stages(drawings[0])
    stages.begin(drawings)
    for drawing in drawings:
        drawing.start()
    with ThreadPoolExecutor(1, thread_name_prefix="encode") as encoder:
        for images in _side_by_side(stages.encode_prompts(drawings)):
            stages.draw(images, encoder)
            for drawing in drawings:
                drawing.deliver()
        for drawing in drawings:
            drawing.deliver(wait=True)
    outcomes = tuple(drawing.outcome for drawing in drawings if drawing.outcome is not None)
    assert len(outcomes) == len(drawings)
    return outcomes


@dataclass(eq=False)
class _Image:
    """One image of a drawing. number: among the drawing's, from 0. batch, wanted: as in `Picture`."""

    drawing: Drawing
    number: int
    prompt: Any
    prepared: float = 0.0
    denoised: float = 0.0
    latents: Tensor | None = None
    step_seconds: list[float] = field(default_factory=list)
    batch: int = 1
    wanted: int = 1

    @property
    def request(self) -> ResolvedRequest:
        return self.drawing.request

    @property
    def shape(self) -> Hashable:
        """What images that may be side by side have in common; how many rows a prompt takes is known once it
        is encoded.
        """
        return self.request.shape, shape_of(self.prompt)

    @property
    def seed(self) -> int:
        return self.request.seed + self.number

    @property
    def references(self) -> list[Pixels]:
        return [reference.pixels for reference in self.request.references]


def _side_by_side(prompts: Mapping[Drawing, Any]) -> Iterator[list[_Image]]:
    """All images, those of one shape together as far as the plan of their size allows, in turn."""
    alike: dict[Hashable, list[_Image]] = {}
    for drawing, prompt in prompts.items():
        images = [_Image(drawing, number, prompt) for number in range(drawing.request.images)]
        alike.setdefault(images[0].shape, []).extend(images)
    for images in alike.values():
        most = images[0].drawing.plan.workload.batch
        for first in range(0, len(images), most):
            yield images[first : first + most]


class _Stages:
    """What all drawings have in common, and each stage for some of their images."""

    def __init__(self, drawing: Drawing) -> None:
        self.setup = drawing.setup
        self.loaded = drawing.loaded
        self.model = drawing.loaded.model
        self.mesh = drawing.mesh

    def begin(self, drawings: Sequence[Drawing]) -> None:
        """Has captured calls leave room for the text encoder beside any of these drawings."""
        self.loaded.graphs.begin(min(drawing.plan.bytes.graphs for drawing in drawings))

    def encode_prompts(self, drawings: Sequence[Drawing]) -> dict[Drawing, Any]:
        """The text states of each drawing whose prompt the encoder can take."""
        found: dict[Drawing, Any] = {}
        for drawing in drawings:
            if drawing.leave_if_cancelled("before it was begun"):
                continue
            with self._its_own([drawing], RequestError), self._stage("text_encode", drawing) as seconds:
                found[drawing] = self._encode(drawing)
            if drawing.outcome is None:
                drawing.seconds["text_encode"] = seconds[0]
                drawing.emit(Encoded(seconds[0]))
        return found

    def _encode(self, drawing: Drawing) -> Any:
        request = drawing.request
        prompt, system = request.prompt, request.system_prompt
        references = [reference.pixels for reference in request.references]
        words = prompt if system is None else f"{system}\0{prompt}"  # no request holds a NUL
        kept = self.loaded.prompts.find(words, references)
        if kept is not None:
            drawing.notes.append(KEPT)
            return kept
        with self.loaded.on_device("text_encoder"):
            states = self.loaded.with_room(lambda: self.model.encode_prompt(prompt, references, system))
        self.loaded.prompts.keep(words, references, states)
        return states

    def draw(self, images: Sequence[_Image], encoder: Executor) -> None:
        """Images of one shape from noise to their drawings, side by side if nothing is against it."""
        images = self._wanted(images)
        objection = self._draw(images, encoder) if images else None
        if objection is not None:
            for image in images:
                alone = _Image(image.drawing, image.number, image.prompt, wanted=len(images))
                if self._wanted([alone]):
                    alone.drawing.draw_apart(objection)
                if alone.drawing.outcome is None:
                    self._draw([alone], encoder)

    def _draw(self, images: Sequence[_Image], encoder: Executor) -> str | None:
        """Draws images side by side, or says what is against it; nothing is, where there is one."""
        batches, count = self.loaded.batches, len(images)
        self.loaded.graphs.next_shape(images[0].drawing.plan.bytes.graphs)
        with self._its_own(list(dict.fromkeys(image.drawing for image in images))):
            try:
                if count > 1:
                    self._compare(images)
                    objection = batches.objection(images[0].shape, count)
                    if objection is not None:
                        return objection
                denoised = self._denoise(images)
            except DeviceMemoryError:
                if count < 2 or self.mesh is not None:
                    raise
                objection = f"memory was short for {count} at once"
                batches.pause(images[0].shape, count, objection)
                return objection
            for image in denoised:
                self._finish(image, encoder)
        return None

    def _wanted(self, images: Sequence[_Image]) -> list[_Image]:
        return [image for image in images if not image.drawing.leave_if_cancelled("between two stages")]

    def _compare(self, images: Sequence[_Image]) -> None:
        """Finds out whether these images may be side by side, or some of it."""
        batches, shape, count = self.loaded.batches, images[0].shape, len(images)
        if not batches.is_open(shape, count):
            return
        request = images[0].request
        schedule = self.model.schedule(request.steps)
        with self._stage("prepare", images[0].drawing) as seconds, self.loaded.on_device("dit"):
            denoisers = [self._denoiser(image, schedule) for image in images]
            pairs = zip(denoisers, images, strict=True)
            embedded = [denoiser.embed(self._noise(image), 0) for denoiser, image in pairs]
            for _ in range(_comparisons(schedule)):
                batches.compare(shape, denoisers, embedded, self.loaded.runner(denoisers[0]))
                if not batches.is_open(shape, count) or not self._wanted(images):
                    break
        for drawing in dict.fromkeys(image.drawing for image in images):
            drawing.seconds["prepare"] += seconds[0]

    def _denoise(self, images: Sequence[_Image]) -> list[_Image]:
        """Images side by side, those that are still wanted."""
        first, scale = images[0], images[0].request.guidance_scale
        schedule, branches = self.model.schedule(first.request.steps), self.model.spec.branches(scale)
        with self.loaded.on_device("dit"):
            denoisers = [self._prepare(image, schedule) for image in images]
            batch = _Batch(self, images, denoisers, _comparisons(schedule))
            noises = [self._noise(image) for image in images]
            with self._stage("denoise", first.drawing) as seconds:
                latents = denoise(
                    denoisers,
                    noises,
                    schedule,
                    on_step=batch.tick,
                    leaves=batch.leaves,
                    run=batch.run,
                    combine=None
                    if scale is None
                    else self.loaded.combiner(branches, scale, first.request.guidance_rescale),
                )
        for drawing in dict.fromkeys(image.drawing for image in images):
            drawing.seconds["denoise"] += seconds[0]
        for place, image in enumerate(images):
            image.latents, image.denoised = latents.get(place), seconds[0]
        return [image for image in images if image.drawing.outcome is None]

    def _prepare(self, image: _Image, schedule: Schedule) -> Denoiser:
        with self._stage("prepare", image.drawing) as seconds:
            denoiser = self._denoiser(image, schedule)
        image.prepared = seconds[0]
        image.drawing.seconds["prepare"] += seconds[0]
        return denoiser

    def _denoiser(self, image: _Image, schedule: Schedule) -> Denoiser:
        request, references = image.request, image.references
        visiting = ("vae",) if references else ()
        with self.loaded.on_device(*visiting):
            return self.model.prepare(
                image.prompt,
                references,
                request.width,
                request.height,
                schedule,
                image.seed,
                tile_batch=image.drawing.plan.workload.tile_batch,
                guidance=request.guidance_scale,
                branches=self.loaded.branches(self.model.spec.branches(request.guidance_scale)),
            )

    def _noise(self, image: _Image) -> Tensor:
        request = image.request
        noise = self.model.noise(request.width, request.height, image.references, image.seed)
        return noise.to(self.setup.device.torch_device)

    def _finish(self, image: _Image, encoder: Executor) -> None:
        """One image from clean latents to its drawing, unless that has ended."""
        drawing = image.drawing
        with self._its_own([drawing], PictureError):
            self._require_finite(image.latents, "dit")
            if drawing.leave_if_cancelled("between two stages"):
                return
            pixels, seconds = self._decode(image)
            drawing.note_refused(self.loaded.graphs.refused)
            picture = None
            if pixels is not None:
                drawing.emit(Decoded(image.number, seconds))
                picture = self._picture(image, pixels, seconds)
            drawing.develop(picture, encoder)

    def _picture(self, image: _Image, pixels: Pixels, decoding: float) -> Picture:
        seconds = {"prepare": image.prepared, "denoise": image.denoised, "vae_decode": decoding}
        image.drawing.seconds["vae_decode"] += decoding
        return Picture(
            pixels,
            image.seed,
            image.drawing.record(image.seed),
            seconds,
            tuple(image.step_seconds),
            {},
            batch=image.batch,
            wanted=image.wanted,
        )

    def _decode(self, image: _Image) -> tuple[Pixels | None, float]:
        """The picture [H, W, 3] and the seconds that it took; None where this rank is not the leader."""
        if self.mesh is not None and not self.mesh.decodes:
            self._require_finite(None, "vae")
            return None, 0.0
        tile_batch = image.drawing.plan.workload.tile_batch
        with self._stage("vae_decode", image.drawing) as seconds, self.loaded.on_device("vae"):
            assert image.latents is not None
            latents, run = image.latents, self.loaded.run_tiles
            values = self.loaded.with_room(lambda: self.model.decode(latents, run=run, tile_batch=tile_batch))
            self._require_finite(values, "vae")
            if not image.drawing.leads:
                return None, 0.0
            host = to_host(to_pixels(values), pinned=self.setup.capabilities.pinned_memory)
            pixels = resize(host.numpy(), *image.request.output_size)
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

    @contextmanager
    def _its_own(self, drawings: Sequence[Drawing], *agreed: type[PortableDitError]) -> Iterator[None]:
        """What goes wrong inside ends these drawings and no other.

        agreed: errors that all ranks raise together. Want of memory is one rank's own, so that others would
        wait for it if it went on.
        """
        kinds: tuple[type[PortableDitError], ...] = agreed
        if self.mesh is None:
            kinds += (DeviceMemoryError,)
        try:
            yield
        except kinds as error:
            _let_go(error)
            for drawing in drawings:
                drawing.fail(error)

    @contextmanager
    def _stage(self, name: str, drawing: Drawing) -> Iterator[list[float]]:
        """Measures a stage into the list it gives, device work included, and explains memory errors."""
        seconds = [0.0]
        start = time.perf_counter()
        size = f" at {drawing.request.width}x{drawing.request.height}"
        with memory_explained(self.setup, name, size):
            yield seconds
            self.setup.backend.synchronize(self.setup.device)
        seconds[0] = time.perf_counter() - start


def _comparisons(schedule: Schedule) -> int:
    """How many a request waits for at most: a third of the time of its own steps, as each evaluates all of it
    twice.
    """
    return max(schedule.steps // 6, 1)


def _let_go(error: BaseException | None) -> None:
    """Frees the tensors of the lines that an error came through, which is kept longer than they should be."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class _Batch:
    """Images that are denoised in the same steps: who stays, whether side by side, and what is told of it.

    comparisons: how many may be made on the way, each time that some have left.
    """

    def __init__(
        self, stages: _Stages, images: Sequence[_Image], denoisers: Sequence[Denoiser], comparisons: int
    ) -> None:
        self.stages = stages
        self.loaded = stages.loaded
        self.images = images
        self.comparisons = comparisons
        self.steps = 0
        self.asked: set[Drawing] = set()  # before the step that is next
        self.together: dict[int, bool] = {}  # by how many are left
        self.run_blocks = self.loaded.runner(denoisers[0])
        self.last = time.perf_counter()

    def leaves(self, place: int) -> bool:
        """Whether an image is not wanted any more; each drawing is asked once before each step."""
        drawing, steps = self.images[place].drawing, self.images[place].request.steps
        if drawing not in self.asked:
            self.asked.add(drawing)
            drawing.leave_if_cancelled(f"after {self.steps} of {steps} steps")
        return drawing.outcome is not None

    def run(self, denoisers: Sequence[Denoiser], embedded: Sequence[Embedded]) -> list[Tensor]:
        """The blocks, over all images that are left, side by side if nothing is against that many."""
        count = len(denoisers)
        if count not in self.together:
            objection = None if count < 2 else self._objection(denoisers, embedded)
            self.together[count] = count > 1 and objection is None
            for image in self.images:
                if len(self.images) > 1 and image.drawing.outcome is None:
                    image.wanted, image.batch = count, count if self.together[count] else 1
                    if objection is not None:
                        note = f"batch: from step {self.steps + 1} on one at a time, since {objection}"
                        image.drawing.notes.append(note)
        return (run_together if self.together[count] else run_each)(denoisers, embedded, self.run_blocks)

    def _objection(self, denoisers: Sequence[Denoiser], embedded: Sequence[Embedded]) -> str | None:
        """What is against so many side by side, which of fewer than there were may have to be found out."""
        batches, shape, count = self.stages.loaded.batches, self.images[0].shape, len(denoisers)
        for _ in range(self.comparisons):
            if not batches.is_open(shape, count):
                break
            batches.compare(shape, denoisers, embedded, self.run_blocks)
        return batches.objection(shape, count)

    def tick(self, step: int, latents: Mapping[int, Tensor]) -> None:
        """Times a step and tells of it."""
        stages, self.steps = self.stages, step
        self.asked.clear()
        stages.setup.backend.synchronize(stages.setup.device)
        seconds = time.perf_counter() - self.last
        for place, current in latents.items():
            image = self.images[place]
            drawing = image.drawing
            image.step_seconds.append(seconds)
            preview = None
            if drawing.leads and drawing.previews and step < image.request.steps:
                with self.loaded.on_device("vae"):
                    preview = to_pixels(stages.model.preview(current)).cpu().numpy()  # [h, w, 3]
            drawing.emit(Stepped(image.number, step, image.request.steps, seconds, preview))
        for drawing in dict.fromkeys(image.drawing for image in self.images):
            drawing.deliver()
        self.last = time.perf_counter()
