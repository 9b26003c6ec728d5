"""The configs of a HunyuanImage-3.0 checkpoint as frozen data. Torch-free.

One config.json describes the transformer and, in `vae`, the autoencoder; generation_config.json holds what
sampling defaults to. Sizes that the file gives per layer must be the same in all of them, and what would
change the arithmetic (another activation, dropped tokens, shared keys between layers) is refused here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from portable_dit.errors import WeightsError
from portable_dit.models.config_json import inner_object, plain, read_config, read_json
from portable_dit.models.hunyuan_image_3.buckets import canvases

TEMPLATES = ("pretrain", "instruct")
# Keys whose other values mean another computation than the one that is written here.
FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_qk_norm": (True,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_cla": (False,),
    "use_mla": (False,),
    "norm_type": ("rms",),
    "norm_topk_prob": (True,),
    "use_mixed_mlp_moe": (True,),
    "moe_layer_num_skipped": (0,),
    "moe_drop_tokens": (False,),
    "group_limited_greedy": (False,),
    "rope_type": ("2d",),
    "img_proj_type": ("unet",),
    "patch_size": (1,),
}
NORM_GROUPS = 32  # of the transformer's convolutional blocks
PER_LAYER = ("moe_intermediate_size", "moe_topk", "num_shared_expert")


@dataclass(frozen=True)
class DiTConfig:
    """The transformer. Defaults are the published sizes of all three forms.

    cfg_distilled, use_meanflow: the Distil form's two further slots before the image, and no second branch.
    """

    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    attention_head_dim: int = 128
    moe_intermediate_size: int = 3072
    num_experts: int = 64
    moe_topk: int = 8
    num_shared_expert: int = 1
    vocab_size: int = 133120
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    patch_embed_hidden_dim: int = 1024
    image_base_size: int = 1024
    max_position_embeddings: int = 22800
    cfg_distilled: bool = False
    use_meanflow: bool = False
    notes: tuple[str, ...] = ()

    @property
    def qkv_size(self) -> int:
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.attention_head_dim

    @property
    def inner_size(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def shared_size(self) -> int:
        """Width of the MLP that every row passes."""
        return self.num_shared_expert * self.moe_intermediate_size

    @property
    def slots(self) -> int:
        """Rows between the prefix and the image: time, and in the Distil form guidance and next time."""
        return 1 + int(self.cfg_distilled) + int(self.use_meanflow)

    @property
    def branches(self) -> int:
        """Guidance branches that a request may have."""
        return 1 if self.cfg_distilled else 2


@dataclass(frozen=True)
class VAEConfig:
    """The autoencoder. block_out_channels: from the picture inwards. ffactor_*: how much it shrinks."""

    block_out_channels: tuple[int, ...] = (128, 256, 512, 1024, 1024)
    latent_channels: int = 32
    layers_per_block: int = 2
    out_channels: int = 3
    ffactor_spatial: int = 16
    ffactor_temporal: int = 4
    scaling_factor: float = 0.562679178327931
    norm_num_groups: int = 32
    notes: tuple[str, ...] = ()

    @property
    def levels(self) -> tuple[int, ...]:
        """Channels of the decoder's levels, from the latents outwards."""
        return self.block_out_channels[::-1]

    def frames(self, level: int) -> int:
        """Frames that a still picture has at a level of the decoder: 1, doubled by the first upsamplings."""
        return int(2 ** min(level, round(math.log2(self.ffactor_temporal))))


