"""One request's drawing: what is told of it on the way, its pictures and their files, and its result.

The stages that it passes, alone or beside others, are in `stages`.

Letters: H W pixels.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from portable_dit import __version__
from portable_dit.backend import is_short_of_memory
from portable_dit.errors import (
    BackendError,
    CancelledError,
    DeviceMemoryError,
    PortableDitError,
    RequestError,
)
from portable_dit.footprint import resting
from portable_dit.image import encode
from portable_dit.loaded import LoadedModel
from portable_dit.models.spec import COMPONENTS
from portable_dit.plan import Plan
from portable_dit.request import ResolvedRequest
from portable_dit.result import STAGES, Drawn, Event, Finished, Outcome, Picture, Result, Started
from portable_dit.setup import Setup

# How torch's allocators and numpy's word it, behind what a vendor says.
ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.,]+ ?\w+)", re.IGNORECASE)
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

    outcome: its result, or why there is none; None on the way there. On several devices each rank runs the
    same drawing, and what is sent between them keeps them in step; the one that leads has the pictures.
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
        self.request = request
        self.emit = emit
        self.cancelled = cancelled
        self.previews = previews
        self.plan = setup.plan_of(request)
        self.mesh = loaded.mesh
        self.leads = loaded.mesh is None or loaded.mesh.leads
        self.outcome: Outcome | None = None
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.notes: list[str] = []  # of this drawing alone; equal pictures may differ in them
        self.changes: list[str] = []  # such notes, of a wish that was not met
        self._begun = time.perf_counter()
        self._decoded = 0
        self._no_file: PortableDitError | None = None
        self._refused: dict[str, str] = {}  # by component: why a call was not captured
        self._waiting: list[_Undeveloped] = []
        self._pictures: list[Picture] = []

    def start(self) -> None:
        self.emit(Started(self.request.images, self.request.steps))

    def note_refused(self, refused: Mapping[str, str]) -> None:
        """Takes over why calls of an image of this drawing were not captured, by component."""
        self._refused.update(refused)

    def draw_apart(self, objection: str) -> None:
        """Takes over why an image is not drawn beside others. Strict, it is refused to who wanted several
        images; who wanted one is not to suffer from whom it stood beside.
        """
        note = f"batch: drawn one at a time, since {objection}"
        if self.setup.strict and self.request.images > 1:
            problem = f"strict: {note}. Say batch=1, or one image a request."
            self.fail(RequestError(problem, [("images", problem)]))
        else:
            self.changes.append(note)

    def fail(self, error: PortableDitError) -> None:
        """There will be no result."""
        if self.outcome is None:
            self.outcome = error

    def leave_if_cancelled(self, when: str) -> bool:
        """Whether it is over, or is now since somebody wants it to stop. when: for the error.

        It is the leader's to say: ranks that stop alone leave the others waiting.
        """
        if self.outcome is None:
            wish = self.leads and self.cancelled()
            if wish if self.mesh is None else self.mesh.agree(wish):
                self.fail(CancelledError(f"cancelled {when}."))
        return self.outcome is not None

    def develop(self, picture: Picture | None, encoder: Executor) -> None:
        """Takes an image that is decoded, whose file is still to be made; None where this rank has none."""
        self._decoded += 1
        if picture is not None:
            format = self.request.format
            encoding = None if format is None else encoder.submit(_timed_encode, picture, format)
            self._waiting.append(_Undeveloped(picture, encoding))
        self.deliver()

    def deliver(self, *, wait: bool = False) -> None:
        """Tells of every image whose file is ready, in order, and of the end; with wait, of all."""
        while self._waiting and (wait or self._waiting[0].is_ready()):
            waiting = self._waiting.pop(0)
            picture = waiting.picture
            if waiting.encoding is not None:
                error = waiting.encoding.exception()
                if isinstance(error, PortableDitError):
                    self._no_file = error
                    continue
                data, seconds = waiting.encoding.result()
                assert self.request.format is not None
                picture = replace(
                    picture,
                    encoded={self.request.format: data},
                    seconds={**picture.seconds, "encode_png": seconds},
                )
                self.seconds["encode_png"] += seconds
            self._pictures.append(picture)
            self.emit(Drawn(len(self._pictures) - 1, picture))
        if self.outcome is None and self._decoded == self.request.images and not self._waiting:
            self._end()

    def _end(self) -> None:
        """All images are there. One without a file is an error now and not before, since other ranks, which
        make no files, go on.
        """
        if self._no_file is not None:
            self.fail(self._no_file)
        else:
            result = self.outcome = self._result()
            self.emit(Finished(result))

    def record(self, seed: int) -> dict[str, Any]:
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
            "notes": [*self.setup.lasting_notes, *self._request_notes(), *self._uncaptured(in_file=True)],
        }

    def _result(self) -> Result:
        plan = self.setup.plan
        return Result(
            images=tuple(self._pictures),
            seconds=self.seconds | {"total": time.perf_counter() - self._begun},
            peak_bytes=self.setup.backend.peak_bytes(self.setup.device),
            backend=plan.backend,
            device=plan.device,
            kernels=plan.kernels,
            notes=(
                *self.setup.notes,
                *self._request_notes(),
                *self._at_once(),
                *self._uncaptured(),
                *dict.fromkeys((*self.notes, *self.changes)),
                *self.loaded.graphs.let_go,
            ),
            changes=(
                *self.setup.changes,
                *self.request.notes,
                *self._uncaptured(),
                *dict.fromkeys(self.changes),
            ),
        )

    def _request_notes(self) -> tuple[str, ...]:
        request = self.request
        drawn = request.width, request.height
        resized = "size {}x{}: drawn at {}x{} and made smaller, as this model is meant to".format(
            *request.output_size, *drawn
        )
        return request.notes if request.output_size == drawn else (resized, *request.notes)

    def _at_once(self) -> tuple[str, ...]:
        """What is taken fewer at a time to fit than at the default size, by the plan of this request.

        No bit of an image depends on it, so it is not in the file.
        """
        known = self.setup.plan.notes
        return tuple(n.text for n in self.plan.notes if n.code in ("batch", "tiles") and n not in known)

    def _uncaptured(self, *, in_file: bool = False) -> tuple[str, ...]:
        """What the plan has as graphs and the backend could not capture. Strict, it is refused.

        in_file: not of the DiT, whose calls depend on how many images are side by side: equal images have
        equal files.
        """
        notes = {name: f"graphs.{name}: {reason}" for name, reason in sorted(self._refused.items())}
        if notes and self.setup.strict:
            raise BackendError("\n".join(f"strict: {note}" for note in notes.values()))
        if in_file:
            notes.pop("dit", None)
        return tuple(notes.values())


def _timed_encode(picture: Picture, format: str) -> tuple[bytes, float]:
    start = time.perf_counter()
    data = encode(picture.pixels, picture.record, format=format)
    return data, time.perf_counter() - start


@contextmanager
def memory_explained(setup: Setup, stage: str, size: str) -> Iterator[None]:
    """Turns "out of memory" of torch or the system into what was resident, what was asked for, and which key
    would make room.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_short_of_memory(error) or isinstance(error, PortableDitError):
            raise
        plan, memory = setup.plan, setup.backend.memory(setup.device)
        said = f"{plan.model}{size}: out of memory during {stage} on {plan.device}."
        if asked := ASKED.search(str(error)):
            said += f" {asked[1]} more were asked for."
        if memory is not None:
            said += f" {memory[0] / 2**20:,.0f} of {memory[1] / 2**20:,.0f} MiB are free now."
        said += f" Weights: {', '.join(_weights_of(plan, name) for name in COMPONENTS)}."
        if captured := setup.backend.graph_bytes(setup.device):
            said += f" Captured calls: {captured / 2**20:,.0f} MiB."
        said += " Draw a smaller picture, or stop other programs on the device."
        if plan.offload.resident_blocks:
            fewer = plan.offload.resident_blocks // 2
            said += f" Or keep fewer blocks on the device with --set offload.resident_blocks={fewer}."
        elif plan.offload.dit != "layerwise" and not setup.capabilities.host_shares_memory:
            moved = "--set offload.text_encoder=component --set offload.dit=layerwise"
            said += f" Or move weights to the host with {moved}."
        raise DeviceMemoryError(said) from error


def _weights_of(plan: Plan, name: str) -> str:
    """What a component has on the device while it works, and of how much."""
    size = plan.bytes.components[name]
    here, whole = (b / 2**20 for b in (resting(name, size, plan.offload, stage=name), size.weights))
    match plan.offload.of(name):
        case "none":
            return f"{name} {whole:,.0f} MiB"
        case "component":
            return f"{name} {whole:,.0f} MiB while it works"
        case _:
            return f"{name} {here:,.0f} of {whole:,.0f} MiB"
