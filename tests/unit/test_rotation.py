"""Rotation by the regular Hadamard matrix: what it is, that it takes itself back, and what it is for."""

from __future__ import annotations

import pytest
import torch

from portable_dit.formats import decode, encode
from portable_dit.models.spec import rotated_together
from portable_dit.rotation import hadamard, rotate


@pytest.mark.parametrize("size", [1, 4, 16, 64, 256])
def test_the_matrix_is_symmetric_orthogonal_and_of_equal_entries(size):
    matrix = hadamard(size).double()
    assert torch.equal(matrix, matrix.t())
    assert torch.equal(matrix @ matrix, torch.eye(size, dtype=torch.float64))
    assert matrix.abs().unique().tolist() == [size**-0.5]
    assert torch.equal(matrix.sum(0), torch.ones(size, dtype=torch.float64))  # what makes it regular


@pytest.mark.parametrize("channels", [256, 384, 5376])
def test_rotating_is_a_product_with_the_matrix_and_takes_itself_back(channels):
    size = rotated_together(channels)
    x = torch.randn(9, channels, generator=torch.Generator().manual_seed(0))
    wanted = (x.double().view(9, -1, size) @ hadamard(size).double()).view(9, channels)
    assert (rotate(x, size) - wanted).abs().max() < 2e-6
    assert (rotate(rotate(x, size), size) - x).abs().max() < 2e-6


@pytest.mark.parametrize(
    ("channels", "size"), [(14336, 256), (5376, 256), (384, 64), (100, 4), (30, 1), (1024, 256)]
)
def test_as_many_neighbours_turn_as_divide_the_channels(channels, size):
    assert rotated_together(channels) == size


def test_an_outlier_costs_less_in_the_rotated_format():
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    weight[:, 7] *= 60  # one channel that sets every row's scale
    plain, turned = (
        (decode(encode(weight, name)) - weight).norm() for name in ("int8_row", "int8_row_rotated")
    )
    assert turned < plain / 3


def test_weights_stored_in_the_format_come_back_to_the_same_numbers():
    """So that a file in it, expanded on loading, is kept as stored when the recipe names the format."""
    stored = encode(torch.randn(64, 512, generator=torch.Generator().manual_seed(2)), "int8_row_rotated")
    again = encode(decode(stored), "int8_row_rotated")
    assert torch.equal(again.values, stored.values)
    assert stored.scales is not None
    assert again.scales is not None
    assert torch.allclose(again.scales, stored.scales, rtol=1e-6)
