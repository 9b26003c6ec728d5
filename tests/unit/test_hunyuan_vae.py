"""HunyuanImage-3.0's picture decoder: the golden, and that what it leaves out changes nothing."""

from dataclasses import replace

import hunyuan_golden as golden
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from portable_dit.models.hunyuan_image_3.checkpoint import fold_taps
from portable_dit.models.hunyuan_image_3.model import from_centre
from portable_dit.models.hunyuan_image_3.names import taps_of, vae_decoder_tensors
from portable_dit.models.hunyuan_image_3.vae import Decoder, FrameConv, spread
from portable_dit.ops import FrameNorm
from portable_dit.pixels import to_pixels


def latents() -> Tensor:
    return (golden.formula(60, 600) * 3.4).float().reshape(1, 4, 3, 5)


@pytest.fixture(scope="module")
def stored() -> dict[str, Tensor]:
    return golden.values(vae_decoder_tensors(golden.VAE))


@torch.no_grad()
def test_the_decoder_gives_the_golden_picture():
    picture = golden.decoder()(latents())
    assert picture.shape == (1, 3, 48, 80)
    first = torch.tensor([-0.000808, 0.001126, 0.177273, -0.096953, 0.142572, -0.077624])
    last = torch.tensor([0.204199, 0.027897, 0.089801, -0.260861, 0.038938, -0.148075])
    assert torch.allclose(picture[0, 0, 0, :6], first, rtol=0, atol=1e-4)
    assert torch.allclose(picture[0, 2, 47, -6:], last, rtol=0, atol=1e-4)
    assert picture.mean().item() == pytest.approx(-0.0137060, abs=1e-5)
    assert picture.std().item() == pytest.approx(0.3608268, abs=1e-5)


@pytest.mark.parametrize("frames", [1, 2, 3, 4])
@torch.no_grad()
def test_a_convolution_without_the_taps_that_meet_zeros_is_the_whole_one(frames):
    generator = torch.Generator().manual_seed(frames)
    kernel = torch.randn(5, 3, 3, 3, 3, generator=generator, dtype=torch.float64)
    bias = torch.randn(5, generator=generator, dtype=torch.float64)
    clip = torch.randn(2, 3, frames, 6, 7, generator=generator, dtype=torch.float64)  # [B, C, T, h, w]
    whole = F.conv3d(clip, kernel, bias, padding=1)
    taps = (1,) if frames == 1 else (0, 1, 2)
    layer = FrameConv(3, 5, taps).double()
    layer.weight.data, layer.bias.data = fold_taps(kernel, taps), bias
    assert torch.allclose(layer(clip.transpose(1, 2)).transpose(1, 2), whole, rtol=0, atol=1e-12)
    if frames > 1:
        end = FrameConv(3, 5, (0, 1)).double()
        end.weight.data, end.bias.data = fold_taps(kernel, (0, 1)), bias
        assert torch.allclose(end.last(clip.transpose(1, 2)), whole[:, :, -1], rtol=0, atol=1e-12)


def test_the_loader_keeps_only_the_taps_that_act():
    config = golden.VAE
    assert taps_of("conv_in.weight", config) == taps_of("mid.block_1.conv1.weight", config) == (1,)
    assert (
        taps_of("up.0.block.2.conv2.weight", config) == taps_of("up.0.upsample.conv.weight", config) == (1,)
    )
    assert taps_of("up.1.block.0.conv1.weight", config) == (0, 1, 2)
    assert taps_of("conv_out.weight", config) == (0, 1)
    sizes = {name: parameter.shape for name, parameter in golden.decoder().named_parameters()}
    assert sizes["mid.block_1.conv1.weight"] == (128, 128, 3, 3)
    assert sizes["up.2.block.0.conv1.weight"] == (64, 3 * 64, 3, 3)
    assert sizes["conv_out.weight"] == (3, 2 * 32, 3, 3)


@torch.no_grad()
def test_the_decoder_is_the_video_decoder_on_one_latent_frame(stored):
    """A plain rendering of the published network, every tap and every frame in it."""
    picture = golden.decoder()(latents())
    assert (_video_decoder(stored, latents())[:, :, -1] - picture).abs().max() < 2e-5


