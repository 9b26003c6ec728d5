"""What a checkpoint of the H3-Image family says about itself, as frozen dataclasses. Torch-free.

Published facts and guesses have the same form here: a value read from the checkpoint's JSON, else the default
below. Defaults that nobody has published (`unpublished` in the readers) leave a line in `notes` when they are
used, so that a plan can say what it stands on. Two spellings of a key are accepted: the original checkpoint's
and diffusers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from portable_dit.errors import WeightsError, near
from portable_dit.models.config_json import (
    inner_object,
    plain,
    read_config,
    read_json,
    whole_number,
)
from portable_dit.models.h3_image.buildable import require_buildable
from portable_dit.models.h3_image.private_block import read_private_block
from portable_dit.models.h3_image.qwen_config import QwenConfig, is_qwen

REFERENCE_RULES = ("area", "short_edge", "fit", "canvas")
REFERENCE_NOISES = ("fresh", "running")

# Per-channel statistics of the H3 video VAE, MiniMax-H3 video_vae/config.json. The image VAE's own are
# unpublished.
H3_LATENTS_MEAN = (
    0.858090341091156, -0.9606591463088989, 1.0661640167236328, -0.5090325474739075, -0.2727581858634949,
    -1.3675414323806763, -0.2553254961967468, -0.26907554268836975, -0.5376840829849243, -0.0464097298681736,
    0.6657370328903198, 0.19690127670764923, -0.5460608005523682, -0.4035342037677765, -0.23683024942874908,
    0.25928452610969543, -0.30133944749832153, 0.211341992020607, -1.1206848621368408, 0.3581933379173279,
    -0.04225143790245056, 0.2604829967021942, 0.22864092886447906, 0.7056031823158264,
)  # fmt: skip
H3_LATENTS_STD = (
    1.2223774194717407, 1.2767263650894165, 1.6831774711608887, 1.7549455165863037, 1.5636216402053833,
    2.194143533706665, 0.9653137922286987, 1.0569885969161987, 0.841948926448822, 0.7729952931404114,
    1.8955937623977661, 0.946841835975647, 0.7996809482574463, 0.44988900423049927, 0.7197399735450745,
    0.6936293244361877, 2.961095094680786, 2.7694199085235596, 3.0496184825897217, 2.1088054180145264,
    3.276226282119751, 3.1627357006073, 2.2816812992095947, 2.6127843856811523,
)  # fmt: skip


@dataclass(frozen=True)
class DiTConfig:
    """The transformer. Defaults: MiniMax-H3 transformer/config.json, without the audio keys.

    adaln_form: "mlp" feeds every block's modulation from a time MLP, "curve" from a table over time of
    `curve_dim` columns (the form that re-packed checkpoints use). pdd_heads: output heads, one for each step;
    0 means that the one `video_out` serves every step. qkv_rows: order of the fused rows in the file,
    "interleaved" (q, k, v of head 0, then of head 1, ...) or "stacked" (all q, all k, all v). Both have one
    shape, so a mix-up loads in silence.
    """

    hidden_size: int = 5376
    num_layers: int = 50
    token_refiner_num_layers: int = 2
    num_attention_heads: int = 56
    attention_head_dim: int = 128
    ffn_hidden_size: int = 14336
    latents_dim: int = 24
    patch_size: tuple[int, int, int] = (1, 2, 2)
    text_dim: int = 5120
    timestep_input_dim: int = 256
    time_embed_hidden_size: int = 5376
    time_embed_dim: int = 2688
    rope_inv_freq_len: int = 16
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm_eps: float = 1e-5
    final_norm_eps: float = 1e-5
    num_tags: int = 3
    pdd_heads: int = 6
    adaln_form: str = "mlp"
    curve_dim: int = 8
    curve_grid: int = 1025
    qkv_rows: str = "interleaved"
    notes: tuple[str, ...] = ()

    @property
    def inner_size(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def row_size(self) -> int:
        """Values in one row of patchified latents."""
        t, h, w = self.patch_size
        return self.latents_dim * t * h * w

    @property
    def modulation_input(self) -> int:
        return self.curve_dim if self.adaln_form == "curve" else self.time_embed_dim

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DiTConfig:
        where = "transformer/config.json"
        config = read_config(cls, raw, _DIT_SPELLINGS, unpublished=("pdd_heads",), where=where)
        outputs = whole_number(raw, "adaln_out_features", where)
        if outputs is not None and "num_tags" not in raw:
            config = replace(config, num_tags=outputs // (6 * config.hidden_size))
        if outputs is not None and outputs != 6 * config.num_tags * config.hidden_size:
            raise WeightsError(
                f"{where}: adaln_out_features = {outputs} must be 6 * hidden_size for each of one or more "
                "kinds of rows. Restore the file from the checkpoint."
            )
        if config.patch_size != cls.patch_size:
            raise WeightsError(
                f"{where}: patch_size = {list(config.patch_size)}: only {list(cls.patch_size)} is read. "
                "Use a checkpoint of MiniMax-H3-Image."
            )
        return config

    def to_dict(self) -> dict[str, Any]:
        """For a file written from the module's own state dict, whose fused rows are stacked."""
        return {**plain(self), "qkv_rows": "stacked"}


