"""Pairs of one model: diffusers' classes of the H3 family with random weights, and ours with the same ones.

Ours are filled through the renames of `checkpoint.py`, so those are on trial too.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from diffusers import AutoencoderKLMiniMaxH3, MiniMaxH3Transformer3DModel
from torch import Tensor, nn

from portable_dit.models.h3_image.checkpoint import tensor_map
from portable_dit.models.h3_image.config import DiTConfig, H3Config, VAEConfig
from portable_dit.models.h3_image.dit import H3Transformer
from portable_dit.models.h3_image.vae import ImageVAE

DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "hidden_size": 24,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "ffn_dim": 32,
    "in_channels": 4,
    "audio_in_channels": 6,
    "patch_size": (1, 2, 2),
    "text_dim": 8,
    "freq_dim": 8,
    "time_embed_hidden_dim": 24,
    "time_embed_dim": 16,
    "rope_freq_dim": 2,
}
VAE = {
    "latent_channels": 4,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "spatial_downsample_factors": (2, 2),
    "temporal_downsample_factors": (1, 1),
    "norm_num_groups": 4,
    "decoder_num_layers": 2,
    "decoder_num_attention_heads": 2,
    "decoder_attention_head_dim": 8,
    "decoder_num_register_tokens": 2,
    "decoder_ffn_mult": 2,
    "latents_mean": (0.1, -0.2, 0.3, 0.0),
    "latents_std": (1.1, 0.9, 1.3, 0.7),
}

TILE, OVERLAP = 64, 16


def randomize(module: nn.Module, seed: int = 0) -> None:
    """Every parameter at random, so that no branch is silent: norm weights and layer scales near one, the
    rest with the variance that keeps activations near one.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
        near_one = parameter.ndim == 1 and not name.endswith("bias")
        parameter.data.copy_(
            1.0 + 0.2 * noise if near_one else noise * (0.3 if fan_in == 1 else fan_in**-0.5)
        )


def fill(module: nn.Module, component: str, stored: dict[str, Tensor], config: H3Config) -> None:
    """The module with the stored tensors, none missing and none left over."""
    plan = tensor_map(component, {name: tuple(tensor.shape) for name, tensor in stored.items()}, config)
    used = {name for source in plan.sources.values() for name in source.names}
    assert used | plan.unused == stored.keys()
    ours = {name: source.make(*[stored[n] for n in source.names]) for name, source in plan.sources.items()}
    module.load_state_dict(ours)


def dit_pair(heads: int = 0, **changes: object) -> tuple[MiniMaxH3Transformer3DModel, H3Transformer]:
    theirs = MiniMaxH3Transformer3DModel(**{**DIT, **changes}).eval()
    randomize(theirs)
    config = replace(DiTConfig.from_dict({**DIT, **changes}), pdd_heads=heads)
    ours = H3Transformer(config).eval()
    stored = dict(theirs.state_dict())
    for step in range(heads):
        generator = torch.Generator().manual_seed(step)
        stored[f"pdd_out.{step}.weight"] = torch.randn(theirs.proj_out.weight.shape, generator=generator)
        stored[f"pdd_out.{step}.bias"] = torch.randn(theirs.proj_out.bias.shape, generator=generator)
    fill(ours, "dit", stored, replace(H3Config(), dit=config))
    return theirs, ours


def vae_pair() -> tuple[AutoencoderKLMiniMaxH3, ImageVAE]:
    """Both with tiles of TILE pixels, small enough for many of them in a small picture."""
    theirs = AutoencoderKLMiniMaxH3(**VAE).eval()
    randomize(theirs)
    theirs.enable_tiling(TILE, TILE, OVERLAP, OVERLAP)
    config = VAEConfig.from_dict({**VAE, "tile_size": TILE, "tile_overlap": OVERLAP})
    ours = ImageVAE(config).eval()
    fill(ours, "vae", dict(theirs.state_dict()), replace(H3Config(), vae=config))
    return theirs, ours
