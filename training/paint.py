"""Pictures from the engine, as the gates want them: what ships is measured where users meet it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from portable_dit.engine import Engine
from portable_dit.evaluation.builtin.cases import Case, as_tensor
from portable_dit.evaluation.builtin.scenes import Record
from portable_dit.request import Request
from training.gates import draw
from training.render import Atlas


def paint(
    engine: Engine, prompt: str, references: Sequence[np.ndarray] = (), *, size: tuple[int, int], seed: int
) -> Tensor:
    """One picture, float32 [3, H, W] in 0..1. references: uint8 [H, W, 3]."""
    request = Request(prompt, references=tuple(references), size=size, seed=seed)
    return as_tensor(engine.generate(request).images[0].pixels)


def paint_cases(engine: Engine, cases: Sequence[Case], *, size: int) -> Tensor:
    """float32 [B, 3, size, size]; the seed is the number at the end of a case's id."""
    pictures = [
        paint(
            engine,
            case.record.caption,
            case.references,
            size=(size, size),
            seed=int(case.id.rpartition("-")[2]),
        )
        for case in cases
    ]
    return torch.stack(pictures)


@dataclass(frozen=True)
class EnginePainter:
    """Draws records with a loaded engine: callable as training.gates wants it; the seed is the place."""

    engine: Engine
    atlas: Atlas

    def __call__(self, records: Sequence[Record], size: int) -> Tensor:
        pictures = torch.zeros(len(records), 3, size, size)
        for place, record in enumerate(records):
            exact = draw(record.references, self.atlas, size) if record.references else ()
            references = [as_pixels(image) for image in exact]
            pictures[place] = paint(self.engine, record.caption, references, size=(size, size), seed=place)
        return pictures


def as_pixels(image: Tensor) -> np.ndarray:
    """float [3, H, W] in 0..1 -> uint8 [H, W, 3]."""
    pixels = (image.cpu().float().clamp(0, 1) * 255).round().to(torch.uint8)
    return np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())
