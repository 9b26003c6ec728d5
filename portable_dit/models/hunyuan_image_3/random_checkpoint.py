"""Random checkpoints in the layout that is published, so that loading can be tried without the real files.

Every tensor of the real thing is there under its name, in its dtype, in shards with an index: also those that
pictures do not need, so that a loader which reads too much or too little is found out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from portable_dit.models.config_json import plain
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
from portable_dit.models.random_files import (
    PlannedFile,
    as_parameter,
    bytes_of,
    choose,
    draw,
    in_shards,
    require_new,
    write_index,
    write_json,
)
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


def plan_random(config: str, dialect: str) -> list[PlannedFile]:
    """The files of a random checkpoint, before anything is drawn. Raises WeightsError."""
    sizes, tower = _sizes(config, dialect)
    shapes = all_tensors(sizes, tower=tower)
    dtypes = {name: "F32" if name.startswith(_FLOAT32) else "BF16" for name in shapes}
    bytes_of_each = {name: math.prod(shape) * ITEM_BYTES[dtypes[name]] for name, shape in shapes.items()}
    shards = in_shards(bytes_of_each.items(), SHARD_BYTES[config])
    return [
        PlannedFile(
            f"model-{number:04}-of-{len(shards):04}.safetensors",
            {name: (dtypes[name], shapes[name]) for name in names},
            sum(bytes_of_each[name] for name in names),
        )
        for number, names in enumerate(shards, 1)
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
    require_new(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        on_file(file.path, file.bytes)
        with TensorFileWriter(folder / file.path, file.tensors, {"format": "pt"}) as writer:
            for name, (dtype, shape) in file.tensors.items():
                tensor = as_parameter(name, draw(f"{seed}/{name}", shape))
                writer.write(name, bytes_of(tensor if dtype == "F32" else tensor.bfloat16()))
    write_index(folder, "model", files)
    write_configs(folder, _sizes(config, dialect)[0])
    return files


def write_configs(folder: Path, sizes: HunyuanConfig) -> None:
    """Everything of a checkpoint but its tensors: configs, tokenizer, system prompts."""
    write_json(folder / "config.json", config_json(sizes))
    write_json(folder / "generation_config.json", plain(sizes.generation))
    byte_tokenizer(sizes).save(str(folder / TOKENIZER_FILE))
    lines = [f'{stored} = """\nAn invented text in place of {name}.\n"""\n' for name, stored in NAMES.items()]
    (folder / FILE).write_text("\n".join(lines), encoding="utf-8")


def _sizes(config: str, dialect: str) -> tuple[HunyuanConfig, Tower]:
    sizes, tower = choose("config", config, CONFIGS)
    distilled, generation = choose("dialect", dialect, DIALECTS)
    dit = replace(sizes.dit, cfg_distilled=distilled, use_meanflow=distilled)
    return replace(sizes, dit=dit, generation=generation), tower