@dataclass(frozen=True)
class VAEConfig:
    """The image VAE: a convolutional encoder and a ViT decoder. Defaults: sizes counted from H3-Image's file.

    downsample_stages: of the encoder's stages, how many halve the picture. refine_channels: width of a small
    convolutional tail after the patches, 0 = none. posterior: "sample" (CPU generator of `posterior_seed`,
    latent rounded to float16) or "mode".
    """

    latent_channels: int = 24
    block_out_channels: tuple[int, ...] = (128, 256, 256, 512, 512, 1024)
    layers_per_block: int = 2
    downsample_stages: int = 4
    norm_num_groups: int = 32
    norm_eps: float = 1e-6
    decoder_hidden_size: int = 1024
    decoder_num_layers: int = 24
    decoder_num_attention_heads: int = 16
    decoder_attention_head_dim: int = 64
    decoder_ffn_mult: int = 4
    decoder_num_register_tokens: int = 4
    decoder_norm_eps: float = 1e-5
    rope_theta: float = 100.0
    rope_ratio: float = 0.75
    rope_axes: int = 3
    latents_mean: tuple[float, ...] = H3_LATENTS_MEAN
    latents_std: tuple[float, ...] = H3_LATENTS_STD
    tile_size: int = 256
    tile_overlap: int = 64
    posterior: str = "sample"
    posterior_seed: int = 42
    refine_channels: int = 0
    qkv_rows: str = "interleaved"
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> int:
        """Pixels per latent cell along one side."""
        return int(2**self.downsample_stages)

    @property
    def rope_pairs(self) -> int:
        """Rotated channel pairs of each decoder head, all axes together."""
        return int(self.decoder_attention_head_dim * self.rope_ratio) // 2

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> VAEConfig:
        where, known = "vae/config.json", dict(raw)
        factors = raw.get("spatial_downsample_factors")
        if isinstance(factors, list | tuple):
            known.setdefault("downsample_stages", factors.count(2))
        elif factors is not None:
            raise WeightsError(
                f"{where}: spatial_downsample_factors = {factors!r:.80} must be a list. Restore the file "
                "from the checkpoint."
            )
        guesses = (
            "latents_mean",
            "latents_std",
            "tile_size",
            "tile_overlap",
            "rope_theta",
            "rope_ratio",
            "rope_axes",
        )
        config = read_config(cls, known, _VAE_SPELLINGS, unpublished=guesses, where=where)
        if "decoder_hidden_size" not in raw:
            width = config.decoder_num_attention_heads * config.decoder_attention_head_dim
            config = replace(config, decoder_hidden_size=width)
        for name, values in (("latents_mean", config.latents_mean), ("latents_std", config.latents_std)):
            if len(values) != config.latent_channels:
                raise WeightsError(
                    f"{where}: {len(values)} values in {name} for {config.latent_channels} latent channels "
                    "(latent_channels): there must be one for each. Restore the file from the checkpoint."
                )
        return config

    def to_dict(self) -> dict[str, Any]:
        """For a file written from the module's own state dict, whose fused rows are stacked."""
        return {**plain(self), "qkv_rows": "stacked"}


