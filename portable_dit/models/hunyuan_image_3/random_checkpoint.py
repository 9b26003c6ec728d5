"""Random checkpoints in the layout that is published, so that loading can be tried without the real files.

Every tensor of the real thing is there under its name, in its dtype, in shards with an index: also those that
pictures do not need, so that a loader which reads too much or too little is found out. A tensor's numbers
follow from the seed and its name alone, and each is drawn and written on its own, so that the full size needs
the memory of one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from portable_dit.errors import WeightsError, near
from portable_dit.models.hunyuan_image_3.config import (
    DiTConfig,
    GenerationConfig,
    HunyuanConfig,
    VAEConfig,
    config_json,
)
from portable_dit.models.hunyuan_image_3.names import TOWER, Tower, all_tensors
from portable_dit.models.hunyuan_image_3.prompts import FILE, NAMES
from portable_dit.models.hunyuan_image_3.tokens import TOKENIZER_FILE, byte_tokenizer
from portable_dit.safetensors_file import ITEM_BYTES, TensorFileWriter

TINY = HunyuanConfig(
    dit=DiTConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        attention_head_dim=16,
        moe_intermediate_size=64,
        num_experts=8,
        moe_topk=2,
        vocab_size=384,
        patch_embed_hidden_dim=32,
        image_base_size=256,
        max_position_embeddings=2048,
    ),
    vae=VAEConfig(
        block_out_channels=(4, 8, 16, 16, 16), latent_channels=8, layers_per_block=1, norm_num_groups=4
    ),
)
TINY_TOWER = Tower(hidden=32, ffn=64, layers=2, positions=16, patch_values=48)
CONFIGS: Mapping[str, tuple[HunyuanConfig, Tower]] = {
    "tiny": (TINY, TINY_TOWER),
    "full": (HunyuanConfig(), TOWER),
}
# What each form has of its own: the transformer's further slots, and what sampling defaults to.
DIALECTS: Mapping[str, tuple[bool, GenerationConfig]] = {
    "instruct": (False, GenerationConfig()),
    "base": (False, GenerationConfig(diff_guidance_scale=5.0, sequence_template="pretrain")),
    "distil": (True, GenerationConfig(diff_infer_steps=8)),
}
# Bytes of one shard: the full size makes the published 32, the tiny one several.
SHARD_BYTES = {"tiny": 400_000, "full": 5_380_000_000}
_FLOAT32 = ("vae.", "vision_model.", "vision_aligner.")


@dataclass(frozen=True)
class PlannedFile:
    """One safetensors file: its path in the checkpoint, and name -> (dtype, shape) of its tensors."""

    path: str
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    bytes: int


def plan_random(config: str, dialect: str) -> list[PlannedFile]:
    """The files of a random checkpoint, before anything is drawn. Raises WeightsError."""
    sizes, tower = _sizes(config, dialect)
    limit = SHARD_BYTES[config]
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    sums = [0]
    for name, shape in all_tensors(sizes, tower=tower).items():
        dtype = "F32" if name.startswith(_FLOAT32) else "BF16"
        size = math.prod(shape) * ITEM_BYTES[dtype]
        if shards[-1] and sums[-1] + size > limit:
            shards.append({})
            sums.append(0)
        shards[-1][name] = dtype, shape
        sums[-1] += size
    count = len(shards)
    return [
        PlannedFile(f"model-{number:04}-of-{count:04}.safetensors", tensors, size)
        for number, (tensors, size) in enumerate(zip(shards, sums, strict=True), 1)
    ]


def write_random(
    folder: Path,
    *,
    config: str,
    dialect: str,
    seed: int,
    on_file: Callable[[str, int], None] = lambda path, size: None,
) -> list[PlannedFile]:
    """Writes a random checkpoint into a new or empty folder.

    on_file: told each file and its bytes as its turn comes. Raises WeightsError before anything is written.
    """
    files = plan_random(config, dialect)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(f"{folder}: there is something already. Name a new or empty folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        on_file(file.path, file.bytes)
        with TensorFileWriter(folder / file.path, file.tensors, {"format": "pt"}) as writer:
            for name, (dtype, shape) in file.tensors.items():
                tensor = _draw(name, shape, seed)
                tensor = tensor if dtype == "F32" else tensor.bfloat16()
                writer.write(name, memoryview(tensor.flatten().view(torch.uint8).numpy().data))
    sizes, _ = _sizes(config, dialect)
    index = {name: file.path for file in files for name in file.tensors}
    total = {"total_size": sum(file.bytes for file in files)}
    _write(
        folder / "model.safetensors.index.json",
        {"metadata": total, "weight_map": dict(sorted(index.items()))},
    )
    write_configs(folder, sizes)
    return files


def write_configs(folder: Path, sizes: HunyuanConfig) -> None:
    """Everything of a checkpoint but its tensors: configs, tokenizer, system prompts."""
    _write(folder / "config.json", config_json(sizes))
    _write(folder / "generation_config.json", asdict(sizes.generation))
    byte_tokenizer(sizes).save(str(folder / TOKENIZER_FILE))
    lines = [f'{stored} = """\nAn invented text in place of {name}.\n"""\n' for name, stored in NAMES.items()]
    (folder / FILE).write_text("\n".join(lines), encoding="utf-8")


def _sizes(config: str, dialect: str) -> tuple[HunyuanConfig, Tower]:
    if config not in CONFIGS:
        raise WeightsError(f"config {config!r} is not known.{near(config, list(CONFIGS))}")
    if dialect not in DIALECTS:
        raise WeightsError(f"dialect {dialect!r} is not known.{near(dialect, list(DIALECTS))}")
    sizes, tower = CONFIGS[config]
    distilled, generation = DIALECTS[dialect]
    dit = replace(sizes.dit, cfg_distilled=distilled, use_meanflow=distilled)
    return replace(sizes, dit=dit, generation=generation), tower


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Float32: matrices of variance 1 / K, norms near one, small biases."""
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "little"))
    noise = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return noise.mul_(math.prod(shape[1:]) ** -0.5)
    return 0.02 * noise if name.endswith("bias") else 1.0 + 0.1 * noise


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
