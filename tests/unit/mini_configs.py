"""The configs of the built-in model as a folder, for plans that need no weights."""

import json
from pathlib import Path

from portable_dit.models.h3_image.config import (
    CanvasConfig,
    DiTConfig,
    H3Config,
    SchedulerConfig,
    TextConfig,
    VAEConfig,
)

MINI = H3Config(
    dit=DiTConfig(
        hidden_size=384,
        num_layers=6,
        token_refiner_num_layers=1,
        num_attention_heads=4,
        ffn_hidden_size=1024,
        text_dim=192,
        time_embed_hidden_size=384,
        time_embed_dim=64,
    ),
    vae=VAEConfig(
        block_out_channels=(16, 32, 64, 96, 128, 128),
        norm_num_groups=8,
        decoder_hidden_size=256,
        decoder_num_layers=5,
        decoder_num_attention_heads=4,
        refine_channels=32,
        posterior="mode",
        latents_mean=(0.0,) * 24,
        latents_std=(1.0,) * 24,
    ),
    text=TextConfig(),
    scheduler=SchedulerConfig(shift=2.0, reference_rule="canvas", max_references=3),
    canvas=CanvasConfig(
        max_side=1024, max_pixels=512 * 512, max_ratio=2.0, default_width=512, default_height=512
    ),
)


def write_configs(folder: Path, config: H3Config = MINI) -> Path:
    """The folder, laid out like a checkpoint without its tensors."""
    parts = {
        "transformer/config.json": config.dit,
        "vae/config.json": config.vae,
        "text_encoder/config.json": config.text,
        "scheduler/scheduler_config.json": config.scheduler,
    }
    for name, part in parts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(part.to_dict()))
    (folder / "model_index.json").write_text(json.dumps({"canvas": config.canvas.to_dict()}))
    return folder
