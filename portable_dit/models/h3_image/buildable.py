"""Whether the configs of a checkpoint fit together, told before anything is built from them. Torch-free.

Each value alone was found sound when it was read; here are the rules between them, without which a model
could not be built, or could be and would fail in the middle of a picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from portable_dit.errors import WeightsError

if TYPE_CHECKING:
    from portable_dit.models.h3_image.config import CanvasConfig, DiTConfig, H3Config, VAEConfig


def require_buildable(config: H3Config) -> None:
    """Raises WeightsError with every rule that the configs break."""
    dit, text, scheduler = config.dit, config.text, config.scheduler
    problems = [*_dit_problems(dit), *_vae_problems(config.vae), *_canvas_problems(config.canvas)]
    if text.hidden_size != dit.text_dim:
        problems.append(
            f"the text encoder gives states of width {text.hidden_size} (hidden_size), the transformer takes "
            f"{dit.text_dim} (text_dim): they must be equal"
        )
    if dit.latents_dim != config.vae.latent_channels:
        problems.append(
            f"the VAE has {config.vae.latent_channels} latent channels (latent_channels), the transformer "
            f"takes {dit.latents_dim} (latents_dim): they must be equal"
        )
    if dit.pdd_heads not in (0, scheduler.num_inference_steps):
        problems.append(
            f"{dit.pdd_heads} output heads (pdd_heads) for {scheduler.num_inference_steps} steps "
            "(num_inference_steps): there must be one for each step"
        )
    cell = config.vae.ratio * dit.patch_size[1]
    if config.canvas.multiple % cell:
        problems.append(
            f"block canvas: multiple = {config.canvas.multiple}: must be a multiple of {cell}, the pixels "
            "along a patch"
        )
    problems += _schedule_problems(scheduler.base_schedule, scheduler.num_inference_steps)
    if problems:
        where = "configs" if config.folder is None else str(config.folder)
        raise WeightsError(
            "\n  ".join([f"{where}: the configs do not fit together:", *problems])
            + "\nUse the files of one and the same checkpoint."
        )


def _dit_problems(config: DiTConfig) -> list[str]:
    problems = []
    turned = 6 * config.rope_inv_freq_len  # pairs of channels on three axes
    if turned > config.attention_head_dim:
        problems.append(
            f"transformer: rope_inv_freq_len = {config.rope_inv_freq_len} turns {turned} of a head's "
            f"{config.attention_head_dim} channels (attention_head_dim)"
        )
    if config.timestep_input_dim % 2:
        problems.append(
            f"transformer: timestep_input_dim = {config.timestep_input_dim}: must be even, for sines and "
            "cosines"
        )
    return problems


def _vae_problems(config: VAEConfig) -> list[str]:
    problems = []
    widths, groups = config.block_out_channels, config.norm_num_groups
    if any(width % groups for width in widths):
        problems.append(
            f"vae: block_out_channels = {list(widths)}: must be multiples of norm_num_groups = {groups}"
        )
    if config.downsample_stages > len(widths):
        problems.append(
            f"vae: downsample_stages = {config.downsample_stages} of {len(widths)} block_out_channels"
        )
        return problems
    if config.tile_size % config.ratio or config.tile_overlap % config.ratio:
        problems.append(
            f"vae: tile_size = {config.tile_size} and tile_overlap = {config.tile_overlap}: must be "
            f"multiples of {config.ratio}, the pixels of a latent cell"
        )
    if config.tile_overlap >= config.tile_size:
        problems.append(
            f"vae: tile_overlap = {config.tile_overlap}: must be less than tile_size = {config.tile_size}"
        )
    if config.rope_axes not in (2, 3) or config.rope_ratio > 1 or config.rope_pairs % config.rope_axes:
        problems.append(
            f"vae: rope_axes = {config.rope_axes} and rope_ratio = {config.rope_ratio:g}: 2 or 3 axes must "
            f"share at most all pairs of a head's {config.decoder_attention_head_dim} channels "
            "(decoder_attention_head_dim) evenly"
        )
    return problems


def _canvas_problems(canvas: CanvasConfig) -> list[str]:
    sides = canvas.default_width, canvas.default_height
    legal = (
        all(side % canvas.multiple == 0 for side in sides)
        and canvas.min_side <= min(sides)
        and max(sides) <= min(canvas.max_side, canvas.max_ratio * min(sides))
        and math.prod(sides) <= canvas.max_pixels
    )
    if legal:
        return []
    return [
        f"block canvas: the default size, default_width = {sides[0]} and default_height = {sides[1]}, breaks "
        f"the other rules: min_side = {canvas.min_side}, max_side = {canvas.max_side}, multiple = "
        f"{canvas.multiple}, max_ratio = {canvas.max_ratio:g}, max_pixels = {canvas.max_pixels}"
    ]


def _schedule_problems(levels: Sequence[float] | None, steps: int) -> list[str]:
    if levels is None:
        return []
    if len(levels) != steps + 1:
        return [
            f"scheduler: base_schedule has {len(levels)} noise levels for {steps} steps: there must be "
            f"{steps + 1}"
        ]
    if levels[0] > 1 or levels[-1] != 0 or sorted(set(levels), reverse=True) != list(levels):
        return [f"scheduler: base_schedule = {list(levels)}: must fall from at most 1 to 0"]
    return []