@dataclass(frozen=True)
class TextConfig:
    """The small conditioner, kind "mini": a frozen table, a projection and a few causal Qwen3-style layers.

    picture_labels: put "<Picture i>: " before the prompt for each reference. max_tokens: longer prompts are
    refused.
    """

    kind: str = "mini"
    vocab_size: int = 30522
    table_dim: int = 64
    hidden_size: int = 192
    num_layers: int = 2
    num_attention_heads: int = 3
    head_dim: int = 64
    ffn_size: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_tokens: int = 64
    picture_labels: bool = False
    notes: tuple[str, ...] = ()

    @property
    def num_key_value_heads(self) -> int:
        return self.num_attention_heads

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> TextConfig:
        config = read_config(cls, raw, _TEXT_SPELLINGS, unpublished=(), where="text_encoder/config.json")
        if config.kind != cls.kind:
            raise WeightsError(
                f"text_encoder/config.json: kind = {config.kind!r} is no text encoder of this version."
                f"{near(config.kind, (cls.kind, QwenConfig.kind))}"
            )
        return config

    def to_dict(self) -> dict[str, Any]:
        return plain(self)


@dataclass(frozen=True)
class SchedulerConfig:
    """The steps of the distilled model and what its references look like to it.

    base_schedule: unshifted noise levels 1 -> 0, None = uniform. condition_time: how clean references are, 1
    = clean; they are mixed with that much noise. reference_rule: "area" scales a reference to about
    `reference_pixels`, "short_edge" scales its short side to the root of that, "fit" only shrinks it to at
    most that area; "canvas" scales it to about the area of the picture that is drawn and takes no notice of
    `reference_pixels`. reference_noise: "fresh" draws the noise of every reference from a new generator with
    the request's seed, for one frame more than there are references, as the original does; "running" draws it
    from one generator, reference by reference and then the target's, as diffusers does.
    """

    shift: float = 12.0
    num_inference_steps: int = 6
    base_schedule: tuple[float, ...] | None = None
    condition_time: float = 0.999
    reference_rule: str = "area"
    reference_pixels: int = 1024 * 1024
    max_references: int = 16
    reference_noise: str = "fresh"
    notes: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> SchedulerConfig:
        guesses = ("shift", "condition_time", "reference_rule", "max_references")
        where = "scheduler/scheduler_config.json"
        config = read_config(cls, raw, {}, unpublished=guesses, where=where)
        for name, known in (("reference_rule", REFERENCE_RULES), ("reference_noise", REFERENCE_NOISES)):
            value = getattr(config, name)
            if value not in known:
                raise WeightsError(
                    f"{where}: {name} = {value!r} is not a rule of this version.{near(value, known)}"
                )
        return config

    def to_dict(self) -> dict[str, Any]:
        return plain(self)


@dataclass(frozen=True)
class CanvasConfig:
    """Which pictures the checkpoint draws, from the block "canvas" of model_index.json.

    small_pixels: sizes up to this area are drawn at about the area `well_drawn` and made smaller. Defaults:
    H3-Image's published sizes.
    """

    multiple: int = 32
    min_side: int = 256
    max_side: int = 8192
    max_pixels: int = 20_000_000
    max_ratio: float = 3.0
    default_width: int = 2048
    default_height: int = 2048
    small_pixels: int = 0
    well_drawn: int = 2048 * 2048
    max_prompt_characters: int = 8000
    notes: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> CanvasConfig:
        """From the block; the published sizes when it is empty."""
        if not raw:
            return PUBLISHED_CANVAS
        return read_config(cls, raw, {}, unpublished=(), where="model_index.json, block canvas")

    def to_dict(self) -> dict[str, Any]:
        return plain(self)


