"""The H3-Image diffusion transformer.

One picture is one packed sequence, [text | reference 1 | reference 2 | ... | target], in which every row
attends to every row. What a row is, and how noisy, reaches it only through modulation: each block holds a
small table with one entry per (time, tag) pair, and every row points into it. The tables depend on nothing
but the times of the schedule, so an engine computes them once and drops the 40 % of all weights that made
them (`modulation_tables`, `drop_adaln`).

The denoise step has three parts: `embed`, the `blocks`, `head`. `prefix` is the part of the sequence that
does not change between steps. `forward` does it all for training.

Letters: B batch, L text rows, R reference rows, T target rows, S = L + R + T, C channels, N heads, D
head_dim, M distinct times, K tags.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from portable_dit.masks import NO_MASK, KeyPadding, Mask
from portable_dit.models.h3_image.config import DiTConfig
from portable_dit.ops import (
    Attention,
    GatedResidual,
    HeadNormRotary,
    ModulatedNorm,
    Modulation,
    RMSNorm,
    Rotary,
    SwiGLU,
)

# Where a block's table begins for each: shift, scale and gate of attention, then of the MLP.
ATTENTION_CHUNK, MLP_CHUNK = 0, 3


@dataclass(frozen=True)
class ModulationTables:
    """The fixed tables of M times, in the activation dtype.

    blocks: [M * K, 6, C] each. final: [M, 2, C].
    """

    blocks: tuple[Tensor, ...]
    final: Tensor


def float32_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """A linear that stays in float32, under autocast too: the family's checkpoints keep these layers so.

    It runs where x is.
    """
    weight, bias = layer.weight.to(x.device, torch.float32), layer.bias
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.float(), weight, None if bias is None else bias.to(x.device, torch.float32))


class SelfAttention(nn.Module):
    """Full attention with normalised queries and keys. qkv_proj rows are [all q ; all k ; all v]."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.head_dim = config.attention_head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.inner_size, bias=False)
        self.q_norm = HeadNormRotary(self.head_dim, config.qk_norm_eps)
        self.k_norm = HeadNormRotary(self.head_dim, config.qk_norm_eps)
        self.attend = Attention(config.num_attention_heads, self.head_dim)
        self.out_proj = nn.Linear(config.inner_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: Rotary | None, mask: Mask) -> Tensor:
        qkv = self.qkv_proj(x).unflatten(-1, (3, -1, self.head_dim))  # [B, S, 3, N, D]
        q, k, v = qkv.unbind(2)  # [B, S, N, D] each
        out: Tensor = self.attend(self.q_norm(q, rotary), self.k_norm(k, rotary), v, mask)
        out = self.out_proj(out.flatten(2))  # [B, S, C]
        return out


class MLP(nn.Module):
    """Gated feed-forward. fc1 rows are [gate ; value]."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, 2 * config.ffn_hidden_size, bias=False)
        self.act = SwiGLU()
        self.fc2 = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class AdaLN(nn.Module):
    """Times to modulation: embeddings [M, time_dim] each -> [all M together * entries, chunks, C]."""

    def __init__(self, config: DiTConfig, *, entries: int, chunks: int) -> None:
        super().__init__()
        self.chunks = chunks
        self.channels = config.hidden_size
        self.in_float32 = config.adaln_form == "curve"
        self.linear = nn.Linear(config.modulation_input, entries * chunks * config.hidden_size)

    def forward(self, embeddings: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """embeddings: float32. The SiLU before was float32, the linear runs in dtype, as the table is.

        It runs where they are: while a model loads, these weights wait on the host, 26 GB of them, and visit
        once. Each embedding is multiplied on its own, so that its rows do not depend on the others.
        """
        weight, bias = (t.to(embeddings[0].device) for t in (self.linear.weight, self.linear.bias))
        rows = [F.linear(x if self.in_float32 else x.to(dtype), weight, bias) for x in embeddings]
        return torch.cat(rows).view(-1, self.chunks, self.channels).to(dtype)


class TimeEmbedder(nn.Module):
    """Sinusoids of a time in 0..1, unscaled, through a float32 MLP and SiLU: [M] -> [M, time_embed_dim]."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.num_frequencies = config.timestep_input_dim // 2
        self.proj_in = nn.Linear(config.timestep_input_dim, config.time_embed_hidden_size)
        self.proj_out = nn.Linear(config.time_embed_hidden_size, config.time_embed_dim)

    def forward(self, times: Tensor) -> Tensor:
        exponent = torch.arange(self.num_frequencies, dtype=torch.float32, device=times.device)
        angles = times.float()[:, None] * torch.exp(exponent * (-math.log(10000.0) / self.num_frequencies))
        hidden = float32_linear(self.proj_in, torch.cat([angles.cos(), angles.sin()], dim=-1))
        return F.silu(float32_linear(self.proj_out, F.silu(hidden)))


