"""The HunyuanImage-3.0 transformer, as far as pictures need it.

One sequence: [prefix | slots | image]. The prefix is text and causal, and nothing of it sees what comes
behind, so it runs once (`prefill`) and its keys and values are part of the condition. A denoise step runs the
slots (time; in the Distil form guidance and next time) and the image rows alone: slots are causal as well,
image rows see everything. The guidance branches differ in their prefix only and lie side by side in the
batch.

Every layer is a mixture of experts beside an MLP that all rows pass. Two convolutional blocks, told the time,
bring latents in and velocity out.

Letters: B branches, L prefix rows, S rows, C channels, N heads, D head_dim, h w latent cells, M rows of all
branches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from portable_dit.masks import Causal, CausalWithFullSpans, Mask
from portable_dit.models.hunyuan_image_3.config import NORM_GROUPS, DiTConfig
from portable_dit.ops import (
    Attention,
    Experts,
    KeyValues,
    RMSNorm,
    Rotary,
    RotaryHeadNorm,
    Router,
    SwiGLU,
)

SINUSOIDS = 256  # of a time, whatever the width
NORM_EPS = 1e-5  # of the convolutional blocks


@dataclass(frozen=True)
class Prefix:
    """Keys and values of the prefix in all layers: [layers, B, L, Nkv, D] each."""

    k: Tensor
    v: Tensor

    def of(self, layer: int) -> KeyValues:
        return KeyValues(self.k[layer], self.v[layer])


class TimeEmbedder(nn.Module):
    """Sinusoids of a number, cosines first, through an MLP: float32 [M] -> [M, C]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.proj_in = nn.Linear(SINUSOIDS, channels)
        self.proj_out = nn.Linear(channels, channels)

    def forward(self, values: Tensor) -> Tensor:
        half = SINUSOIDS // 2
        exponent = torch.arange(half, dtype=torch.float32, device=values.device) / half
        angles = values.float()[:, None] * torch.exp(-math.log(10000.0) * exponent)
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.proj_in.weight.dtype)  # [M, 256]
        out: Tensor = self.proj_out(F.gelu(self.proj_in(waves)))
        return out


class GroupNorm(nn.Module):
    """Group norm with float32 statistics and a float32 result."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x.float(), NORM_GROUPS, self.weight.float(), self.bias.float(), NORM_EPS)


class ResBlock(nn.Module):
    """Two convolutions around a norm that the time scales and shifts: [B, in, h, w] -> [B, out, h, w]."""

    def __init__(self, in_channels: int, out_channels: int, time_channels: int) -> None:
        super().__init__()
        self.in_norm = GroupNorm(in_channels)
        self.in_conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.time_proj = nn.Linear(time_channels, 2 * out_channels)
        self.out_norm = GroupNorm(out_channels)
        self.out_conv = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.skip = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """time: [1, C], of the step."""
        scale, shift = self.time_proj(F.silu(time))[:, :, None, None].chunk(2, dim=1)  # [1, out, 1, 1] each
        hidden = self.in_conv(F.silu(self.in_norm(x)).to(x.dtype))
        hidden = self.out_norm(hidden) * (1 + scale) + shift  # float32
        out: Tensor = self.skip(x) + self.out_conv(F.silu(hidden).to(x.dtype))
        return out


class PatchEmbed(nn.Module):
    """Latents to one row per cell: [B, latent channels, h, w] -> [B, h * w, C], row by row of the picture."""

    def __init__(self, config: DiTConfig, latent_channels: int) -> None:
        super().__init__()
        width = config.patch_embed_hidden_dim
        self.conv = nn.Conv2d(latent_channels, width, 3, padding=1)
        self.block = ResBlock(width, config.hidden_size, config.hidden_size)

    def forward(self, latents: Tensor, time: Tensor) -> Tensor:
        hidden: Tensor = self.block(self.conv(latents.to(self.conv.weight.dtype)), time)
        return hidden.flatten(2).transpose(1, 2)  # [B, h * w, C]


class FinalLayer(nn.Module):
    """Rows of the image to the velocity: [B, h * w, C] -> float32 [B, latent channels, h, w]."""

    def __init__(self, config: DiTConfig, latent_channels: int) -> None:
        super().__init__()
        width = config.patch_embed_hidden_dim
        self.block = ResBlock(config.hidden_size, width, config.hidden_size)
        self.norm = GroupNorm(width)
        self.conv = nn.Conv2d(width, latent_channels, 3, padding=1)

    def forward(self, rows: Tensor, time: Tensor, shape: tuple[int, int]) -> Tensor:
        grid = rows.transpose(1, 2).reshape(*rows.shape[::2], *shape)  # [B, C, h, w]
        hidden = self.norm(self.block(grid, time))
        velocity: Tensor = self.conv(F.silu(hidden).to(rows.dtype))
        return velocity.float()


class SelfAttention(nn.Module):
    """Attention with fewer key heads than query heads; qkv_proj rows are [all q ; all k ; all v].

    Rotary comes before the norm of queries and keys here.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.head_dim = config.attention_head_dim
        self.queries_per_key = config.num_attention_heads // config.num_key_value_heads
        self.qkv_proj = nn.Linear(config.hidden_size, config.qkv_size, bias=False)
        self.query_layernorm = RotaryHeadNorm(self.head_dim, config.rms_norm_eps)
        self.key_layernorm = RotaryHeadNorm(self.head_dim, config.rms_norm_eps)
        heads, keys = config.num_attention_heads, config.num_key_value_heads
        self.attend = Attention(heads, self.head_dim, num_kv_heads=keys)
        self.o_proj = nn.Linear(config.inner_size, config.hidden_size, bias=False)

    def forward(
        self, x: Tensor, rotary: Rotary, mask: Mask, prefix: KeyValues | None
    ) -> tuple[Tensor, KeyValues]:
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [B, S, N + 2 Nkv, D]
        keys = heads.shape[2] // (self.queries_per_key + 2)
        q, k, v = heads.split((keys * self.queries_per_key, keys, keys), dim=2)
        q, k = self.query_layernorm(q, rotary), self.key_layernorm(k, rotary)
        out: Tensor = self.o_proj(self.attend(q, k, v, mask, prefix).flatten(2))  # [B, S, C]
        return out, KeyValues(k, v)


