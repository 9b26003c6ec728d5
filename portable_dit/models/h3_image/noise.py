"""The noise of a request: a little on each reference, and what the picture starts from.

Letters: C latent channels, h w latent cells.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Shape = tuple[int, int, int]  # C, h, w


def reference_noises(
    shapes: Sequence[Shape], seed: int, *, convention: str
) -> tuple[list[Tensor], torch.Generator]:
    """The noise of each reference, float32 [1, C, h, w], and the generator for the target's.

    "fresh", as the original does: for every picture a new generator with the request's seed, drawn for one
    frame more than there are references, of which the first is used; so the values depend on the count.
    "running", as diffusers does: one generator draws them in order, and then the target's.
    """
    running, noises = torch.Generator("cpu").manual_seed(seed), []
    fresh = convention == "fresh"
    for channels, h, w in shapes:
        generator = torch.Generator("cpu").manual_seed(seed) if fresh else running
        frames = 1 + len(shapes) if fresh else 1
        noises.append(torch.randn((1, channels, frames, h, w), generator=generator)[:, :, 0])
    return noises, running


def target_noise(shape: Shape, references: Sequence[Shape], seed: int, *, convention: str) -> Tensor:
    """What a picture starts from: float32 [1, C, h, w], the same on every device."""
    _, generator = reference_noises(references, seed, convention=convention)
    return torch.randn((1, *shape), generator=generator)
