"""How a long side is covered by overlapping tiles. Torch-free.

The tile geometry is part of the model: the published look is the tiled one, and other tiles give other
pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class TileAxis:
    """Tiles of one size along one side, in pixels or latent cells.

    overlaps[i] lies between tiles i and i + 1.
    """

    starts: tuple[int, ...]
    size: int
    overlaps: tuple[int, ...]

    def __floordiv__(self, ratio: int) -> TileAxis:
        """The same tiles in latent cells of `ratio` pixels."""
        return TileAxis(
            tuple(start // ratio for start in self.starts),
            self.size // ratio,
            tuple(overlap // ratio for overlap in self.overlaps),
        )


def tile_axis(length: int, *, tile: int, overlap: int, step: int) -> TileAxis:
    """The fewest tiles of `tile` that cover `length` with at least `overlap` between neighbours.

    What the last tile would stick out is added to the overlaps in turns of `step`, so that every border stays
    on a latent cell. A side that fits in one tile is one tile of its own length. All in pixels.
    """
    if tile >= length:
        return TileAxis((0,), length, ())
    count = max(ceil(length / tile), ceil((length - overlap) / (tile - overlap)))
    rounds = (tile * count - overlap * (count - 1) - length) // step
    overlaps = [overlap] * (count - 1)
    for turn in range(rounds):
        overlaps[turn % (count - 1)] += step
    starts = [0]
    for shared in overlaps:
        starts.append(starts[-1] + tile - shared)
    return TileAxis(tuple(starts), tile, tuple(overlaps))
