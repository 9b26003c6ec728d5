"""How many parameters and live activation values the H3-Image family has, by pure arithmetic.

Formulas follow the modules beside this file; a test counts the modules and compares. The published totals of
H3-Image (33,105,770,752 bfloat16 parameters in the DiT, 584,229,432 in the VAE) come out exactly.

Letters: S rows, C channels, F feed-forward width, B batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from portable_dit.models.h3_image.config import DiTConfig, TextConfig, VAEConfig
from portable_dit.models.h3_image.qwen_config import QwenConfig, VisionConfig
from portable_dit.models.spec import batch_size
from portable_dit.models.tiling import tile_axis

# What a convolution of equal width takes at its peak, in units of its input: the input, its padded copy, the
# result, the blocked layouts of both that CPU libraries make, and the activation before it.
CONV_COPIES = 6


@dataclass(frozen=True)
class DiTCounts:
    """Parameters of the DiT. block: one block without modulation. modulation: all modulation linears.

    float32: patch projection and time MLP (or time curve), always float32. heads: all output layers, float32.
    """

    block: int
    refiner: int
    other: int
    modulation: int
    float32: int
    heads: int


def dit_counts(c: DiTConfig) -> DiTCounts:
    """Parameters by what happens to them: moved by offload, dropped for tables, or kept in float32."""
    width, inner, ffn = c.hidden_size, c.inner_size, c.ffn_hidden_size
    block = 2 * width + 4 * width * inner + 2 * c.attention_head_dim + 3 * width * ffn
    modulated = c.num_layers * c.num_tags * 6 * width + 2 * width
    time_mlp = (
        c.timestep_input_dim * c.time_embed_hidden_size
        + c.time_embed_hidden_size
        + c.time_embed_hidden_size * c.time_embed_dim
        + c.time_embed_dim
    )
    curve = c.curve_grid * c.curve_dim
    return DiTCounts(
        block=block,
        refiner=c.token_refiner_num_layers * block + width,
        other=c.text_dim * width + width + width,  # condition_proj, and the final norm
        modulation=modulated * (c.modulation_input + 1),
        float32=c.row_size * width + width + (curve if c.adaln_form == "curve" else time_mlp),
        heads=(c.pdd_heads + 1) * (c.row_size * width + c.row_size),
    )


def table_values(c: DiTConfig, times: int) -> int:
    """Values in the fixed modulation tables of so many distinct times."""
    return times * (c.num_layers * c.num_tags * 6 * c.hidden_size + 2 * c.hidden_size)


def vae_parameters(c: VAEConfig, *, taps: int = 1) -> tuple[int, int]:
    """(encoder, decoder) parameters. taps: temporal size of the kernels, 3 as stored, 1 as used."""
    widths, latents = c.block_out_channels, c.latent_channels

    def conv(inputs: int, outputs: int) -> int:
        return 9 * taps * inputs * outputs + outputs

    encoder = conv(3, widths[0])
    for stage, width in enumerate(widths):
        inputs = widths[max(stage - 1, 0)]
        for _ in range(c.layers_per_block):
            shortcut = inputs * width + width if inputs != width else 0
            encoder += 2 * inputs + conv(inputs, width) + 2 * width + conv(width, width) + shortcut
            inputs = width
        encoder += conv(width, width) if stage < c.downsample_stages else 0
    encoder += 2 * widths[-1] + conv(widths[-1], 2 * latents) + (2 * latents + 1) * 2 * latents

    width, inner = c.decoder_hidden_size, c.decoder_num_attention_heads * c.decoder_attention_head_dim
    ffn = c.decoder_ffn_mult * width
    block = (
        4 * width  # two norms, two layer scales
        + (width + 1) * 3 * inner
        + (inner + 1) * width
        + (width + 1) * 2 * ffn
        + (ffn + 1) * width
    )
    decoder = (latents + 1) * latents + (latents + 1) * width + c.decoder_num_register_tokens * width
    decoder += c.decoder_num_layers * block + 2 * width + (width + 1) * 3 * c.ratio**2
    if c.refine_channels:
        tail = c.refine_channels
        decoder += (9 * 12 + 1) * tail + (9 * tail + 1) * tail + (9 * tail + 1) * 12
    return encoder, decoder


@dataclass(frozen=True)
class TextCounts:
    """Parameters of the text encoder that are needed, and of the whole checkpoint it comes from."""

    block: int
    num_blocks: int
    other: int
    checkpoint: int


def vision_parameters(v: VisionConfig) -> int:
    """Parameters of the vision tower: patches, learned positions, blocks, and one merger for each way out."""
    width, ffn = v.hidden_size, v.ffn_size
    patch = v.in_channels * v.temporal_patch_size * v.patch_size**2
    block = 4 * width + 4 * width * width + 4 * width + 2 * width * ffn + ffn + width
    joined = v.merge_size**2 * width
    merger = (joined + 1) * joined + (joined + 1) * v.out_hidden_size
    mergers = merger + 2 * width + len(v.deepstack) * (merger + 2 * joined)
    return (patch + 1) * width + v.num_position_embeddings * width + v.depth * block + mergers


def text_counts(c: TextConfig | QwenConfig) -> TextCounts:
    if isinstance(c, QwenConfig):
        attention = 2 * c.hidden_size * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
        block = attention + 3 * c.hidden_size * c.ffn_size + 2 * c.hidden_size + 2 * c.head_dim
        embedding, vision = c.vocab_size * c.hidden_size, vision_parameters(c.vision)
        whole = c.num_layers * block + 2 * embedding + c.hidden_size + vision
        return TextCounts(block, c.used_layers, embedding + vision, whole)
    inner = c.num_attention_heads * c.head_dim
    block = 4 * c.hidden_size * inner + 3 * c.hidden_size * c.ffn_size + 2 * c.hidden_size + 2 * c.head_dim
    other = c.vocab_size * c.table_dim + c.table_dim * c.hidden_size
    return TextCounts(block, c.num_layers, other, other + c.num_layers * block)


def dit_live_bytes(c: DiTConfig, *, rows: int, prefix_rows: int, itemsize: int) -> int:
    """Most bytes alive at once in a denoise step with the plain bodies of the seams.

    The block is the peak: its input, and either the normed rows, qkv, float32 copies of q in the head norm,
    q, k and the attention result; or the normed rows and the gated MLP. What lives through all steps comes on
    top: the prefix, the rotary tables, positions and indices, and the float32 latents.
    """
    width, inner, ffn = c.hidden_size, c.inner_size, c.ffn_hidden_size
    attention = rows * (itemsize * (2 * width + 3 * inner + 2 * inner + inner) + 8 * inner)
    mlp = rows * itemsize * (2 * width + 2 * ffn + 2 * ffn)
    norm = rows * (itemsize * 4 * width + 8 * width)
    lasting = prefix_rows * width * itemsize + rows * (2 * itemsize * 3 * c.rope_inv_freq_len + 24 + 16 + 8)
    latents = 4 * 4 * (rows - prefix_rows) * c.row_size
    return max(attention, mlp, norm) + lasting + latents


def _tiles(c: VAEConfig, width: int, height: int) -> tuple[int, int]:
    """(number of tiles, pixels of one)."""
    rows, columns = (
        tile_axis(side, tile=c.tile_size, overlap=c.tile_overlap, step=c.ratio) for side in (height, width)
    )
    return len(rows.starts) * len(columns.starts), rows.size * columns.size


def decode_tokens(c: VAEConfig, *, width: int, height: int) -> tuple[int, int]:
    """(tokens of a tile, number of tiles) of the decoder."""
    count, pixels = _tiles(c, width, height)
    return pixels // c.ratio**2 + c.decoder_num_register_tokens + 1, count


def decode_live_bytes(c: VAEConfig, *, width: int, height: int, itemsize: int, tile_batch: int) -> int:
    """Most bytes alive at once while latents become pixels.

    Either a batch of tiles in a feed-forward (activation type) or in the tail (float32), beside the decoded
    tiles; or all tiles, their faded copy, the joined bands and the picture.
    """
    count, pixels = _tiles(c, width, height)
    batch = batch_size(count, tile_batch)
    tokens = pixels // c.ratio**2 + c.decoder_num_register_tokens + 1
    hidden, ffn = c.decoder_hidden_size, c.decoder_ffn_mult * c.decoder_hidden_size
    block = batch * tokens * (4 * 2 * hidden + itemsize * (hidden + 4 * ffn))
    tail = 4 * batch * (pixels // 4) * (3 * 12 + CONV_COPIES * c.refine_channels) if c.refine_channels else 0
    all_tiles, picture = 12 * count * pixels, 12 * width * height
    return max(max(block, tail) + all_tiles, 2 * all_tiles + 2 * picture, 3 * picture)


def encode_live_bytes(c: VAEConfig, *, width: int, height: int, tile_batch: int) -> int:
    """Most bytes alive at once while a reference becomes latents, in float32: the first, widest stage.

    The residual, and what a convolution holds of a batch of tiles, beside all tiles.
    """
    count, pixels = _tiles(c, width, height)
    stage = 4 * batch_size(count, tile_batch) * pixels * c.block_out_channels[0]
    return (1 + CONV_COPIES) * stage + 12 * count * pixels + 12 * width * height


def text_live_bytes(c: TextConfig | QwenConfig, *, rows: int, vision_rows: int, itemsize: int) -> int:
    """Most bytes alive at once in the text encoder: one layer's feed-forward, or the vision tower's."""
    if isinstance(c, QwenConfig):
        v = c.vision
        # Beside a layer's own: what the tower gave, once for the text and once for each layer it adds to.
        seen = (1 + len(v.deepstack)) * vision_rows * c.hidden_size
        layer = itemsize * (rows * (4 * c.hidden_size + 3 * c.ffn_size) + seen)
        tower = v.merge_size**2 * vision_rows * itemsize * (4 * v.hidden_size + 2 * v.ffn_size)
        return max(layer, tower)
    return rows * itemsize * (4 * c.hidden_size + 5 * c.ffn_size)
