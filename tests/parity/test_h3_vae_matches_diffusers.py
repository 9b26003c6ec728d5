"""Our image VAE against diffusers' `AutoencoderKLMiniMaxH3` on one frame, float32, every parameter random."""

from __future__ import annotations

import pytest
import torch
from h3_pairs import vae_pair
from torch import Tensor

from portable_dit.pixels import to_pixels


def close(ours: Tensor, theirs: Tensor) -> None:
    scale = theirs.abs().max()
    assert scale > 0.1, "the comparison would be silent"
    assert (ours - theirs).abs().max() < 1e-5 * max(float(scale), 1.0)


def picture(height: int, width: int) -> Tensor:
    return torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_an_untiled_encoding_equals_diffusers_on_one_frame() -> None:
    theirs, ours = vae_pair()
    theirs.use_tiling = False
    x = picture(32, 48)
    expected = theirs._encode_clip(x[:, :, None])[:, :, 0]
    close(
        torch.cat(ours.encode_tile(x), dim=1), torch.cat([expected[:, :4], expected[:, 4:].clamp(-30, 20)], 1)
    )


@torch.no_grad()
def test_an_untiled_decoding_equals_diffusers_on_one_frame() -> None:
    theirs, ours = vae_pair()
    theirs.use_tiling = False
    z = torch.randn(2, 4, 6, 10, generator=torch.Generator().manual_seed(4))
    close(ours.decode_tile(z), theirs._decode_clip(z[:, :, None])[:, :, 0])


@pytest.mark.parametrize(("height", "width"), [(64, 96), (80, 132), (64, 64)])
@torch.no_grad()
def test_tiled_pictures_equal_diffusers(height: int, width: int) -> None:
    theirs, ours = vae_pair()
    z = torch.randn(1, 4, height // 4, width // 4, generator=torch.Generator().manual_seed(5))
    close(ours.decode_pixels(z, max_tiles=3), theirs._decode_clip(z[:, :, None])[:, :, 0])


@torch.no_grad()
def test_a_tiled_encoding_equals_diffusers_with_its_sampled_posterior() -> None:
    theirs, ours = vae_pair()
    pixels = torch.randint(
        0, 256, (1, 80, 72, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(6)
    )
    x = ours.normalize_pixels(pixels.permute(0, 3, 1, 2).float() / 255)
    posterior = theirs.encode(x[:, :, None]).latent_dist
    sample = posterior.sample(generator=torch.Generator().manual_seed(42))[:, :, 0]
    mean, std = (
        torch.tensor(values).view(1, 4, 1, 1)
        for values in (theirs.config.latents_mean, theirs.config.latents_std)
    )
    expected = (sample.half().float() - mean) / std
    # A last-bit difference before the rounding to float16 may flip one of its bits: 2^-10 of the value.
    assert (ours.encode(pixels) - expected).abs().max() < 2**-9 * expected.abs().max()
    assert (ours.encode(pixels) - expected).abs().mean() < 1e-5


@torch.no_grad()
def test_pixels_come_back_as_bytes_within_a_rounding_of_diffusers() -> None:
    theirs, ours = vae_pair()
    latents = torch.randn(1, 4, 18, 16, generator=torch.Generator().manual_seed(7))
    raw = theirs._decode_clip(ours.denormalize_latents(latents)[:, :, None])[:, :, 0]
    expected = (ours.denormalize_pixels(raw).clamp(0, 1) * 255).permute(0, 2, 3, 1)
    assert (to_pixels(ours.decode(latents)).float() - expected).abs().max() <= 0.5 + 1e-3
