"""VAE tiles over ranks: each decodes its share, and the first puts the picture together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from portable_dit.models.spec import TileRunner
from portable_dit.parallel.collectives import Group, split_evenly


@dataclass(frozen=True)
class SharedTiles:
    """Decodes this rank's share of the tiles; a `models.spec.TileRunner`.

    run: how one rank decodes tiles. On the group's first rank the result is whole; the others get zeros of
    the right shape that take no memory, since nobody looks at their picture.
    """

    group: Group
    run: TileRunner

    def __call__(self, network: Callable[[Tensor], Tensor], tiles: Tensor, most: int) -> Tensor:
        """tiles [count, ...] -> [count, ...]."""
        lengths = split_evenly(len(tiles), self.group.size)
        start = sum(lengths[: self.group.index])
        # A rank without a tile takes one that is decoded elsewhere too: exchanges need a shape.
        mine = tiles[start : start + lengths[self.group.index]] if lengths[self.group.index] else tiles[:1]
        decoded = self.run(network, mine, most)
        whole = self.group.gather_to_first(decoded[: lengths[self.group.index]], lengths)
        if whole is not None:
            return whole
        return decoded.new_zeros(()).expand(len(tiles), *decoded.shape[1:])
