"""The order in which scaled products of blocks of 32 want their scales, and the way back.

A scale matrix [rows, blocks] is padded with zeros to multiples of 128 x 4 and cut into tiles of that size,
tile after tile along the rows. Inside a tile the four 32-row groups lie side by side: row r, column c stand
at (r % 32) * 16 + (r // 32) * 4 + c. Swizzled twice gives noise and no error, so only packed weights are
swizzled and a checkpoint never is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = 128, 4
GROUPS = 4  # of rows, side by side in a tile


def padded_shape(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of the scale matrix with the tiles' padding."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def swizzle(scales: Tensor) -> Tensor:
    """One-byte scales [rows, columns] -> flat [padded rows * padded columns] in the order of the product."""
    rows, columns = padded_shape(*scales.shape)
    plain = scales.contiguous().view(torch.uint8)
    plain = F.pad(plain, (0, columns - plain.shape[1], 0, rows - plain.shape[0]))
    tiles = plain.view(
        rows // TILE_ROWS, GROUPS, TILE_ROWS // GROUPS, columns // TILE_COLUMNS, TILE_COLUMNS
    )  # [tile row, group, row, tile column, column]
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def unswizzle(flat: Tensor, rows: int, columns: int) -> Tensor:
    """What `swizzle` made from scales [rows, columns], back in plain order."""
    padded_rows, padded_columns = padded_shape(rows, columns)
    tiles = flat.view(torch.uint8).view(
        padded_rows // TILE_ROWS,
        padded_columns // TILE_COLUMNS,
        TILE_ROWS // GROUPS,
        GROUPS,
        TILE_COLUMNS,
    )
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_columns)
    return plain[:rows, :columns].contiguous().view(flat.dtype)
