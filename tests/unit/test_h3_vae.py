"""The image VAE and its tiles; its numbers against another library are in tests/parity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from h3_tiny import VAE, randomize, without_refine
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from portable_dit.models.h3_image.config import VAEConfig
from portable_dit.models.h3_image.vae import ImageVAE, ResBlock
from portable_dit.models.spec import batch_size
from portable_dit.models.tiling import TileAxis, tile_axis
from portable_dit.pixels import to_pixels
from portable_dit.tiles import blend_tiles, cut_tiles, run_tiles


def tiny(config: VAEConfig = VAE) -> ImageVAE:
    model = ImageVAE(config).eval()
    randomize(model)
    return model


def pixels(height: int, width: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, height, width, 3), dtype=torch.uint8, generator=generator)


def test_the_full_vae_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = ImageVAE(VAEConfig())
    # Files hold three temporal taps of every 3 x 3 kernel of the encoder; we keep the last.
    taps = {name: 3 if name.startswith("encoder") and p.ndim == 4 and p.shape[-1] == 3 else 1
            for name, p in model.named_parameters()}  # fmt: skip
    assert sum(p.numel() * taps[name] for name, p in model.named_parameters()) == 584_228_408


@pytest.mark.parametrize(
    ("length", "count", "last", "overlaps"),
    [
        (256, 1, 0, ()),
        (512, 3, 256, (128, 128)),
        (768, 4, 512, (96, 80, 80)),
        (1024, 5, 768, (64,) * 4),
        (2048, 11, 1792, (80,) * 8 + (64,) * 2),
        (4096, 21, 3840, (64,) * 20),
    ],
)
def test_tiles_lie_where_the_family_puts_them(
    length: int, count: int, last: int, overlaps: tuple[int, ...]
) -> None:
    axis = tile_axis(length, tile=256, overlap=64, step=16)
    assert (len(axis.starts), axis.starts[-1], axis.overlaps) == (count, last, overlaps)


@given(cells=st.integers(1, 400), tile=st.integers(2, 20), overlap=st.integers(1, 19))
def test_tiles_cover_a_side_with_enough_overlap_on_whole_cells(cells: int, tile: int, overlap: int) -> None:
    overlap = min(overlap, tile - 1)
    axis = tile_axis(16 * cells, tile=16 * tile, overlap=16 * overlap, step=16)
    ends = [start + axis.size for start in axis.starts]
    assert axis.starts[0] == 0
    assert ends[-1] == 16 * cells
    assert all(number % 16 == 0 for number in (*axis.starts, *axis.overlaps, axis.size))
    for end, start, shared in zip(ends[:-1], axis.starts[1:], axis.overlaps, strict=True):
        assert end - start == shared >= 16 * overlap
    if len(axis.starts) > 1:  # one tile fewer could not keep the overlap
        fewer = len(axis.starts) - 1
        assert fewer * tile - overlap * (fewer - 1) < cells


@pytest.mark.parametrize(("height", "width"), [(64, 64), (64, 112), (112, 80), (160, 128)])
def test_cutting_and_blending_alone_change_nothing(height: int, width: int) -> None:
    x = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))
    rows, columns = (tile_axis(side, tile=64, overlap=16, step=16) for side in (height, width))
    cut = cut_tiles(x, rows, columns)
    tiles = run_tiles(lambda batch: batch, cut.flatten(0, 2), 3).unflatten(0, cut.shape[:3])
    assert torch.allclose(blend_tiles(tiles, rows, columns), x, atol=1e-6)


def test_a_tile_fades_into_its_neighbour_without_a_step() -> None:
    """Tiles of different grey: from one to the next in equal small steps, no seam at either end."""
    rows, columns = (tile_axis(side, tile=64, overlap=16, step=16) for side in (64, 112))
    greys = torch.arange(2.0).view(1, 2, 1, 1, 1, 1).expand(1, 2, 1, 1, 64, 64)
    row = blend_tiles(greys, rows, columns)[0, 0, 0]
    assert (row.diff() >= 0).all()
    assert row.diff().max() <= 1 / 16 + 1e-6
    assert row[:48].max() == 0
    assert row[64:].min() == 1


@torch.no_grad()
def test_the_batch_size_of_tiles_does_not_change_the_picture() -> None:
    model, x = tiny(), pixels(112, 160)
    latents = model.encode(x, max_tiles=1)
    assert torch.allclose(model.encode(x, max_tiles=5), latents, atol=1e-5)
    raw = model.denormalize_latents(latents)
    assert torch.allclose(
        model.decode_pixels(raw, max_tiles=1), model.decode_pixels(raw, max_tiles=5), atol=1e-4
    )


@torch.no_grad()
def test_pictures_of_a_batch_do_not_see_each_other() -> None:
    model = tiny()
    first, second = pixels(96, 64, seed=1), pixels(96, 64, seed=2)
    both = model.encode(torch.cat([first, second]))
    assert torch.allclose(both[:1], model.encode(first), atol=1e-5)
    assert torch.allclose(both[1:], model.encode(second), atol=1e-5)


@torch.no_grad()
def test_the_flat_encoder_equals_a_causal_volume_encoder_on_one_frame() -> None:
    """One res block as the files mean it: 3 x 3 x 3 kernels behind two frames of zeros."""
    block = ResBlock(4, 8, VAE)
    randomize(block)
    volumes = {name: torch.randn(conv.out_channels, conv.in_channels, 3, 3, 3)
               for name, conv in (("conv1", block.conv1), ("conv2", block.conv2))}  # fmt: skip
    for name, volume in volumes.items():
        getattr(block, name).weight.copy_(volume[:, :, -1])

    def causal(x: torch.Tensor, name: str) -> torch.Tensor:
        frames = F.pad(x[:, :, None], (1, 1, 1, 1, 0, 0), mode="reflect")
        frames = F.pad(frames, (0, 0, 0, 0, 2, 0))
        return F.conv3d(frames, volumes[name], getattr(block, name).bias)[:, :, 0]

    x = torch.randn(1, 4, 12, 12)
    assert block.nin_shortcut is not None
    hidden = causal(F.silu(block.norm1(x)), "conv1")
    expected = causal(F.silu(block.norm2(hidden)), "conv2") + block.nin_shortcut(x)
    assert torch.allclose(block(x), expected, atol=1e-4)


@torch.no_grad()
def test_an_untrained_tail_changes_nothing_and_a_trained_one_does() -> None:
    with_tail, without = ImageVAE(VAE), ImageVAE(without_refine(VAE))
    randomize(without)
    missing = with_tail.load_state_dict(without.state_dict(), strict=False).missing_keys
    assert sorted({name.rsplit(".", 1)[0] for name in missing}) == [f"decoder.refine.{i}" for i in (0, 2, 4)]
    z = torch.randn(1, 24, 4, 4)
    assert torch.equal(with_tail.decode_tile(z), without.decode_tile(z))
    randomize(with_tail.decoder.refine)
    assert not torch.allclose(with_tail.decode_tile(z), without.decode_tile(z))


@torch.no_grad()
def test_a_sampled_posterior_is_the_same_every_time_and_kept_to_float16() -> None:
    model = tiny(replace(VAE, posterior="sample"))
    x = pixels(64, 64)
    first = model.encode(x)
    torch.manual_seed(5)
    assert torch.equal(model.encode(x), first)
    raw = model.denormalize_latents(first)
    assert torch.allclose(raw, raw.half().float(), atol=1e-5)
    assert not torch.allclose(first, tiny().encode(x), atol=1e-3)


@torch.no_grad()
def test_pixels_are_bytes_in_rows_of_rgb() -> None:
    model = tiny()
    out = to_pixels(model.decode(torch.randn(2, 24, 6, 8)))
    assert out.shape == (2, 96, 128, 3)
    assert out.dtype == torch.uint8
    normalised = model.normalize_pixels(torch.rand(1, 3, 8, 8))
    assert torch.allclose(model.normalize_pixels(model.denormalize_pixels(normalised)), normalised, atol=1e-5)


@torch.no_grad()
def test_low_precision_blocks_keep_the_picture() -> None:
    high, low = tiny(), ImageVAE(VAE, torch.bfloat16)
    low.load_state_dict(high.state_dict())
    z = torch.randn(1, 24, 4, 4)
    error = (high.decode_tile(z) - low.decode_tile(z)).norm() / high.decode_tile(z).norm()
    assert 0 < error < 0.03


@given(count=st.integers(1, 500), most=st.integers(1, 64))
def test_batches_of_tiles_are_as_equal_as_memory_allows(count: int, most: int) -> None:
    size = batch_size(count, most)
    assert 1 <= size <= max(min(count, most), 1)
    waste = -(-count // size) * size - count
    assert waste <= -(-count // most) * most - count or count <= most


def test_the_tiles_of_large_squares_waste_nothing() -> None:
    assert batch_size(121, 16) == 11
    assert batch_size(441, 16) == 9
    assert batch_size(25, 16) == 13


@torch.no_grad()
def test_every_batch_that_the_network_sees_has_one_shape() -> None:
    vae = tiny()
    shapes = []

    def run(network: Callable[[Tensor], Tensor], tiles: Tensor, most: int) -> Tensor:
        def watched(batch: Tensor) -> Tensor:
            shapes.append(batch.shape)
            return network(batch)

        return run_tiles(watched, tiles, most)

    latents = torch.randn(1, 24, 14, 20)
    vae.decode(latents, max_tiles=4, run=run)
    assert len(shapes) > 1
    assert len(set(shapes)) == 1


@torch.no_grad()
def test_every_tile_contributes_to_the_picture() -> None:
    """Tiles that each give a grey of their own: every one of them shows somewhere, alone or in a blend."""
    size, overlap = 64, 16
    axis = tile_axis(256, tile=size, overlap=overlap, step=16)
    count = len(axis.starts)
    for tile in range(count * count):
        tiles = torch.zeros(count, count, 1, 1, size, size)
        tiles[tile // count, tile % count] = 1.0
        picture = blend_tiles(tiles, axis, axis)
        assert picture.max() == 1.0
        rows, columns = picture[0, 0].nonzero().T
        assert rows.min() >= axis.starts[tile // count]
        assert columns.max() < axis.starts[tile % count] + size


@pytest.mark.parametrize("side", [512, 768, 1024, 2048, 4096])
def test_a_smooth_latent_decodes_without_steps_at_tile_borders(side: int) -> None:
    """A decoder that gets every tile a little wrong, as real ones do: too bright at one edge, too dark at the
    other. In the picture no pixel differs from its neighbour by more than inside one tile and a fade.
    """
    axis = tile_axis(side, tile=256, overlap=64, step=16)
    smooth = torch.linspace(0, 1, side)
    error = torch.linspace(-0.1, 0.1, 256)
    row = torch.stack([smooth[start : start + axis.size] + error for start in axis.starts])
    tiles = row[None, :, None, None, None, :].expand(1, -1, 1, 1, 8, -1)
    flat = TileAxis((0,), 8, ())
    picture = blend_tiles(tiles, flat, axis)[0, 0, 0]
    steps = picture.diff().abs()
    inside = 1 / (side - 1) + 0.2 / 255
    fade = 0.2 / min(axis.overlaps)
    assert min(axis.overlaps) >= 64
    assert steps.max() <= inside + fade