# Requests for about 1K (1024 x 1024 and its ratios) are drawn at about 2048 x 2048: vLLM-Omni's announcement.
PUBLISHED_CANVAS = CanvasConfig(small_pixels=1024 * 1024 * 5 // 4)


@dataclass(frozen=True)
class H3Config:
    """All components of one checkpoint. folder: where it lies, for what is no tensor (the word list).

    places: component -> the folder or file of its tensors, where that is not the usual folder. heads: the
    file of the steps' output heads, where they are not among the transformer's tensors.
    """

    dit: DiTConfig = field(default_factory=DiTConfig)
    vae: VAEConfig = field(default_factory=VAEConfig)
    text: TextConfig | QwenConfig = field(default_factory=TextConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    canvas: CanvasConfig = PUBLISHED_CANVAS
    folder: Path | None = None
    places: Mapping[str, Path] = field(default_factory=dict)
    heads: Path | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        parts = (self.dit, self.vae, self.text, self.scheduler, self.canvas)
        return tuple(note for part in parts for note in part.notes)

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        *,
        dit: DiTConfig | None = None,
        vae: VAEConfig | None = None,
        places: Mapping[str, Path] | None = None,
    ) -> H3Config:
        """The configs of a checkpoint folder laid out as model_index.json + one folder for each component.

        dit, vae: configs that were read elsewhere. places: where components lie, when not in these folders.
        Raises WeightsError when a config is missing, holds wrong values, or does not fit the others.
        """
        root, places = Path(path), dict(places or {})
        index = _index(root)
        own = read_json(root / "scheduler" / "scheduler_config.json", required=False)
        private = read_private_block(root, index, own)
        scheduler = SchedulerConfig.from_dict({**private.schedule, **own})
        dit = dit or DiTConfig.from_dict(read_json(root / "transformer" / "config.json"))
        if private.heads is not None:
            dit = replace(dit, pdd_heads=scheduler.num_inference_steps)
        text = places.get("text_encoder", root / "text_encoder")
        # A text encoder of another checkpoint brings its own tokenizer, if that lies beside it.
        brings = any((text.parent / name).is_dir() for name in ("tokenizer", "processor"))
        config = cls(
            dit=dit,
            vae=vae or VAEConfig.from_dict(read_json(root / "vae" / "config.json")),
            text=_text_config(text, root),
            scheduler=scheduler,
            canvas=CanvasConfig.from_dict(inner_object(index, "canvas", "model_index.json")),
            folder=text.parent if brings else root,
            places=places,
            heads=private.heads,
        )
        require_buildable(config)
        return config


def _index(root: Path) -> dict[str, Any]:
    """What describes the checkpoint as a whole; single files and their neighbours have no such thing."""
    modular = root / "modular_model_index.json"
    whole = (root / "transformer").is_dir() and not modular.is_file()
    return read_json(root / "model_index.json", required=whole) or read_json(modular, required=False)


def _text_config(text: Path, root: Path) -> TextConfig | QwenConfig:
    """The encoder's config; the big one comes with that of its image processor, in one of several places."""
    # A single file has no config, and is the big one.
    alone = text.is_file() and text.suffix == ".safetensors"
    raw = {} if alone else read_json(text / "config.json")
    if not alone and not is_qwen(raw):
        return TextConfig.from_dict(raw)
    folders = (*(text.parent / name for name in ("processor", "tokenizer")), text, root / "processor")
    places = (folder / "preprocessor_config.json" for folder in folders)
    found = (read_json(place, required=False) for place in places)
    return QwenConfig.from_dict(raw, next((processor for processor in found if processor), None))


DIFFUSERS_SPELLINGS = {
    "num_refiner_layers": "token_refiner_num_layers",
    "ffn_dim": "ffn_hidden_size",
    "in_channels": "latents_dim",
    "freq_dim": "timestep_input_dim",
    "time_embed_hidden_dim": "time_embed_hidden_size",
    "rope_freq_dim": "rope_inv_freq_len",
}
_DIT_SPELLINGS = {**DIFFUSERS_SPELLINGS, "num_pdd_heads": "pdd_heads", "pdd_num_heads": "pdd_heads"}
_VAE_SPELLINGS = {
    "vae_tile_size": "tile_size",
    "vae_tile_overlap_min": "tile_overlap",
    "z_channels": "latent_channels",
    "decoder_rope_theta": "rope_theta",
    "decoder_rope_dim_ratio": "rope_ratio",
}
_TEXT_SPELLINGS = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_size",
    "max_position_embeddings": "max_tokens",
}