class MLP(nn.Module):
    """Gated feed-forward; gate_and_up_proj rows are [gate ; up]."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.gate_and_up_proj = nn.Linear(channels, 2 * hidden, bias=False)
        self.act = SwiGLU()
        self.down_proj = nn.Linear(hidden, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act(self.gate_and_up_proj(x)))
        return out


class MoE(nn.Module):
    """The MLP of all rows, and the experts that the router chooses for each."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width, hidden = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(width, config.num_experts, config.moe_topk)
        self.shared_mlp = MLP(width, config.shared_size)
        self.experts = Experts(config.num_experts, width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)  # [M, C]
        index, shares = self.gate(rows)
        out: Tensor = self.shared_mlp(x) + self.experts(rows, index, shares).view_as(x)
        return out


class Block(nn.Module):
    """One layer. Gives its keys and values too, which a prefix keeps."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config)

    def forward(
        self, x: Tensor, rotary: Rotary, mask: Mask, prefix: KeyValues | None = None
    ) -> tuple[Tensor, KeyValues]:
        branch, own = self.self_attn(self.input_layernorm(x), rotary, mask, prefix)
        x = x + branch
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out, own


class HunyuanTransformer(nn.Module):
    """Everything between token states and velocity. There is no norm behind the last layer."""

    def __init__(self, config: DiTConfig, latent_channels: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.timestep_emb = TimeEmbedder(width)
        self.guidance_emb = TimeEmbedder(width) if config.cfg_distilled else None
        self.timestep_r_emb = TimeEmbedder(width) if config.use_meanflow else None
        self.time_embed = TimeEmbedder(width)
        self.time_embed_2 = TimeEmbedder(width)
        self.patch_embed = PatchEmbed(config, latent_channels)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.final_layer = FinalLayer(config, latent_channels)
        self.to(dtype)

    @property
    def device(self) -> torch.device:
        return self.timestep_emb.proj_in.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations in the layers."""
        return self.timestep_emb.proj_in.weight.dtype

    def slots(self, time: Tensor, guidance: Tensor, next_time: Tensor) -> Tensor:
        """The rows between prefix and image: [1, slots, C]. All three: float32 [1]; times as sigma * 1000.

        guidance: as it is asked for; the Distil form was trained with a thousand times it, in bfloat16.
        """
        rows = [self.timestep_emb(time)]
        if self.guidance_emb is not None:
            rows.append(self.guidance_emb((1000.0 * guidance).bfloat16()))
        if self.timestep_r_emb is not None:
            rows.append(self.timestep_r_emb(next_time))
        return torch.cat(rows)[None]

    def prefill(self, states: Tensor) -> Prefix:
        """Keys and values of a prefix of token states [B, L, C], in all layers."""
        length = states.shape[1]
        rotary = rotary_of(text_positions(0, length, states.device), self.config)
        x, kept = states.to(self.dtype), []
        for block in self.layers:
            x, own = block(x, rotary, Causal())
            kept.append(own)
        return Prefix(torch.stack([own.k for own in kept]), torch.stack([own.v for own in kept]))


def image_mask(length: int, slots: int, cells: int) -> Mask:
    """What slots and image rows see, behind a prefix of `length` rows."""
    first = length + slots
    return CausalWithFullSpans(((first, first + cells),))


def text_positions(first: int, count: int, device: torch.device) -> Tensor:
    """(y, x) of text rows, both their place in the sequence: float32 [count, 2]."""
    return torch.arange(first, first + count, device=device, dtype=torch.float32)[:, None].expand(-1, 2)


def image_positions(first: int, shape: tuple[int, int], device: torch.device) -> Tensor:
    """(y, x) of the image's rows: float32 [h * w, 2].

    first: place of its first row in the sequence. The grid lies centred on the diagonal that a text of the
    same length would take; halves are cut off.
    """
    h, w = shape
    y = torch.arange(h, device=device, dtype=torch.float32) + (first + (w * h - h) / 2)
    x = torch.arange(w, device=device, dtype=torch.float32) + (first + (w * h - w) / 2)
    return torch.stack(torch.meshgrid(y.trunc(), x.trunc(), indexing="ij"), dim=-1).flatten(0, 1)


def rotary_of(positions: Tensor, config: DiTConfig) -> Rotary:
    """positions float32 [S, 2] -> cos and sin float32 [1, S, D / 2]; even ones turn with y, odd with x."""
    pairs = config.attention_head_dim // 2
    exponent = torch.arange(pairs, dtype=torch.float32, device=positions.device) / pairs
    frequencies = config.rope_theta**-exponent
    turning = positions[:, torch.arange(pairs, device=positions.device) % 2]  # [S, D / 2]: y x y x ...
    angles = (turning * frequencies)[None]
    return Rotary(angles.cos(), angles.sin())