@torch.no_grad()
def test_a_norm_in_chunks_is_the_norm_at_once(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    clip = torch.randn(1, 4, 32, 6, 5, generator=generator)
    norm = FrameNorm(32, 8, 1e-6)
    norm.weight.data.normal_(generator=generator)
    norm.bias.data.normal_(generator=generator)
    flat = clip.transpose(1, 2)  # [B, C, T, h, w]
    wanted = F.group_norm(flat, 8, norm.weight, norm.bias, 1e-6).transpose(1, 2)
    for most in (512 << 20, 4 * clip.numel() // 2, 1):
        monkeypatch.setattr("portable_dit.ops.CHUNK_BYTES", most)
        assert torch.allclose(norm(clip, activate=False), wanted, rtol=0, atol=2e-6)
        assert torch.allclose(norm(clip), F.silu(wanted), rtol=0, atol=2e-6)


@torch.no_grad()
def test_half_precision_convolutions_stay_near_the_picture():
    """float16 keeps 11 bits; through 40 layers of it the picture stays within a level or two of 255."""
    small = replace(golden.VAE, block_out_channels=(8, 8, 16, 16, 16), norm_num_groups=4)
    exact, half, z = golden.decoder(small), golden.decoder(small).half(), latents()[:, :, :2, :2]
    off = to_pixels(from_centre(half(z)[0])).int() - to_pixels(from_centre(exact(z)[0])).int()
    assert half.dtype is torch.float16
    assert off.abs().max() <= 2


def test_pixels_are_rounded_and_clamped():
    values = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0, 1 / 255])[None, None].expand(3, 1, -1)
    assert to_pixels(from_centre(values))[0, :, 0].tolist() == [0, 0, 128, 255, 255, 128]


def test_channels_are_spread_over_time_rows_and_columns_with_the_channel_fastest():
    x = torch.arange(2 * 2 * 2 * 3).float()[None, None, :, None, None]  # [B, T, times * 4 * C, 1, 1]
    out = spread(x, 2)
    assert out.shape == (1, 2, 3, 2, 2)
    assert out[0, 0, :, 0, 0].tolist() == [0, 1, 2]
    assert out[0, 0, :, 0, 1].tolist() == [3, 4, 5]
    assert out[0, 0, :, 1, 0].tolist() == [6, 7, 8]
    assert out[0, 1, :, 0, 0].tolist() == [12, 13, 14]


def _video_decoder(stored: dict[str, Tensor], z: Tensor) -> Tensor:
    """[B, C, h, w] -> [B, 3, 4, 16h, 16w] with 3-D convolutions in [B, C, T, h, w]."""

    def conv(name: str, x: Tensor, padding: int = 1) -> Tensor:
        return F.conv3d(x, stored[f"decoder.{name}.weight"], stored[f"decoder.{name}.bias"], padding=padding)

    def norm(name: str, x: Tensor) -> Tensor:
        return F.group_norm(x, 32, stored[f"decoder.{name}.weight"], stored[f"decoder.{name}.bias"], 1e-6)

    def block(name: str, x: Tensor) -> Tensor:
        hidden = conv(f"{name}.conv1", F.silu(norm(f"{name}.norm1", x)))
        return x + conv(f"{name}.conv2", F.silu(norm(f"{name}.norm2", hidden)))

    def attention(name: str, x: Tensor) -> Tensor:
        hidden = norm(f"{name}.norm", x)
        q, k, v = (conv(f"{name}.{part}", hidden, 0).flatten(2) for part in "qkv")  # [B, C, cells]
        weights = (q.transpose(1, 2) @ k * q.shape[1] ** -0.5).softmax(-1)
        return x + conv(f"{name}.proj_out", (v @ weights.transpose(1, 2)).view(x.shape), 0)

    def unfold(x: Tensor, times: int) -> Tensor:
        batch, _, frames, h, w = x.shape
        x = x.view(batch, times, 2, 2, -1, frames, h, w).permute(0, 4, 5, 1, 6, 2, 7, 3)
        return x.reshape(batch, -1, frames * times, 2 * h, 2 * w)

    x = z[:, :, None]
    x = conv("conv_in", x) + x.repeat_interleave(128 // 4, dim=1)
    x = block("mid.block_2", attention("mid.attn_1", block("mid.block_1", x)))
    for level, channels in enumerate((128, 128, 64, 64, 32)):
        for number in range(3):
            x = block(f"up.{level}.block.{number}", x)
        if level < 4:
            made, times = conv(f"up.{level}.upsample.conv", x), 2 if level < 2 else 1
            shortcut = x.repeat_interleave(made.shape[1] // channels, dim=1)
            x = unfold(made, times) + unfold(shortcut, times)
    return conv("conv_out", F.silu(norm("norm_out", x)))


def test_a_decoder_without_time_is_plain():
    """A checkpoint whose autoencoder never knew video has one frame everywhere."""
    config = replace(golden.VAE, ffactor_temporal=1)
    assert {taps_of(name.removeprefix("decoder."), config) for name in vae_decoder_tensors(config)} == {(1,)}
    with torch.no_grad():
        assert Decoder(config)(latents()).shape == (1, 3, 48, 80)