class RefinerBlock(nn.Module):
    """A plain pre-norm block over the text rows: no modulation, no rotary."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = SelfAttention(config)
        self.norm2 = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, mask: Mask = NO_MASK) -> Tensor:
        x = x + self.attn(self.norm1(x), None, mask)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class TokenRefiner(nn.Module):
    """The blocks that text states pass before they join the sequence: [B, L, C] -> [B, L, C]."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RefinerBlock(config) for _ in range(config.token_refiner_num_layers))
        self.final_norm = RMSNorm(config.hidden_size, config.final_norm_eps)

    def forward(self, x: Tensor, mask: Mask = NO_MASK) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        out: Tensor = self.final_norm(x)
        return out


class Block(nn.Module):
    """One transformer block; every row is modulated by its own entry of the table."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.norm1 = ModulatedNorm(config.hidden_size, config.norm_eps)
        self.attn = SelfAttention(config)
        self.norm2 = ModulatedNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)
        self.residual = GatedResidual()
        self.adaln_proj: AdaLN | None = AdaLN(config, entries=config.num_tags, chunks=6)

    def table(self, *embeddings: Tensor) -> Tensor:
        """[M, time_dim] float32 each -> [all M together * K, 6, C], entry = time * K + tag."""
        assert self.adaln_proj is not None, "the modulation weights were dropped; use the fixed tables"
        table: Tensor = self.adaln_proj(embeddings, self.norm1.weight.dtype)
        return table

    def forward(self, x: Tensor, modulation: Modulation, rotary: Rotary, mask: Mask = NO_MASK) -> Tensor:
        branch = self.attn(self.norm1(x, modulation, ATTENTION_CHUNK), rotary, mask)
        x = self.residual(x, branch, modulation, ATTENTION_CHUNK + 2)
        branch = self.mlp(self.norm2(x, modulation, MLP_CHUNK))
        out: Tensor = self.residual(x, branch, modulation, MLP_CHUNK + 2)
        return out


class StepHeads(nn.Module):
    """Output heads of a distilled model, one for each step.

    weight: float32 [steps, row, C]; bias: float32 [steps, row].
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.pdd_heads, config.row_size, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.pdd_heads, config.row_size))

    def forward(self, x: Tensor, step: int | Tensor) -> Tensor:
        """x: float32 [B, T, C]; step: one for all, or int64 [B] -> float32 [B, T, row]."""
        if isinstance(step, Tensor):
            return torch.baddbmm(self.bias[step][:, None], x, self.weight[step].transpose(1, 2))
        return F.linear(x, self.weight[step], self.bias[step])


