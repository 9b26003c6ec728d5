"""The image VAE: a convolutional encoder and a ViT decoder, run over overlapping tiles.

Checkpoints store the encoder's kernels for video, 3x3x3 and causal in time. On one frame only the last
temporal tap meets anything but zeros, so the loader keeps that tap and the encoder here is a plain 2-D one:
the same numbers at a third of the work.

Tiles all have one size, so they go through the network as batches. Neighbours are blended where they overlap.

Letters: B batch, h w latent cells, H W pixels, S tokens of a tile, C channels, N heads, D head_dim.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from portable_dit.masks import NO_MASK
from portable_dit.models.h3_image.config import VAEConfig
from portable_dit.models.spec import TILE_BATCH, TileRunner
from portable_dit.models.tiling import TileAxis, tile_axis
from portable_dit.ops import Attention, CastingNorm, HeadNormRotary, Rotary, ScaledResidual, SwiGLU
from portable_dit.tiles import blend_tiles, cut_tiles, run_tiles

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def conv3x3(c_in: int, c_out: int) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, 3, padding=1, padding_mode="reflect")


class ResBlock(nn.Module):
    """Norm, SiLU, conv, twice, plus the input."""

    def __init__(self, c_in: int, c_out: int, config: VAEConfig) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(config.norm_num_groups, c_in, eps=config.norm_eps)
        self.conv1 = conv3x3(c_in, c_out)
        self.norm2 = nn.GroupNorm(config.norm_num_groups, c_out, eps=config.norm_eps)
        self.conv2 = conv3x3(c_out, c_out)
        self.nin_shortcut = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv1(F.silu(self.norm1(x)))
        out = self.conv2(F.silu(self.norm2(out)))
        return out + (x if self.nin_shortcut is None else self.nin_shortcut(x))


class Downsample(nn.Module):
    """Half the size: a strided conv after one reflected row and column at the bottom and the right."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(F.pad(x, (0, 1, 0, 1), mode="reflect"))
        return out


class Stage(nn.Module):
    """Res blocks of one width, then perhaps half the size."""

    def __init__(self, c_in: int, c_out: int, config: VAEConfig, *, halves: bool) -> None:
        super().__init__()
        widths = [c_in] + [c_out] * (config.layers_per_block - 1)
        self.block = nn.ModuleList(ResBlock(width, c_out, config) for width in widths)
        self.downsample = Downsample(c_out) if halves else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        return x if self.downsample is None else self.downsample(x)


class Encoder(nn.Module):
    """Pixels [B, 3, H, W] -> [B, 2 * latent_channels, h, w]."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        widths = config.block_out_channels
        self.conv_in = conv3x3(3, widths[0])
        self.down = nn.ModuleList(
            Stage(widths[max(i - 1, 0)], width, config, halves=i < config.downsample_stages)
            for i, width in enumerate(widths)
        )
        self.norm_out = nn.GroupNorm(config.norm_num_groups, widths[-1], eps=config.norm_eps)
        self.conv_out = conv3x3(widths[-1], 2 * config.latent_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for stage in self.down:
            x = stage(x)
        out: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return out


class DecoderAttention(nn.Module):
    """Attention with weightless query and key norms. to_qkv rows are [all q ; all k ; all v]."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        heads, self.head_dim = config.decoder_num_attention_heads, config.decoder_attention_head_dim
        self.to_qkv = nn.Linear(config.decoder_hidden_size, 3 * heads * self.head_dim)
        self.q_norm = HeadNormRotary(self.head_dim, config.decoder_norm_eps, has_weight=False)
        self.k_norm = HeadNormRotary(self.head_dim, config.decoder_norm_eps, has_weight=False)
        self.attend = Attention(heads, self.head_dim)
        self.to_out = nn.Linear(heads * self.head_dim, config.decoder_hidden_size)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, -1, self.head_dim)).unbind(2)  # [B, S, N, D] each
        out: Tensor = self.attend(self.q_norm(q, rotary), self.k_norm(k, rotary), v, NO_MASK)
        out = self.to_out(out.flatten(2))
        return out


