"""Rotation of neighbouring channels by a Hadamard matrix, which spreads outliers before numbers are rounded.

The matrix is the regular one, a Kronecker power of a 4 x 4 matrix: symmetric and orthogonal, so rotating
again takes it back, and rotating both input and weight of a product changes nothing. Source: ConvRot, arXiv
2512.03673.

Letters: M rows, K channels.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def rotate(x: Tensor, size: int) -> Tensor:
    """x float32 [M, K], every `size` neighbouring channels rotated together. Its own inverse.

    size: a power of four that divides K. Sums have one order and factors are powers of two, so that every
    device gives the same bits, which a matrix product would not.
    """
    # Scaled first, so that no sum of large numbers overflows on the way.
    out: Tensor = x.reshape(-1, size) * size**-0.5
    for stride in _strides(size):
        four = out.view(-1, size // (4 * stride), 4, stride)
        first, second, third, fourth = four.unbind(2)
        total = ((first + second) + (third + fourth)).unsqueeze(2)
        out = (total - 2 * four.flip(2)).view(-1, size)
    return out.view(x.shape)


def hadamard(size: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """The matrix behind `rotate`, [K, K]; its entries, +-1 / sqrt(K), are exact in any float dtype."""
    return _hadamard(size).to(device=device, dtype=dtype)


def _strides(size: int) -> list[int]:
    strides = []
    stride = 1
    while stride < size:
        strides.append(stride)
        stride *= 4
    return strides


@lru_cache(maxsize=4)
def _hadamard(size: int) -> Tensor:
    return rotate(torch.eye(size), size)
