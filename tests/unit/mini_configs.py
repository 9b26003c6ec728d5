"""The configs of the built-in model as a folder, for plans that need no weights."""

import json
from pathlib import Path

import portable_dit
from portable_dit.models.h3_image.config import H3Config

MINI = H3Config.from_folder(Path(portable_dit.__file__).parent / "models" / "h3_mini")


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