class FeedForward(nn.Module):
    """Gated feed-forward. w1 rows are [gate ; up]."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        inner = config.decoder_ffn_mult * config.decoder_hidden_size
        self.w1 = nn.Linear(config.decoder_hidden_size, 2 * inner)
        self.act = SwiGLU()
        self.w2 = nn.Linear(inner, config.decoder_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(self.act(self.w1(x)))
        return out


class DecoderBlock(nn.Module):
    """Pre-norm block with layer scales.

    The residual stream, norms and scales are float32; the linears have the dtype.
    """

    def __init__(self, config: VAEConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.residual = ScaledResidual()
        self.norm1 = CastingNorm(config.decoder_hidden_size, config.decoder_norm_eps, dtype)
        self.attn = DecoderAttention(config).to(dtype)
        self.scale1 = nn.Parameter(torch.zeros(config.decoder_hidden_size))
        self.norm2 = CastingNorm(config.decoder_hidden_size, config.decoder_norm_eps, dtype)
        self.ff = FeedForward(config).to(dtype)
        self.scale2 = nn.Parameter(torch.zeros(config.decoder_hidden_size))

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = self.residual(x, self.attn(self.norm1(x), rotary), self.scale1)
        out: Tensor = self.residual(x, self.ff(self.norm2(x)), self.scale2)
        return out


class Decoder(nn.Module):
    """Latents of one tile [B, C, h, w] -> pixels [B, 3, H, W]: a token for each cell, a patch for each token.

    Register tokens and one token of zeros join at the end of the sequence, at position zero, and leave before
    the patches are made. refine, where the config has it, corrects what whole patches cannot: pixels across
    their borders.
    """

    def __init__(self, config: VAEConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        width = config.decoder_hidden_size
        self.x_embedder = nn.Linear(config.latent_channels, width)
        self.register_tokens = nn.Parameter(torch.zeros(1, config.decoder_num_register_tokens, width))
        self.transformer_blocks = nn.ModuleList(
            DecoderBlock(config, dtype) for _ in range(config.decoder_num_layers)
        )
        self.norm_out = nn.LayerNorm(width, eps=config.decoder_norm_eps)
        self.proj_out = nn.Linear(width, 3 * config.ratio**2)
        self.refine = _refine(config.refine_channels) if config.refine_channels else None

    def forward(self, z: Tensor) -> Tensor:
        batch, _, h, w = z.shape
        patch = self.config.ratio
        x = self.x_embedder(z.flatten(2).transpose(1, 2))  # [B, h * w, C]
        registers = self.register_tokens.to(x.dtype).expand(batch, -1, -1)
        x = torch.cat([x, registers, torch.zeros_like(x[:, :1])], dim=1)  # [B, S, C]
        rotary = self.rotary(h, w, x.device)
        for block in self.transformer_blocks:
            x = block(x, rotary)
        x = self.proj_out(self.norm_out(x)[:, : h * w])  # [B, h * w, 3 * p * p]
        x = x.reshape(batch, h, w, 3, patch, patch)
        pixels: Tensor = x.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)  # [B, 3, H, W]
        if self.refine is not None:
            pixels = pixels + F.pixel_shuffle(self.refine(F.pixel_unshuffle(pixels, 2)), 2)
        return pixels

    def rotary(self, h: int, w: int, device: torch.device) -> Rotary:
        """Angles of a tile's cells, -1..1 across the tile, then zeros for the other tokens: [1, S, pairs]."""
        config = self.config
        per_axis = config.rope_pairs // config.rope_axes
        frequencies = 1.0 / config.rope_theta ** (
            torch.arange(per_axis, dtype=torch.float32, device=device) / per_axis
        )
        sides = [1] * (config.rope_axes - 2) + [h, w]
        axes = [2 * (torch.arange(0.5, n, dtype=torch.float32, device=device) / n) - 1 for n in sides]
        cells = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)  # [h * w, axes]
        cells = F.pad(cells, (0, 0, 0, config.decoder_num_register_tokens + 1))  # [S, axes]
        angles = (2 * math.pi * cells[..., None] * frequencies).flatten(-2)[None]  # [1, S, pairs] float32
        return Rotary(angles.cos().to(self.dtype), angles.sin().to(self.dtype))


def _refine(channels: int) -> nn.Sequential:
    """Three convs at half size. The last starts at zero, so that an untrained tail changes nothing."""
    tail = nn.Sequential(
        conv3x3(12, channels), nn.SiLU(), conv3x3(channels, channels), nn.SiLU(), conv3x3(channels, 12)
    )
    last = tail[4]
    assert isinstance(last, nn.Conv2d)
    assert last.bias is not None
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return tail


