"""Tiles: equal pieces of one picture, cut, run through a network in batches of one shape, and blended.

Letters: B batch, C channels, H W pixels or latent cells.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from portable_dit.models.spec import batch_size
from portable_dit.models.tiling import TileAxis


def run_tiles(network: Callable[[Tensor], Tensor], tiles: Tensor, most: int) -> Tensor:
    """The network over tiles [count, ...], at most `most` at once; a `models.spec.TileRunner`.

    All batches have one shape, so that one captured graph serves them; the last is filled up with copies of
    its own last tile, which are thrown away.
    """
    size = batch_size(len(tiles), most)
    batches = list(torch.split(tiles, size))
    missing = size - len(batches[-1])
    if missing:
        batches[-1] = torch.cat([batches[-1], batches[-1][-1:].expand(missing, *tiles.shape[1:])])
    return torch.cat([network(batch) for batch in batches])[: len(tiles)]


def cut_tiles(x: Tensor, rows: TileAxis, columns: TileAxis) -> Tensor:
    """[B, C, H, W] -> [num_rows, num_columns, B, C, tile_h, tile_w]."""
    bands = [x[..., start : start + rows.size, :] for start in rows.starts]
    tiles = [torch.stack([b[..., start : start + columns.size] for start in columns.starts]) for b in bands]
    return torch.stack(tiles)


def blend_tiles(tiles: Tensor, rows: TileAxis, columns: TileAxis) -> Tensor:
    """[num_rows, num_columns, B, C, tile_h, tile_w] -> [B, C, H, W], cross-faded where tiles overlap.

    A tile fades into the unfaded tile above it, then into the unfaded one at its left.
    """
    if not rows.overlaps and not columns.overlaps:
        return tiles[0, 0]
    faded = tiles.clone()
    for i, overlap in enumerate(rows.overlaps):
        fade = _fade(overlap, tiles)[:, None]  # [overlap, 1]
        above = tiles[i, ..., -overlap:, :]
        faded[i + 1, ..., :overlap, :] = above * (1 - fade) + tiles[i + 1, ..., :overlap, :] * fade
    for j, overlap in enumerate(columns.overlaps):
        fade = _fade(overlap, tiles)  # [overlap]
        left = tiles[:, j, ..., -overlap:]
        faded[:, j + 1, ..., :overlap] = left * (1 - fade) + faded[:, j + 1, ..., :overlap] * fade
    bands = []
    for i, height in enumerate(_kept(rows)):
        parts = [faded[i, j, ..., :height, :width] for j, width in enumerate(_kept(columns))]
        bands.append(torch.cat(parts, dim=-1))
    return torch.cat(bands, dim=-2)


def _kept(axis: TileAxis) -> list[int]:
    """How much of each tile is kept: all but what its successor draws."""
    return [axis.size - overlap for overlap in (*axis.overlaps, 0)]


def _fade(overlap: int, like: Tensor) -> Tensor:
    """Weights of the later tile, 0 -> 1 without the end: [overlap]."""
    return torch.arange(overlap, device=like.device, dtype=like.dtype) / overlap
