"""The decoder of HunyuanImage-3.0's autoencoder, for still pictures.

It is a video decoder: its convolutions span three frames, two of its upsamplings double the time, and one
latent frame becomes four, of which the last is the picture. Nothing of that can be dropped, since every norm
takes its statistics over all frames; but what is multiplied by the zeros around a clip can. With one frame
only the middle tap of a kernel acts, so those layers are 2-D and hold that tap alone; with two frames a frame
meets two taps, with four the outer ones do; and behind the last norm only what the last frame sees is
computed. That is 82 instead of 104.6 TFLOP for 1024x1024, and the same numbers.

Frames lie outside channels, so that the frames which a kernel sees are one run of channels and need no copy.
Convolutions run in the module's dtype, norms in float32.

Letters: B batch, T frames, C channels, h w cells of a level.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from portable_dit.models.hunyuan_image_3.config import VAEConfig
from portable_dit.ops import Attention, FrameNorm

NORM_EPS = 1e-6
MIDDLE, ALL, BEFORE_AND_HERE = (1,), (0, 1, 2), (0, 1)  # taps of a kernel


class FrameConv(nn.Module):
    """A 3x3x3 convolution with zeros around, on a clip: [B, T, in, h, w] -> [B, T, out, h, w].

    taps: those of its kernel that ever meet a frame; weight: [out, taps * in, 3, 3], time outermost.
    """

    def __init__(self, in_channels: int, out_channels: int, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.taps = taps
        self.weight = nn.Parameter(torch.zeros(out_channels, len(taps) * in_channels, 3, 3))
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        frames = x.shape[1]
        if self.taps == MIDDLE:
            assert frames == 1
            return self._frame(x, self.weight)[:, None]
        made = []
        for frame in range(frames):
            first, last = max(frame - 1, 0), min(frame + 2, frames)
            start = (first - (frame - 1)) * self.in_channels
            weight = self.weight[:, start : start + (last - first) * self.in_channels]
            made.append(self._frame(x[:, first:last], weight))
        return torch.stack(made, dim=1)

    def last(self, x: Tensor) -> Tensor:
        """The last frame alone: [B, T, in, h, w] -> [B, out, h, w]."""
        return self._frame(x[:, -len(self.taps) :] if self.taps != MIDDLE else x, self.weight)

    def _frame(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x.flatten(1, 2), weight, self.bias, padding=1)  # [B, out, h, w]


class ResBlock(nn.Module):
    """Two norms and convolutions beside a plain path."""

    def __init__(self, channels: int, groups: int, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.norm1 = FrameNorm(channels, groups, NORM_EPS)
        self.conv1 = FrameConv(channels, channels, taps)
        self.norm2 = FrameNorm(channels, groups, NORM_EPS)
        self.conv2 = FrameConv(channels, channels, taps)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.conv2(self.norm2(self.conv1(self.norm1(x))))
        return out


class MidAttention(nn.Module):
    """Attention with one head over all cells of the one frame there is."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm = FrameNorm(channels, groups, NORM_EPS)
        self.q = nn.Linear(channels, channels)
        self.k = nn.Linear(channels, channels)
        self.v = nn.Linear(channels, channels)
        self.attend = Attention(1, channels)
        self.proj_out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x, activate=False)[:, 0].flatten(2).transpose(1, 2)  # [B, h * w, C]
        q, k, v = (layer(rows)[:, :, None] for layer in (self.q, self.k, self.v))  # [B, h * w, 1, C]
        seen = self.proj_out(self.attend(q, k, v)[:, :, 0]).transpose(1, 2)  # [B, C, h * w]
        out: Tensor = x + seen.reshape(x.shape)
        return out


class Middle(nn.Module):
    """What the latents pass before any upsampling."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.block_1 = ResBlock(channels, groups, MIDDLE)
        self.attn_1 = MidAttention(channels, groups)
        self.block_2 = ResBlock(channels, groups, MIDDLE)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block_2(self.attn_1(self.block_1(x)))
        return out


class Upsample(nn.Module):
    """Twice as high and wide, and `times` as long: what a convolution made, plus the input repeated."""

    def __init__(self, in_channels: int, out_channels: int, times: int, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.times = times
        self.repeats = 4 * times * out_channels // in_channels
        self.conv = FrameConv(in_channels, 4 * times * out_channels, taps)

    def forward(self, x: Tensor) -> Tensor:
        out = spread(self.conv(x), self.times)
        return out + spread(x.repeat_interleave(self.repeats, dim=2), self.times)


def spread(x: Tensor, times: int) -> Tensor:
    """Channels ordered (time, row, column, channel) to where they belong.

    [B, T, times * 4 * C, h, w] -> [B, times * T, C, 2h, 2w].
    """
    batch, frames, _, h, w = x.shape
    x = x.view(batch, frames, times, 2, 2, -1, h, w).permute(0, 1, 2, 5, 6, 3, 7, 4)
    return x.reshape(batch, frames * times, -1, 2 * h, 2 * w)


class Level(nn.Module):
    """Residual blocks at one size, and the way to the next."""

    def __init__(self, config: VAEConfig, level: int) -> None:
        super().__init__()
        channels, frames = config.levels[level], config.frames(level)
        taps = MIDDLE if frames == 1 else ALL
        groups, count = config.norm_num_groups, config.layers_per_block + 1
        self.block = nn.ModuleList(ResBlock(channels, groups, taps) for _ in range(count))
        self.upsample = None
        if 2**level < config.ffactor_spatial:
            times = config.frames(level + 1) // frames
            self.upsample = Upsample(channels, config.levels[level + 1], times, taps)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        return x if self.upsample is None else self.upsample(x)


class Decoder(nn.Module):
    """Latents of one picture, unscaled, to its pixels in -1 .. 1: [B, C, h, w] -> [B, 3, 16h, 16w]."""

    def __init__(self, config: VAEConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        first, groups = config.levels[0], config.norm_num_groups
        self.conv_in = FrameConv(config.latent_channels, first, MIDDLE)
        self.mid = Middle(first, groups)
        self.up = nn.ModuleList(Level(config, level) for level in range(len(config.levels)))
        self.norm_out = FrameNorm(config.levels[-1], groups, NORM_EPS)
        last = BEFORE_AND_HERE if config.frames(len(config.levels)) > 1 else MIDDLE
        self.conv_out = FrameConv(config.levels[-1], config.out_channels, last)
        self.to(dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.conv_in.weight.dtype

    def forward(self, latents: Tensor) -> Tensor:
        x = latents.to(self.dtype)[:, None]  # [B, 1, C, h, w]
        x = self.conv_in(x) + x.repeat_interleave(self.config.levels[0] // x.shape[2], dim=2)
        x = self.mid(x)
        for level in self.up:
            x = level(x)
        return self.conv_out.last(self.norm_out(x))