class ImageVAE(nn.Module):
    """Pixels to normalised latents and back.

    dtype: of the linears in the decoder's blocks; the rest stays float32.
    """

    def __init__(self, config: VAEConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        channels = config.latent_channels
        self.encoder = Encoder(config)
        self.quant_conv = nn.Conv2d(2 * channels, 2 * channels, 1)
        self.post_quant_conv = nn.Conv2d(channels, channels, 1)
        self.decoder = Decoder(config, dtype)

    def normalize_pixels(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] in 0..1 -> ImageNet-normalised."""
        return (pixels - _channels(IMAGENET_MEAN, pixels)) / _channels(IMAGENET_STD, pixels)

    def denormalize_pixels(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] ImageNet-normalised -> 0..1, not clamped."""
        return pixels * _channels(IMAGENET_STD, pixels) + _channels(IMAGENET_MEAN, pixels)

    def normalize_latents(self, z: Tensor) -> Tensor:
        """[B, C, h, w] as the encoder gives them -> as the transformer sees them."""
        return (z - _channels(self.config.latents_mean, z)) / _channels(self.config.latents_std, z)

    def denormalize_latents(self, latents: Tensor) -> Tensor:
        """[B, C, h, w] as the transformer sees them -> as the decoder takes them."""
        return latents * _channels(self.config.latents_std, latents) + _channels(
            self.config.latents_mean, latents
        )

    def encode_tile(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """One tile each, ImageNet-normalised [B, 3, H, W] -> mean and log variance, [B, C, h, w] each."""
        mean, logvar = self._moments(pixels).chunk(2, dim=1)
        return mean, logvar.clamp(-30.0, 20.0)

    def decode_tile(self, z: Tensor) -> Tensor:
        """One tile each, [B, C, h, w] -> ImageNet-normalised [B, 3, H, W]."""
        pixels: Tensor = self.decoder(self.post_quant_conv(z))
        return pixels

    def encode(self, pixels: Tensor, *, max_tiles: int = TILE_BATCH) -> Tensor:
        """uint8 [B, H, W, 3] -> normalised latents float32 [B, C, h, w]. Sides are multiples of the ratio."""
        x = self.normalize_pixels(pixels.permute(0, 3, 1, 2).float() / 255)
        rows, columns = self._axes(x.shape[-2], x.shape[-1])
        ratio = self.config.ratio
        tiles = cut_tiles(x, rows, columns)
        flat = run_tiles(self._moments, tiles.flatten(0, 2), max_tiles)
        moments = flat.view(*tiles.shape[:3], *flat.shape[1:])
        mean, logvar = blend_tiles(moments, rows // ratio, columns // ratio).chunk(2, dim=1)
        return self.normalize_latents(self._posterior(mean, logvar.clamp(-30.0, 20.0)))

    def decode(self, latents: Tensor, *, max_tiles: int = TILE_BATCH, run: TileRunner = run_tiles) -> Tensor:
        """Normalised latents float32 [B, C, h, w] -> values in 0 .. 1 and a little beyond, [B, 3, H, W].

        run: calls the network on the tiles.
        """
        return self.denormalize_pixels(
            self.decode_pixels(self.denormalize_latents(latents), max_tiles=max_tiles, run=run)
        )

    def decode_pixels(self, z: Tensor, *, max_tiles: int = TILE_BATCH, run: TileRunner = run_tiles) -> Tensor:
        """Raw latents [B, C, h, w] -> ImageNet-normalised [B, 3, H, W], tiled and blended."""
        ratio = self.config.ratio
        rows, columns = self._axes(z.shape[-2] * ratio, z.shape[-1] * ratio)
        tiles = cut_tiles(z, rows // ratio, columns // ratio)
        decoded = run(self.decode_tile, tiles.flatten(0, 2), max_tiles)
        return blend_tiles(decoded.reshape(*tiles.shape[:3], *decoded.shape[1:]), rows, columns)

    def _moments(self, pixels: Tensor) -> Tensor:
        moments: Tensor = self.quant_conv(self.encoder(pixels))
        return moments

    def _axes(self, height: int, width: int) -> tuple[TileAxis, TileAxis]:
        config = self.config
        rows, columns = (
            tile_axis(side, tile=config.tile_size, overlap=config.tile_overlap, step=config.ratio)
            for side in (height, width)
        )
        return rows, columns

    def _posterior(self, mean: Tensor, logvar: Tensor) -> Tensor:
        """The latent that a picture stands for. A sample is one CPU draw, kept to float16, as the original
        does.
        """
        if self.config.posterior == "mode":
            return mean
        generator = torch.Generator("cpu").manual_seed(self.config.posterior_seed)
        noise = torch.randn(mean.shape, generator=generator, dtype=torch.float32).to(mean.device)
        return (mean + torch.exp(0.5 * logvar) * noise).half().float()


def _channels(values: tuple[float, ...], like: Tensor) -> Tensor:
    """One value for each channel, as [C, 1, 1] float32."""
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None, None]