@dataclass(frozen=True)
class GenerationConfig:
    """What generation_config.json says of sampling, by the names it uses.

    notes: defaults that were used because the file does not say.
    """

    diff_infer_steps: int = 50
    diff_guidance_scale: float = 2.5
    flow_shift: float = 3.0
    sequence_template: str = "instruct"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class HunyuanConfig:
    """All of a checkpoint. folder: where its tokenizer is, None for random weights."""

    dit: DiTConfig = DiTConfig()
    vae: VAEConfig = VAEConfig()
    generation: GenerationConfig = GenerationConfig()
    folder: Path | None = None
    system_prompts: Mapping[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        return self.generation.notes

    @property
    def canvases(self) -> tuple[tuple[int, int], ...]:
        """(width, height) in the order of the shape tokens."""
        extras = self.generation.sequence_template == "instruct"
        return canvases(self.dit.image_base_size, extras=extras)

    @classmethod
    def from_folder(cls, folder: Path, *, system_prompts: Mapping[str, str]) -> HunyuanConfig:
        """The configs in a checkpoint's folder. Raises WeightsError for what is missing, odd or unknown."""
        raw = read_json(folder / "config.json")
        where = str(folder / "config.json")
        if raw.get("model_type") not in (None, "hunyuan_image_3_moe"):
            raise WeightsError(
                f"{where}: model_type is {raw['model_type']!r:.80}, not hunyuan_image_3_moe. Name the folder "
                "of a HunyuanImage-3.0 checkpoint, or another model."
            )
        _refuse_other_arithmetic(raw, where)
        sampling = read_json(folder / "generation_config.json", required=False)
        config = cls(
            read_config(DiTConfig, _levelled(raw, where), _SPELLINGS, unpublished=(), where=where),
            read_config(
                VAEConfig, inner_object(raw, "vae", where), {}, unpublished=(), where=f"{where}, block vae"
            ),
            read_config(
                GenerationConfig, sampling, {}, unpublished=_SAMPLING, where="generation_config.json"
            ),
            folder,
            system_prompts,
        )
        _refuse_unbuildable(config, where)
        return config


def config_json(config: HunyuanConfig) -> dict[str, Any]:
    """config.json of a checkpoint with these sizes, in the published layout."""
    dit = {**plain(config.dit), "head_dim": config.dit.attention_head_dim}
    for name in PER_LAYER:
        dit[name] = [dit[name]] * config.dit.num_hidden_layers
    fixed = {name: allowed[0] for name, allowed in FIXED.items()}
    return {"model_type": "hunyuan_image_3_moe", **fixed, **dit, "vae": plain(config.vae)}


def _refuse_other_arithmetic(raw: Mapping[str, Any], where: str) -> None:
    wrong = [
        f"{key} = {raw[key]!r:.80}, only {allowed[0]!r} is computed here"
        for key, allowed in FIXED.items()
        if key in raw and raw[key] not in (*allowed, None)
    ]
    if wrong:
        raise WeightsError(
            f"{where}: {'; '.join(wrong)}. It is another model than HunyuanImage-3.0, or another version."
        )


def _levelled(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The file with per-layer lists as the one number that they must all be."""
    found = dict(raw)
    for key in PER_LAYER:
        value = raw.get(key)
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise WeightsError(
                    f"{where}: {key} differs between layers, and equal layers are computed here."
                )
            found[key] = value[0]
    return found


def _refuse_unbuildable(config: HunyuanConfig, where: str) -> None:
    """Sizes that do not go together."""
    problems = [*_dit_problems(config), *_vae_problems(config.vae)]
    if config.generation.sequence_template not in TEMPLATES:
        template = config.generation.sequence_template
        problems.append(f"sequence_template = {template!r:.80} must be one of {', '.join(TEMPLATES)}")
    if problems:
        raise WeightsError(f"{where}: {'; '.join(problems)}. Restore the file from the checkpoint.")


def _dit_problems(config: HunyuanConfig) -> list[str]:
    dit, vae, problems = config.dit, config.vae, []
    if dit.num_attention_heads % dit.num_key_value_heads:
        problems.append(
            f"{dit.num_key_value_heads} key heads (num_key_value_heads) must divide "
            f"{dit.num_attention_heads} query heads (num_attention_heads)"
        )
    if dit.attention_head_dim % 4:
        problems.append(f"attention_head_dim = {dit.attention_head_dim} must be a multiple of 4")
    problems += [
        f"{name} = {channels} must be a multiple of {NORM_GROUPS}, the groups of a norm"
        for name in ("hidden_size", "patch_embed_hidden_dim")
        if (channels := getattr(dit, name)) % NORM_GROUPS
    ]
    if dit.moe_topk > dit.num_experts:
        problems.append(f"moe_topk = {dit.moe_topk} of {dit.num_experts} experts (num_experts)")
    if dit.cfg_distilled != dit.use_meanflow:
        problems.append("cfg_distilled and use_meanflow go together in the Distil form, here one is set")
    if dit.image_base_size % (16 * vae.ffactor_spatial) and dit.image_base_size != 1024:
        problems.append(
            f"image_base_size = {dit.image_base_size} must be a multiple of {16 * vae.ffactor_spatial}"
        )
    return problems


def _vae_problems(config: VAEConfig) -> list[str]:
    """What the convolutions, and the paths around them that repeat channels, need of the sizes."""
    problems = []
    levels, groups = config.levels, config.norm_num_groups
    if any(channels % groups for channels in levels):
        problems.append(
            f"vae: block_out_channels = {list(config.block_out_channels)} must be multiples of "
            f"norm_num_groups = {groups}"
        )
    factors = {
        name: getattr(config, name)
        for name in ("ffactor_spatial", "ffactor_temporal")
        if getattr(config, name).bit_count() != 1 or getattr(config, name) > 2 ** (len(levels) - 1)
    }
    problems += [
        f"vae: {name} = {factor} must be a power of two with a level for each doubling"
        for name, factor in factors.items()
    ]
    if config.out_channels != 3:
        problems.append(f"vae: out_channels = {config.out_channels} must be 3, red, green and blue")
    if levels[0] % config.latent_channels:
        problems.append(
            f"vae: latent_channels = {config.latent_channels} must divide the last of block_out_channels"
        )
    doublings = len(levels) - 1 if factors else round(math.log2(config.ffactor_spatial))
    if len(set(levels[doublings:])) > 1:
        problems.append(
            f"vae: block_out_channels = {list(config.block_out_channels)}: only an upsampling changes the "
            f"channels, and ffactor_spatial = {config.ffactor_spatial} has {doublings} of them"
        )
    if config.ffactor_temporal > config.ffactor_spatial:
        problems.append(
            f"vae: ffactor_temporal = {config.ffactor_temporal} must not be above ffactor_spatial = "
            f"{config.ffactor_spatial}: time is doubled where height and width are"
        )
    for level in range(0 if factors else doublings):
        times = config.frames(level + 1) // config.frames(level)
        if 4 * times * levels[level + 1] % levels[level]:
            problems.append(
                f"vae: block_out_channels = {list(config.block_out_channels)}: {levels[level]} channels "
                f"must divide {4 * times} times {levels[level + 1]}, which an upsampling makes of them"
            )
    return problems


_SPELLINGS = {"head_dim": "attention_head_dim"}
_SAMPLING = ("diff_infer_steps", "diff_guidance_scale", "flow_shift", "sequence_template")
