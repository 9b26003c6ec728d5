"""Rows, tags and positions of a packed request."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from portable_dit.models.h3_image.packing import grid_positions, pack, patchify, unpatchify

EVEN = st.integers(1, 6).map(lambda n: 2 * n)


@given(channels=st.integers(1, 5), h=EVEN, w=EVEN, batch=st.integers(1, 3))
def test_unpatchify_undoes_patchify(channels: int, h: int, w: int, batch: int) -> None:
    latents = torch.arange(batch * channels * h * w, dtype=torch.float32).reshape(batch, channels, h, w)
    rows = patchify(latents)
    assert rows.shape == (batch, h * w // 4, 4 * channels)
    assert torch.equal(unpatchify(rows, h, w), latents)


def test_a_row_holds_channel_then_row_then_column_of_its_patch() -> None:
    latents = torch.arange(2 * 4 * 4, dtype=torch.float32).reshape(1, 2, 4, 4)
    assert patchify(latents)[0, 1].tolist() == [
        2,
        3,
        6,
        7,
        18,
        19,
        22,
        23,
    ]  # second patch of the first patch row


@pytest.mark.parametrize(("cells", "step", "last"), [(128, 0.5, 31.5), (256, 0.25, 31.75)])
def test_a_larger_square_has_a_finer_grid_over_the_same_span(cells: int, step: float, last: float) -> None:
    grid = grid_positions(cells, cells, 0.0)
    assert grid[0].tolist() == [0, 0, 0]
    assert grid[1].tolist() == [0, 0, step]
    assert grid[-1].tolist() == [0, last, last]
    assert grid.dtype == torch.float64


def test_positions_of_two_references_are_the_published_ones() -> None:
    packing = pack(torch.ones(5, dtype=torch.long), [(4, 8), (4, 4)], (4, 6))
    text, first, second, target = packing.positions.split([5, 8, 4, 6])
    assert text.tolist() == [[float(i), 0.0, 0.0] for i in range(5)]
    assert first[:, 0].unique().tolist() == [5.0]
    assert first[:, 1].unique().tolist() == pytest.approx([4.6863, 16], abs=1e-4)
    assert first[:, 2].unique().tolist() == pytest.approx([-6.6274, 4.6863, 16, 27.3137], abs=1e-4)
    assert second.unique(dim=0).tolist() == [[6, 0, 0], [6, 0, 16], [6, 16, 0], [6, 16, 16]]
    assert target[:, 0].unique().tolist() == [7.0]
    assert target[:, 1].unique().tolist() == pytest.approx([2.9361, 16], abs=1e-4)
    assert target[:, 2].unique().tolist() == pytest.approx([-3.5959, 9.4680, 22.5320], abs=1e-4)


@pytest.mark.parametrize("references", [0, 1, 16])
def test_text_comes_first_then_references_then_the_target(references: int) -> None:
    text_tags = torch.tensor([1, 0, 0, 1])  # the middle two were seen in a picture
    packing = pack(text_tags, [(4, 4)] * references, (4, 6))
    reference_rows = 4 * references
    assert (packing.text_rows, packing.reference_rows, packing.target_rows) == (4, reference_rows, 6)
    assert packing.tags.tolist() == [1, 0, 0, 1] + [0] * (reference_rows + 6)
    assert packing.row_times.tolist() == [0] * 4 + [1] * reference_rows + [0] * 6
    assert packing.positions[:, 0].unique().tolist() == [float(i) for i in range(4 + references + 1)]


@pytest.mark.parametrize(
    ("width", "height", "rows"),
    [(1024, 1024, 1024), (2048, 2048, 4096), (4096, 4096, 16384), (6272, 2688, 16464)],
)
def test_a_canvas_has_the_published_number_of_rows(width: int, height: int, rows: int) -> None:
    assert len(grid_positions(height // 16, width // 16, 0.0)) == rows
