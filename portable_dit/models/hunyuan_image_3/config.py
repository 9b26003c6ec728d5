"""The configs of a HunyuanImage-3.0 checkpoint as frozen data. Torch-free.

One config.json describes the transformer and, in `vae`, the autoencoder; generation_config.json holds what
sampling defaults to. Sizes that the file gives per layer must be the same in all of them, and what would
change the arithmetic (another activation, dropped tokens, shared keys between layers) is refused here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from portable_dit.errors import WeightsError
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

    @property
    def levels(self) -> tuple[int, ...]:
        """Channels of the decoder's levels, from the latents outwards."""
        return self.block_out_channels[::-1]

    def frames(self, level: int) -> int:
        """Frames that a still picture has at a level of the decoder: 1, doubled by the first upsamplings."""
        return int(2 ** min(level, round(math.log2(self.ffactor_temporal))))


@dataclass(frozen=True)
class GenerationConfig:
    """What generation_config.json says of sampling, by the names it uses."""

    diff_infer_steps: int = 50
    diff_guidance_scale: float = 2.5
    flow_shift: float = 3.0
    sequence_template: str = "instruct"


@dataclass(frozen=True)
class HunyuanConfig:
    """All of a checkpoint. folder: where its tokenizer is, None for random weights.

    notes: defaults that were used because the files do not say.
    """

    dit: DiTConfig = DiTConfig()
    vae: VAEConfig = VAEConfig()
    generation: GenerationConfig = GenerationConfig()
    folder: Path | None = None
    system_prompts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

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
                f"{where}: model_type is {raw['model_type']!r}, not hunyuan_image_3_moe. Name the folder of "
                "a HunyuanImage-3.0 checkpoint, or another model."
            )
        _refuse_other_arithmetic(raw, where)
        dit = _read(DiTConfig, _levelled(raw, where), where, {"head_dim": "attention_head_dim"})
        vae_raw = raw.get("vae", {})
        if not isinstance(vae_raw, Mapping):
            raise WeightsError(f"{where}: vae must be a JSON object. Restore the file from the checkpoint.")
        vae = _read(VAEConfig, vae_raw, f"{where}: vae", {})
        path, notes = folder / "generation_config.json", []
        sampling = read_json(path) if path.is_file() else {}
        for name in [f.name for f in fields(GenerationConfig) if f.name not in sampling]:
            default = getattr(GenerationConfig(), name)
            notes.append(f"generation_config.json does not give {name}; using {default}.")
        generation = _read(GenerationConfig, sampling, str(path), {})
        config = cls(dit, vae, generation, folder, system_prompts, tuple(notes))
        _refuse_unbuildable(config, where)
        return config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises WeightsError when it is not there or is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(
            f"{path}: missing. A HunyuanImage-3.0 checkpoint needs it; is the download complete?"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(
            f"{path}: not readable as JSON ({error}). Restore it from the checkpoint."
        ) from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: must hold a JSON object. Restore it from the checkpoint.")
    return value


def config_json(config: HunyuanConfig) -> dict[str, Any]:
    """config.json of a checkpoint with these sizes, in the published layout."""
    dit = {**asdict(config.dit), "head_dim": config.dit.attention_head_dim}
    for name in PER_LAYER:
        dit[name] = [dit[name]] * config.dit.num_hidden_layers
    vae = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(config.vae).items()}
    fixed = {name: allowed[0] for name, allowed in FIXED.items()}
    return {"model_type": "hunyuan_image_3_moe", **fixed, **dit, "vae": vae}


def _refuse_other_arithmetic(raw: Mapping[str, Any], where: str) -> None:
    wrong = [
        f"{key} = {raw[key]!r}, only {allowed[0]!r} is computed here"
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


def _read(cls: type[Any], raw: Mapping[str, Any], where: str, spellings: Mapping[str, str]) -> Any:
    """A config from a JSON object; keys that it does not know are the publisher's own business."""
    named = {spellings.get(key, key): value for key, value in raw.items()}
    config = cls()
    values: dict[str, Any] = {}
    for f in fields(cls):
        if named.get(f.name) is None:
            continue
        default, value = getattr(config, f.name), named[f.name]
        if isinstance(default, tuple) and isinstance(value, list):
            value = tuple(value)
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        numbers = value if isinstance(value, tuple) else (value,)
        kinds = {type(item) for item in default} if isinstance(default, tuple) else {type(default)}
        sound = type(value) is type(default) and numbers and all(type(n) in kinds for n in numbers)
        if not sound or any(_unsound(number) for number in numbers):
            raise WeightsError(
                f"{where}: {f.name} = {value!r} must be like {default!r}: numbers above 0. "
                "Restore the file from the checkpoint."
            )
        values[f.name] = value
    return replace(config, **values)


def _unsound(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return not math.isfinite(value) or value <= 0


def _refuse_unbuildable(config: HunyuanConfig, where: str) -> None:
    """Sizes that do not go together."""
    dit, vae = config.dit, config.vae
    problems = []
    if dit.num_attention_heads % dit.num_key_value_heads:
        problems.append(
            f"{dit.num_key_value_heads} key heads must divide {dit.num_attention_heads} query heads"
        )
    if dit.attention_head_dim % 4:
        problems.append(f"attention_head_dim = {dit.attention_head_dim} must be a multiple of 4")
    if dit.moe_topk > dit.num_experts:
        problems.append(f"moe_topk = {dit.moe_topk} of {dit.num_experts} experts")
    if dit.cfg_distilled != dit.use_meanflow:
        problems.append("cfg_distilled and use_meanflow go together in the Distil form, here one is set")
    for name, factor in (
        ("ffactor_spatial", vae.ffactor_spatial),
        ("ffactor_temporal", vae.ffactor_temporal),
    ):
        if factor & (factor - 1) or factor > 2 ** (len(vae.block_out_channels) - 1):
            problems.append(f"{name} = {factor} must be a power of two with a level for each doubling")
    if dit.image_base_size % (16 * vae.ffactor_spatial) and dit.image_base_size != 1024:
        problems.append(
            f"image_base_size = {dit.image_base_size} must be a multiple of {16 * vae.ffactor_spatial}"
        )
    if config.generation.sequence_template not in TEMPLATES:
        template = config.generation.sequence_template
        problems.append(f"sequence_template = {template!r} must be one of {', '.join(TEMPLATES)}")
    if problems:
        raise WeightsError(f"{where}: {'; '.join(problems)}. Restore the file from the checkpoint.")