class FinalLayer(nn.Module):
    """Last norm, modulated by time alone, and the float32 output heads."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.norm = ModulatedNorm(config.hidden_size, config.final_norm_eps)
        self.adaln_proj: AdaLN | None = AdaLN(config, entries=1, chunks=2)
        self.video_out = nn.Linear(config.hidden_size, config.row_size)
        self.heads = StepHeads(config) if config.pdd_heads else None

    def table(self, *embeddings: Tensor) -> Tensor:
        """[M, time_dim] float32 each -> [all M together, 2, C]."""
        assert self.adaln_proj is not None, "the modulation weights were dropped; use the fixed tables"
        table: Tensor = self.adaln_proj(embeddings, self.norm.weight.dtype)
        return table

    def forward(self, x: Tensor, modulation: Modulation, step: int | Tensor | None) -> Tensor:
        x = self.norm(x, modulation, 0)
        if step is None:
            return float32_linear(self.video_out, x)
        assert self.heads is not None, "this checkpoint has no heads for single steps"
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = self.heads(x.float(), step)
        return out


class H3Transformer(nn.Module):
    """The whole transformer.

    dtype: of everything but the float32 layers (patch projection, time MLP, heads).
    """

    def __init__(self, config: DiTConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.video_patch_proj = nn.Linear(config.row_size, config.hidden_size)
        self.condition_proj = nn.Linear(config.text_dim, config.hidden_size)
        if config.adaln_form == "curve":
            self.adaln_t_table = nn.Parameter(torch.zeros(config.curve_grid, config.curve_dim))
        else:
            self.time_embedder = TimeEmbedder(config)
        self.token_refiner = TokenRefiner(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_layer = FinalLayer(config)
        for part in (self.condition_proj, self.token_refiner, self.blocks, self.final_layer.norm):
            part.to(dtype)
        curve = config.adaln_form == "curve"
        for owner in (*self.blocks, self.final_layer):
            owner.adaln_proj.to(torch.float32 if curve else dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations in the blocks."""
        return self.token_refiner.final_norm.weight.dtype

    def time_embedding(self, times: Tensor) -> Tensor:
        """What the modulation tables are made from: times [M] float32 in 0..1, 1 = clean -> [M, time_dim]
        float32, where the times are.
        """
        if self.config.adaln_form != "curve":
            embedding: Tensor = self.time_embedder(times)
            return embedding
        last = self.config.curve_grid - 1
        place = times.float().clamp(0, 1) * last
        below = place.floor().clamp(max=last - 1).long()  # [M]
        table = self.adaln_t_table.to(times.device)
        return torch.lerp(table[below], table[below + 1], (place - below)[:, None])

    def modulation_tables(
        self, times: Sequence[float], device: torch.device | str | None = None
    ) -> ModulationTables:
        """The fixed tables of a schedule, made on the device; None = where the patch projection is.

        Each time is computed on its own, so that its rows do not depend on which other times are in the list.
        """
        device = self.video_patch_proj.weight.device if device is None else device
        embeddings = [
            self.time_embedding(torch.tensor([time], dtype=torch.float32, device=device)) for time in times
        ]
        blocks = tuple(cast(Block, block).table(*embeddings) for block in self.blocks)
        return ModulationTables(blocks, self.final_layer.table(*embeddings))

    def drop_adaln(self) -> None:
        """Give back the weights that the fixed tables replace."""
        for owner in (*self.blocks, self.final_layer):
            owner.adaln_proj = None

    def rotary(self, positions: Tensor) -> Rotary:
        """positions [B, S, 3] -> cos and sin [B, S, 3 * frequencies] in the activation dtype."""
        count = self.config.rope_inv_freq_len
        exponent = torch.arange(count, dtype=torch.float32, device=positions.device) / count
        frequencies = 1.0 / self.config.rope_theta**exponent
        angles = (positions.float()[..., None] * frequencies).flatten(-2)  # [B, S, 3 * frequencies] float32
        return Rotary(angles.cos().to(self.dtype), angles.sin().to(self.dtype))

    def prefix(self, text: Tensor, references: Sequence[Tensor] = (), mask: Mask = NO_MASK) -> Tensor:
        """The rows before the target, the same at every step.

        text: [B, L, text_dim]; references: [B, R_i, row] float32 each, in order; mask: over the text rows
        alone. Returns [B, L + R, C].
        """
        x: Tensor = self.condition_proj(text.to(self.dtype))
        x = self.token_refiner(x, mask)
        rows = [float32_linear(self.video_patch_proj, reference).to(x.dtype) for reference in references]
        return torch.cat([x, *rows], dim=1)

    def embed(self, latent_rows: Tensor, prefix: Tensor) -> Tensor:
        """latent_rows [B, T, row] float32 and prefix [B, L + R, C] -> the packed sequence [B, S, C]."""
        rows = float32_linear(self.video_patch_proj, latent_rows).to(prefix.dtype)
        return torch.cat([prefix, rows], dim=1)

    def head(
        self, x: Tensor, target_rows: int, modulation: Modulation, step: int | Tensor | None = None
    ) -> Tensor:
        """Velocity towards the data of the last `target_rows` rows: [B, S, C] -> float32 [B, T, row].

        modulation: the final table with an index [B, T]. step: the head to use, None = the base output layer.
        """
        out: Tensor = self.final_layer(x[:, -target_rows:], modulation, step)
        return out

    def forward(
        self,
        latent_rows: Tensor,
        text: Tensor,
        *,
        times: Tensor,
        row_times: Tensor,
        tags: Tensor,
        positions: Tensor,
        references: Tensor | None = None,
        keep: Tensor | None = None,
        step: int | Tensor | None = None,
    ) -> Tensor:
        """Velocity of a batch whose samples each have their own times: float32 [B, T, row].

        latent_rows: float32 [B, T, row]; text: [B, L, text_dim]; references: float32 [B, R, row] or None.
        times: float32 [B, M]; row_times: int64 [B, S], which of its sample's times a row has. tags: int64 [B,
        S]. positions: [B, S, 3]. keep: bool [B, S], False for padding rows. step: output head, one or int64
        [B].
        """
        batch, num_times = times.shape
        length, target_rows = text.shape[1], latent_rows.shape[1]
        mask: Mask = NO_MASK if keep is None else KeyPadding(keep)
        text_mask: Mask = NO_MASK if keep is None else KeyPadding(keep[:, :length])
        prefix = self.prefix(text, () if references is None else (references,), text_mask)
        x = self.embed(latent_rows, prefix)

        embedding = self.time_embedding(times.flatten())  # [B * M, time_dim]
        first = torch.arange(batch, device=times.device)[:, None] * num_times
        time_index = first + row_times  # [B, S] into B * M
        index = time_index * self.config.num_tags + tags
        rotary = self.rotary(positions)
        for block in self.blocks:
            x = block(x, Modulation(cast(Block, block).table(embedding), index), rotary, mask)
        final = Modulation(self.final_layer.table(embedding), time_index[:, -target_rows:])
        return self.head(x, target_rows, final, step)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Xavier linears, with modulation and output layers at zero so that every block begins as
        identity.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                silent = "adaln_proj" in name or name.startswith("final_layer")
                if silent:
                    nn.init.zeros_(module.weight)
                else:
                    nn.init.xavier_uniform_(module.weight, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
