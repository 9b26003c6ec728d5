"""One request as one packed sequence: [text | reference 1 | reference 2 | ... | target].

Positions are (t, h, w). Text counts up along t; every picture takes one more unit of t and has a grid of its
own in (h, w), normalised by area, so that a larger picture has a finer grid over the same span.

Letters: B batch, C latent channels, h w latent cells, L text rows, S all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from portable_dit.models.h3_image.tokens import IMAGE_TAG

PATCH = 2  # latent cells along each side of a row's patch
TARGET_TIME, REFERENCE_TIME = 0, 1
GRID_SPAN = 32.0  # of a square picture's coordinates, whatever its size


@dataclass(frozen=True)
class Packing:
    """Where and what every row is.

    positions: float64 [S, 3]; tags: int64 [S]; row_times: int64 [S], 0 = the target's time (text too), 1 =
    that of the references.
    """

    positions: Tensor
    tags: Tensor
    row_times: Tensor
    text_rows: int
    reference_rows: int
    target_rows: int


def patchify(latents: Tensor) -> Tensor:
    """Latents [B, C, h, w] -> rows [B, h/2 * w/2, 4 C], row by row.

    A row's values are ordered (channel, row, column) of its patch.
    """
    batch, channels, h, w = latents.shape
    x = latents.reshape(batch, channels, h // PATCH, PATCH, w // PATCH, PATCH)
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # [B, h/2 * w/2, 4 C]


def unpatchify(rows: Tensor, h: int, w: int) -> Tensor:
    """The inverse of `patchify`: rows [B, h/2 * w/2, 4 C] -> latents [B, C, h, w]."""
    x = rows.reshape(len(rows), h // PATCH, w // PATCH, -1, PATCH, PATCH)
    return x.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)  # [B, C, h, w]


def text_positions(length: int) -> Tensor:
    """float64 [L, 3]."""
    positions = torch.zeros(length, 3, dtype=torch.float64)
    positions[:, 0] = torch.arange(length)
    return positions


def grid_positions(h: int, w: int, t: float) -> Tensor:
    """The rows of a picture of h x w latent cells at time slot t: float64 [h/2 * w/2, 3]."""
    down, across = (_axis(cells, sqrt(h * w)) for cells in (h, w))
    grid = torch.stack(torch.meshgrid(down, across, indexing="ij"), dim=-1).flatten(0, 1)  # [rows, 2]
    return torch.cat([torch.full_like(grid[:, :1], t), grid], dim=-1)


def pack(
    text_tags: Tensor, reference_shapes: Sequence[tuple[int, int]], target_shape: tuple[int, int]
) -> Packing:
    """The layout of a request.

    text_tags: int64 [L]. Shapes are (h, w) in latent cells, references in request order.
    """
    length = len(text_tags)
    pictures = [
        grid_positions(h, w, float(length + i)) for i, (h, w) in enumerate([*reference_shapes, target_shape])
    ]
    reference_rows, target_rows = sum(len(grid) for grid in pictures[:-1]), len(pictures[-1])
    picture_rows = reference_rows + target_rows
    times = [TARGET_TIME] * length + [REFERENCE_TIME] * reference_rows + [TARGET_TIME] * target_rows
    tags = torch.cat([text_tags.cpu().long(), torch.full((picture_rows,), IMAGE_TAG)])
    return Packing(
        positions=torch.cat([text_positions(length), *pictures]),
        tags=tags,
        row_times=torch.tensor(times),
        text_rows=length,
        reference_rows=reference_rows,
        target_rows=target_rows,
    )


def _axis(cells: int, root_area: float) -> Tensor:
    """Coordinates of the patches along one side, centred, end excluded: float64 [cells / 2]."""
    share = cells / root_area
    patches = cells // PATCH
    start = (1.0 - share) / 2.0
    step = (
        (start + share) - start
    ) / patches  # numpy's linspace order of rounding, which checkpoints were trained on
    return (start + torch.arange(patches, dtype=torch.float64) * step) * GRID_SPAN
