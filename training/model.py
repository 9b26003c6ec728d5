"""The built-in model as training sees it: text encoder and transformer together, over padded batches.

The modules are the engine's own. Training only feeds them differently: prompts padded to a fixed number of
rows, references to a fixed number of pictures, targets to a fixed number of rows, with the padding masked
out as keys, so that a step has one shape and fits a CUDA graph. The modulation of a row depends on its
segment (text, reference, target) and its sample alone, and `SegmentModulation` says so without an index per
row, whose gradient is slow.

Letters: B batch, L text rows, R references, P rows of one picture, S = L + R * P + P, C channels.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from portable_dit.masks import Causal, KeyPadding, Mask, NoMask
from portable_dit.models.h3_image.config import (
    CanvasConfig,
    DiTConfig,
    H3Config,
    SchedulerConfig,
    TextConfig,
    VAEConfig,
)
from portable_dit.models.h3_image.dit import H3Transformer, float32_linear
from portable_dit.models.h3_image.text import MiniTextEncoder
from portable_dit.ops import Attention, Rotary
from training.capture import compiled

TEXT_ROWS = 32
MASKED = -30000.0  # added to scores of padding keys; finite, so that a row which sees nothing stays finite
CONDITION_TIME = 0.999  # how clean references are
GATE_START = 0.3  # of every block's gates: at zero the blocks would be shut off and learn late


def mini_config() -> H3Config:
    """The shipped model: H3-Image at 1/14 of its widths."""
    return H3Config(
        dit=DiTConfig(
            hidden_size=384,
            num_layers=6,
            token_refiner_num_layers=1,
            num_attention_heads=4,
            ffn_hidden_size=1024,
            text_dim=192,
            time_embed_hidden_size=384,
            time_embed_dim=64,
            qkv_rows="stacked",
        ),
        vae=VAEConfig(
            block_out_channels=(16, 32, 64, 96, 128, 128),
            norm_num_groups=8,
            decoder_hidden_size=256,
            decoder_num_layers=5,
            decoder_num_attention_heads=4,
            refine_channels=32,
            posterior="mode",
            qkv_rows="stacked",
            latents_mean=(0.0,) * 24,
            latents_std=(1.0,) * 24,
        ),
        text=TextConfig(),
        scheduler=SchedulerConfig(
            shift=2.0, condition_time=CONDITION_TIME, reference_rule="canvas", max_references=3
        ),
        canvas=CanvasConfig(
            min_side=256,
            max_side=1024,
            max_pixels=512 * 512,
            max_ratio=2.0,
            default_width=512,
            default_height=512,
            max_prompt_characters=1000,
        ),
    )


def tiny_config() -> H3Config:
    """The same structure small enough to train for a few steps on a CPU."""
    return H3Config(
        dit=DiTConfig(
            hidden_size=32,
            num_layers=2,
            token_refiner_num_layers=1,
            num_attention_heads=2,
            attention_head_dim=32,
            ffn_hidden_size=64,
            text_dim=32,
            time_embed_hidden_size=32,
            time_embed_dim=16,
            rope_inv_freq_len=4,
            timestep_input_dim=32,
            qkv_rows="stacked",
        ),
        vae=VAEConfig(
            block_out_channels=(8, 8, 16, 16, 16, 16),
            layers_per_block=1,
            norm_num_groups=4,
            decoder_hidden_size=32,
            decoder_num_layers=1,
            decoder_num_attention_heads=2,
            decoder_attention_head_dim=16,
            refine_channels=8,
            posterior="mode",
            qkv_rows="stacked",
            latents_mean=(0.0,) * 24,
            latents_std=(1.0,) * 24,
        ),
        text=TextConfig(hidden_size=32, num_layers=1, num_attention_heads=2, head_dim=16, ffn_size=64),
        scheduler=mini_config().scheduler,
        canvas=mini_config().canvas,
    )


def products_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
    """Attention as two batched products and a softmax that the compiler fuses: [B, S, N, D] -> [B, S, N, D].

    At the few hundred rows of this model it is as fast as a flash kernel, and it takes any mask.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, N, S, D]
    scores = torch.matmul(q * scale, k.transpose(2, 3)).float()  # [B, N, Sq, Sk]
    if isinstance(mask, KeyPadding):
        scores = scores + (~mask.keep * MASKED)[:, None, None]
    elif isinstance(mask, Causal):
        rows = torch.arange(q.shape[2], device=q.device)
        scores = scores + (rows[None] > rows[:, None]) * MASKED
    else:
        assert isinstance(mask, NoMask), "training has no use for other masks"
    return torch.matmul(scores.softmax(dim=-1).to(v.dtype), v).transpose(1, 2)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
    """PyTorch's own fused attention without a mask: [B, S, N, D] -> [B, S, N, D]."""
    assert isinstance(mask, NoMask)
    q, k, v = (x.transpose(1, 2).to(v.dtype) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


def set_attention(module: nn.Module, body: Any) -> None:
    """Give every attention seam of the module one body."""
    for part in module.modules():
        if isinstance(part, Attention):
            part.run = body


@dataclass(frozen=True)
class SegmentModulation:
    """Stands in for ops.Modulation.

    table: [B, 3, chunks, C]; segment: int64 [S], 0 text, 1 reference, 2 target.
    """

    table: Tensor
    segment: Tensor

    def rows(self, chunk: int) -> Tensor:
        """One chunk spread over the rows: [B, S, C]."""
        text, reference, target = self.table[:, :, chunk, None].unbind(1)  # [B, 1, C] each
        segment = self.segment[None, :, None]
        return torch.where(segment == 0, text, torch.where(segment == 1, reference, target))


@dataclass(frozen=True)
class Batch:
    """Samples of one bucket.

    ids: int64 [B, L], length: int64 [B] (0 = no prompt). grid: int64 [B, 2], rows and columns of tokens.
    target: float32 [B, P, 96] clean and normalised. references: float32 [B, R, P, 96]; num_references:
    int64 [B].
    """

    ids: Tensor
    length: Tensor
    grid: Tensor
    target: Tensor
    references: Tensor
    num_references: Tensor


@dataclass(frozen=True)
class Layout:
    """What the rows of a batch are.

    keep: bool [B, S]; segment: int64 [S]; real: bool [B, P] of the target.
    """

    rotary: Rotary
    keep: Tensor
    segment: Tensor
    real: Tensor


def make_layout(model: H3Mini, batch: Batch, length: Tensor) -> Layout:
    """Positions and masks as portable_dit's packing gives them unpadded (a test compares them)."""
    picture_rows, num_pictures = batch.target.shape[1], batch.references.shape[1]
    device = batch.ids.device
    text = torch.arange(batch.ids.shape[1], device=device)  # [L]
    row = torch.arange(picture_rows, device=device)  # [P]
    height, width = batch.grid[:, :1], batch.grid[:, 1:]  # [B, 1]
    real = row[None] < height * width  # [B, P]
    ratio = (height.float() / width.float()).sqrt()
    across = _axis(row[None] // width, height, ratio)  # [B, P]
    along = _axis(row[None] % width, width, 1 / ratio)  # [B, P]
    spatial = torch.stack([across, along], dim=-1)  # [B, P, 2]
    shown = torch.arange(num_pictures, device=device)[None] < batch.num_references[:, None]  # [B, R]
    times = [length[:, None] + i for i in range(num_pictures)] + [(length + batch.num_references)[:, None]]
    pictures = [
        torch.cat([time.float()[..., None].expand(-1, picture_rows, 1), spatial], dim=-1) for time in times
    ]
    words = F.pad(text.float()[:, None], (0, 2))[None].expand(len(length), -1, -1)  # [B, L, 3]
    keep = [text[None] < length[:, None], *(shown[:, i, None] & real for i in range(num_pictures)), real]
    sizes = [len(text), num_pictures * picture_rows, picture_rows]
    segment = torch.cat([torch.full((n,), i, device=device) for i, n in enumerate(sizes)])
    rotary = model.transformer.rotary(torch.cat([words, *pictures], dim=1))
    return Layout(rotary, torch.cat(keep, dim=1), segment, real)


def _axis(place: Tensor, count: Tensor, ratio: Tensor) -> Tensor:
    return ((1 - ratio) / 2 + ratio * place.float() / count.float()) * 32


def block_forward(
    block: Any, x: Tensor, target_time: Tensor, reference_time: Tensor, layout: tuple[Tensor, ...]
) -> Tensor:
    """One block with its modulation made on the spot; times are embeddings [B, time_dim]."""
    cos, sin, keep, segment = layout
    num_tags = block.adaln_proj.linear.weight.shape[0] // (6 * x.shape[-1])
    at_target = block.table(target_time).unflatten(0, (-1, num_tags))  # [B, K, 6, C]
    at_reference = block.table(reference_time).unflatten(0, (-1, num_tags))
    table = torch.stack([at_target[:, 1], at_reference[:, 0], at_target[:, 0]], dim=1)  # [B, 3, 6, C]
    out: Tensor = block(x, SegmentModulation(table, segment), Rotary(cos, sin), KeyPadding(keep))
    return out


class H3Mini(nn.Module):
    """Text encoder and transformer, the two trained parts besides the VAE."""

    def __init__(self, config: H3Config, *, use_compiler: bool = False) -> None:
        super().__init__()
        self.config = config
        self.text_encoder = MiniTextEncoder(config.text)
        self.transformer = H3Transformer(config.dit)
        self.text_encoder.embed_tokens.weight.requires_grad_(False)
        set_attention(self, products_attention)
        self._block = compiled(block_forward, enabled=use_compiler)
        self._words = compiled(self._word_rows, enabled=use_compiler)

    @torch.no_grad()
    def start(self, table: Tensor, *, seed: int = 0) -> None:
        """Fresh weights. table: float32 [vocab, table_dim], the frozen word table."""
        generator = torch.Generator().manual_seed(seed)
        self.transformer.init_weights(generator)
        for name, parameter in self.text_encoder.named_parameters():
            if name != "embed_tokens.weight" and parameter.ndim == 2:
                nn.init.xavier_uniform_(parameter, generator=generator)
        self.text_encoder.embed_tokens.weight.copy_(table)
        for block in self.transformer.blocks:
            bias = block.adaln_proj.linear.bias.view(self.config.dit.num_tags, 6, -1)
            bias[:, 2] = bias[:, 5] = GATE_START

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """bfloat16 products on a GPU, plain float32 on a CPU."""
        return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()

    def _word_rows(self, ids: Tensor, keep: Tensor) -> Tensor:
        return self.transformer.prefix(self.text_encoder(ids), (), KeyPadding(keep))

    def word_rows(self, ids: Tensor, length: Tensor, *, plain: bool = False) -> Tensor:
        """Refined text rows [B, L, C] of padded prompts. plain: without the compiler."""
        keep = torch.arange(ids.shape[1], device=ids.device)[None] < length[:, None]
        rows: Tensor = self._word_rows(ids, keep) if plain else self._words(ids, keep)
        return rows

    def velocity(
        self,
        noisy: Tensor,
        words: Tensor,
        references: Tensor,
        layout: Layout,
        times: Tensor,
        *,
        windows: Tensor | None = None,
        plain: bool = False,
    ) -> Tensor:
        """Velocity towards the data, float32 [B, P, 96].

        noisy: [B, P, 96]; words: [B, L, C]; references: [B, R, P, 96] with their trace of noise; times:
        [B], 1 = clean. windows: float32 one-hot [B, heads] choosing a distilled head, None = base. plain:
        without the compiler.
        """
        dit = self.transformer
        shown = float32_linear(dit.video_patch_proj, references.flatten(1, 2)).to(words.dtype)
        prefix = torch.cat([words, shown], dim=1)
        x = dit.embed(noisy, prefix)
        at_target = dit.time_embedding(times)
        at_reference = dit.time_embedding(times.clamp(min=CONDITION_TIME))
        parts = (layout.rotary.cos, layout.rotary.sin, layout.keep, layout.segment)
        step = block_forward if plain else self._block
        for block in dit.blocks:
            x = step(block, x, at_target, at_reference, parts)
        final = dit.final_layer
        table = final.table(at_target)  # [B, 2, C]
        modulation = SegmentModulation(
            table[:, None].expand(-1, 3, -1, -1), layout.segment[-noisy.shape[1] :]
        )
        rows = x[:, -noisy.shape[1] :]
        if windows is None:
            out: Tensor = final(rows, modulation, None)
            return out
        rows = final.norm(rows, modulation, 0).float()
        with torch.autocast(rows.device.type, enabled=False):
            weight = (windows @ final.heads.weight.flatten(1)).unflatten(1, final.heads.weight.shape[1:])
            return torch.baddbmm((windows @ final.heads.bias)[:, None], rows, weight.transpose(1, 2))


def is_muon_matrix(name: str, parameter: nn.Parameter) -> bool:
    """The matrices inside blocks; projections in and out, modulation and vectors belong to AdamW."""
    inside = ".blocks." in name or ".layers." in name
    return inside and parameter.ndim == 2 and "adaln" not in name


def load_float_table(stored: dict[str, Tensor]) -> Tensor:
    """float32 [vocab, dim] from the int8 rows and float16 scales of text_table.safetensors."""
    return stored["embedding.weight"].float() * stored["embedding.weight_scale"].float()[:, None]
