"""A tiny checkpoint of the H3 family with random weights, laid out like a real one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from portable_dit.models.h3_image.checkpoint import FOLDERS, tensor_map
from portable_dit.models.h3_image.config import (
    CanvasConfig,
    DiTConfig,
    H3Config,
    SchedulerConfig,
    TextConfig,
    VAEConfig,
)
from portable_dit.models.h3_image.dit import H3Transformer
from portable_dit.models.h3_image.model import H3Image, build
from portable_dit.models.h3_image.qwen_config import QwenConfig
from portable_dit.models.h3_image.qwen_files import write_qwen_files
from portable_dit.models.h3_image.text import MiniTextEncoder
from portable_dit.models.h3_image.vae import ImageVAE
from portable_dit.weights import Checkpoint, load_component

DIT = DiTConfig(
    hidden_size=24,
    num_layers=2,
    token_refiner_num_layers=1,
    num_attention_heads=2,
    attention_head_dim=16,
    ffn_hidden_size=32,
    text_dim=12,
    timestep_input_dim=8,
    time_embed_hidden_size=24,
    time_embed_dim=20,
    rope_inv_freq_len=2,
)
VAE = VAEConfig(
    block_out_channels=(8, 8, 8, 8),
    layers_per_block=1,
    norm_num_groups=4,
    decoder_hidden_size=16,
    decoder_num_layers=1,
    decoder_num_attention_heads=2,
    decoder_attention_head_dim=8,
    decoder_ffn_mult=2,
    posterior="mode",
    refine_channels=4,
    tile_size=64,
    tile_overlap=16,
)
TEXT = TextConfig(
    vocab_size=8,
    table_dim=6,
    hidden_size=12,
    num_layers=2,
    num_attention_heads=2,
    head_dim=8,
    ffn_size=16,
    max_tokens=6,
)
CONFIG = H3Config(dit=DIT, vae=VAE, text=TEXT, scheduler=SchedulerConfig(), canvas=CanvasConfig())
WORDS = ("[PAD]", "[UNK]", "a", "red", "blue", "cat", "dog", "##s")
FLOAT32 = dict.fromkeys(FOLDERS, torch.float32)


def randomize(module: nn.Module, seed: int = 0) -> None:
    """Every parameter at random, so that no branch is silent: norms and scales near one, the rest normal."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
        near_one = parameter.ndim == 1 and not name.endswith("bias")
        parameter.data.copy_(scale * noise + (1.0 if near_one else 0.0))


def text_encoder(config: H3Config) -> nn.Module:
    if not isinstance(config.text, QwenConfig):
        return MiniTextEncoder(config.text)
    from portable_dit.models.h3_image.qwen import QwenEncoder  # takes seconds, which few tests need

    return QwenEncoder(config.text)


def write_checkpoint(folder: Path, config: H3Config = CONFIG) -> Path:
    """The folder, filled with configs, word list and random weights in our own dialect."""
    parts = {
        "transformer": (config.dit, H3Transformer(config.dit)),
        "vae": (config.vae, ImageVAE(config.vae)),
        "text_encoder": (config.text, text_encoder(config)),
    }
    for seed, (name, (part, module)) in enumerate(parts.items()):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(part.to_dict()))
        randomize(module, seed)
        save_file(dict(module.state_dict()), folder / name / "model.safetensors")
    if isinstance(config.text, QwenConfig):
        write_qwen_files(folder, config.text)
    else:
        (folder / "text_encoder" / "vocab.txt").write_text("\n".join(WORDS))
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(config.scheduler.to_dict()))
    (folder / "model_index.json").write_text(json.dumps({"canvas": config.canvas.to_dict()}))
    return folder


def load(folder: Path, *, finish: bool = True) -> H3Image:
    """The model of a checkpoint folder in float32, through the package's own loader."""
    model = build(H3Config.from_folder(folder), FLOAT32)
    for name, subfolder in FOLDERS.items():
        stored = Checkpoint(folder).tensors(subfolder)
        plan = tensor_map(name, {key: tensor.shape for key, tensor in stored.items()}, model.config)
        load_component(
            model.component(name),
            stored,
            sources=plan.sources,
            unused=plan.unused,
            device=lambda tensor: "cpu",
        )
    if finish:
        model.finish_loading(model.schedule(6))
    return model


def without_refine(config: VAEConfig) -> VAEConfig:
    return replace(config, refine_channels=0)
