"""Random checkpoints in the layouts that are published, so that loading can be tried without the real files.

A parameter's numbers follow from the seed and its name alone, and each dialect is the same numbers laid out
in another way: names, row order, packing of the heads, 8-bit forms. Tensors are drawn, arranged and written
one at a time, so that the full size needs the memory of one. What a dialect's files hold is found by laying
out tensors on the meta device, so that the table of a dry run and the files cannot differ.

Letters: N out features, K in features, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from portable_dit.models.h3_image.config import DiTConfig, H3Config, VAEConfig
from portable_dit.models.h3_image.dialects import (
    DIALECTS,
    Dialect,
    Laid,
    lay_out_dit,
    lay_out_vae,
)
from portable_dit.models.h3_image.dit import H3Transformer
from portable_dit.models.h3_image.qwen_config import TINY_QWEN, QwenConfig
from portable_dit.models.h3_image.qwen_files import write_qwen_files
from portable_dit.models.h3_image.vae import ImageVAE
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
from portable_dit.safetensors_file import TensorFileWriter

# Sums of multiples of this stay exact in float32, so that heads stored as offsets come out the same.
HEAD_GRID = 2.0**-16
HEAD_OFFSET = 0.05  # size of a head's difference from the base layer, as a share of it
SAFETENSORS = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
_FLOAT32 = ("video_patch_proj.", "time_embedder.", "final_layer.video_out.", "final_layer.heads.")

# After the sizes of tiny-random/minimax-h3-image.
TINY = H3Config(
    dit=DiTConfig(
        hidden_size=64,
        num_layers=4,
        token_refiner_num_layers=2,
        num_attention_heads=4,
        attention_head_dim=32,
        ffn_hidden_size=128,
        latents_dim=8,
        text_dim=TINY_QWEN.hidden_size,
        timestep_input_dim=32,
        time_embed_hidden_size=64,
        time_embed_dim=32,
        rope_inv_freq_len=4,
    ),
    vae=VAEConfig(
        latent_channels=8,
        block_out_channels=(32,) * 6,
        decoder_hidden_size=64,
        decoder_num_layers=4,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=32,
        latents_mean=(0.0,) * 8,
        latents_std=(1.0,) * 8,
    ),
    text=TINY_QWEN,
)
FULL = H3Config(text=QwenConfig())
CONFIGS: Mapping[str, H3Config] = {"tiny": TINY, "full": FULL}
# Bytes of one shard: the full size makes the published 13 and 14 shards, the tiny one several.
SHARD_BYTES = {"tiny": 600_000, "full": 5_200_000_000}


@dataclass(frozen=True)
class _File(PlannedFile):
    """units: what its tensors are made of."""

    units: tuple[_Unit, ...]


@dataclass(frozen=True)
class _Unit:
    """What is drawn at once: a parameter, or the base layer with the heads of all steps behind it."""

    component: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    lay_out: Callable[[str, Tensor], Laid]

    def draw(self, seed: int) -> Laid:
        """The stored tensors of this unit."""
        return self.lay_out(self.name, _draw(self, seed).to(self.dtype))

    def on_meta(self) -> Laid:
        return self.lay_out(self.name, torch.empty(self.shape, dtype=self.dtype, device="meta"))


def plan_random(config: str, dialect: str) -> Sequence[PlannedFile]:
    """The safetensors files of a random checkpoint, before anything is drawn. Raises WeightsError."""
    return _plan(config, dialect)


def _plan(config: str, dialect: str) -> list[_File]:
    sizes, form = choose("config", config, CONFIGS), choose("dialect", dialect, DIALECTS)
    limit = SHARD_BYTES[config]
    dit = list(_dit_units(sizes.dit, form))
    vae = list(_vae_units(sizes.vae, form))
    text = list(_text_units(sizes))
    return [
        *_files(dit, form.dit_folder, form.dit_file, limit if form.dit_file is None else None),
        *_files(vae, form.vae_folder, None, None),
        *_files(text, "text_encoder", None, limit),
    ]


def write_random(
    folder: Path,
    *,
    config: str,
    dialect: str,
    seed: int,
    on_file: Callable[[str, int], None] = lambda path, size: None,
) -> Sequence[PlannedFile]:
    """Writes a random checkpoint into a new or empty folder.

    on_file: told each file and its bytes as its turn comes. Raises WeightsError before anything is written.
    """
    files = _plan(config, dialect)
    require_new(folder)
    for file in files:
        on_file(file.path, file.bytes)
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"format": "pt", **DIALECTS[dialect].metadata(CONFIGS[config].dit, file.path)}
        with TensorFileWriter(path, file.tensors, metadata) as writer:
            for unit in file.units:
                for name, tensor in unit.draw(seed).items():
                    writer.write(name, bytes_of(tensor))
    _write_indexes(folder, files)
    _write_configs(folder, CONFIGS[config], DIALECTS[dialect], canvas=config == "tiny")
    return files


def _dit_units(config: DiTConfig, dialect: Dialect) -> Iterator[_Unit]:
    config = dialect.dit_config(config)
    with torch.device("meta"):
        model = H3Transformer(config)
    for name, tensor in model.state_dict().items():
        if name.startswith("final_layer.video_out."):
            continue  # drawn with the heads
        shape = tuple(tensor.shape)
        if name.startswith("final_layer.heads."):
            shape = (1 + shape[0], *shape[1:])
        curve = config.adaln_form == "curve" and (".adaln_proj." in name or name == "adaln_t_table")
        dtype = torch.float32 if curve or name.startswith(_FLOAT32) else torch.bfloat16
        yield _Unit("dit", name, shape, dtype, lambda n, t: lay_out_dit(n, t, config, dialect))


def _vae_units(config: VAEConfig, dialect: Dialect) -> Iterator[_Unit]:
    with torch.device("meta"):
        model = ImageVAE(config)
    for name, tensor in model.state_dict().items():
        yield _Unit(
            "vae",
            name,
            tuple(tensor.shape),
            torch.float32,
            lambda n, t: lay_out_vae(n, t, config, dialect),
        )
    if not dialect.diffusers:
        mask = (1, 1, config.decoder_hidden_size)
        yield _Unit("vae", "decoder.mask_token", mask, torch.float32, lambda n, t: {n: t})


def _text_units(config: H3Config) -> Iterator[_Unit]:
    assert isinstance(config.text, QwenConfig)
    for name, shape in qwen_tensors(config.text).items():
        yield _Unit("text_encoder", name, shape, torch.bfloat16, lambda n, t: {n: t})


def qwen_tensors(config: QwenConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the whole text encoder's checkpoint, in transformers' names."""
    width, vision = config.hidden_size, config.vision
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    found: dict[str, tuple[int, ...]] = {
        "model.language_model.embed_tokens.weight": (config.vocab_size, width)
    }
    for index in range(config.num_layers):
        layer = f"model.language_model.layers.{index}."
        found |= {
            f"{layer}input_layernorm.weight": (width,),
            f"{layer}self_attn.q_proj.weight": (queries, width),
            f"{layer}self_attn.k_proj.weight": (keys, width),
            f"{layer}self_attn.v_proj.weight": (keys, width),
            f"{layer}self_attn.o_proj.weight": (width, queries),
            f"{layer}self_attn.q_norm.weight": (config.head_dim,),
            f"{layer}self_attn.k_norm.weight": (config.head_dim,),
            f"{layer}post_attention_layernorm.weight": (width,),
            f"{layer}mlp.gate_proj.weight": (config.ffn_size, width),
            f"{layer}mlp.up_proj.weight": (config.ffn_size, width),
            f"{layer}mlp.down_proj.weight": (width, config.ffn_size),
        }
    found["model.language_model.norm.weight"] = (width,)
    inner, merged = vision.hidden_size, vision.hidden_size * vision.merge_size**2
    tower = "model.visual."
    patch = (inner, vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    found |= {
        f"{tower}patch_embed.proj.weight": patch,
        f"{tower}patch_embed.proj.bias": (inner,),
        f"{tower}pos_embed.weight": (vision.num_position_embeddings, inner),
    }
    for index in range(vision.depth):
        block = f"{tower}blocks.{index}."
        found |= _affine(f"{block}norm1", inner) | _affine(f"{block}norm2", inner)
        found |= _affine(f"{block}attn.qkv", 3 * inner, inner) | _affine(f"{block}attn.proj", inner, inner)
        found |= _affine(f"{block}mlp.linear_fc1", vision.ffn_size, inner)
        found |= _affine(f"{block}mlp.linear_fc2", inner, vision.ffn_size)
    mergers = [(f"{tower}merger.", inner)]
    mergers += [(f"{tower}deepstack_merger_list.{i}.", merged) for i in range(len(vision.deepstack))]
    for merger, normed in mergers:
        found |= _affine(f"{merger}norm", normed) | _affine(f"{merger}linear_fc1", merged, merged)
        found |= _affine(f"{merger}linear_fc2", vision.out_hidden_size, merged)
    return {**found, "lm_head.weight": (config.vocab_size, width)}


def _affine(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _draw(unit: _Unit, seed: int) -> Tensor:
    """Numbers that bfloat16 holds."""
    noise = draw(f"{seed}/{unit.component}/{unit.name}", unit.shape)
    if unit.name.startswith("final_layer.heads."):
        scale = unit.shape[-1] ** -0.5 if len(unit.shape) == 3 else 0.1
        noise[1:] = noise[:1] + HEAD_OFFSET * noise[1:]
        return (scale * noise / HEAD_GRID).round() * HEAD_GRID
    return as_parameter(unit.name, noise).bfloat16()


def _files(units: Sequence[_Unit], folder: str, name: str | None, limit: int | None) -> list[_File]:
    """The files of one component: a single one, or shards of about `limit` bytes."""
    laid = {unit: unit.on_meta() for unit in units}
    sizes = {unit: sum(tensor.nbytes for tensor in made.values()) for unit, made in laid.items()}
    shards = in_shards(sizes.items(), limit)
    stem = "diffusion_pytorch_model" if folder.endswith("_diffusers") else "model"
    paths = [name or f"{stem}.safetensors"]
    if len(shards) > 1:
        paths = [f"{stem}-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    return [
        _File(
            f"{folder}/{path}",
            {n: (SAFETENSORS[t.dtype], tuple(t.shape)) for unit in members for n, t in laid[unit].items()},
            sum(sizes[unit] for unit in members),
            tuple(members),
        )
        for path, members in zip(paths, shards, strict=True)
    ]


def _write_indexes(folder: Path, files: Sequence[PlannedFile]) -> None:
    """An index beside every component that has several files."""
    groups: dict[str, list[PlannedFile]] = {}
    for file in files:
        groups.setdefault(file.path.rpartition("/")[0], []).append(file)
    for name, group in groups.items():
        if len(group) > 1:
            write_index(folder / name, Path(group[0].path).name.partition("-")[0], group)


def _write_configs(folder: Path, config: H3Config, dialect: Dialect, *, canvas: bool) -> None:
    assert isinstance(config.text, QwenConfig)
    if dialect.dit_file is None:
        write_json(folder / dialect.dit_folder / "config.json", dialect.dit_json(config.dit))
    write_json(folder / dialect.vae_folder / "config.json", dialect.vae_json(config.vae))
    write_json(folder / "text_encoder" / "config.json", config.text.to_dict())
    write_qwen_files(folder, config.text)
    scheduler = {"_class_name": "MiniMaxH3Scheduler", "shift": config.scheduler.shift}
    scheduler["num_inference_steps"] = config.scheduler.num_inference_steps
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    index: dict[str, Any] = {"_minimax_h3": {"schema_version": 1}}
    if canvas:  # the tiny model draws small pictures
        index["canvas"] = {"default_width": 256, "default_height": 256, "min_side": 64}
    write_json(folder / ("modular_model_index.json" if dialect.diffusers else "model_index.json"), index)
