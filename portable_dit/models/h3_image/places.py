"""Where the parts of a checkpoint lie, and in which dialect they are. Torch-free: it reads headers alone.

A checkpoint is a folder with one folder for each component, diffusers' copies of those, a folder as ComfyUI
keeps it, or a single file with the transformer beside a folder with the rest. What names cannot tell is asked
for: a bfloat16 file in ComfyUI's row order has the very names and shapes of the original, and the wrong order
draws noise.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from portable_dit.errors import RecipeError, WeightsError
from portable_dit.models.config_json import read_json
from portable_dit.models.h3_image.config import DiTConfig, H3Config, VAEConfig
from portable_dit.models.h3_image.markers import FP8, INT8, MARKER, W4A8, read_marker
from portable_dit.models.h3_image.private_block import HEADS_CONFIG
from portable_dit.models.spec import HubFiles
from portable_dit.safetensors_file import StoredTensor, stored_tensors

AUTO, ORIGINAL, DIFFUSERS, COMFY = DIALECTS = ("auto", "original", "diffusers", "comfy")
COMFY_FOLDER = "diffusion_models"
TEXT_ENCODER = ("MiniMaxAI/MiniMax-H3", "FL2VA/text_encoder")
CURVES = ("adaln_t_table", "time_embedder.table")
STORED_AS = {INT8: "int8", FP8: "fp8", W4A8: "4 bits"}
# The formats that take stored numbers as they are, by form and whether it is rotated.
KEPT_AS = {(INT8, False): "int8_row", (INT8, True): "int8_row_rotated", (FP8, False): "fp8_row"}


def read_checkpoint(
    root: Path, *, dialect: str = AUTO, components: Mapping[str, Path] | None = None
) -> H3Config:
    """The configs of a checkpoint, with `places` saying where each component's tensors lie.

    root: its folder, or a single file with the transformer. components: parts that lie elsewhere. Raises
    WeightsError when a part is missing, RecipeError when only a key of the recipe can tell the dialect.
    """
    root = root.absolute()  # places are joined to the checkpoint's folder later on
    given = {name: place.absolute() for name, place in (components or {}).items()}
    base = root
    if root.is_file():
        given.setdefault("dit", root)
        base = root.parent.parent if root.parent.name == COMFY_FOLDER else root.parent
    places = {
        "dit": given.get("dit") or _dit_place(base, dialect),
        "vae": given.get("vae") or _copy_of(base, "vae", dialect),
        "text_encoder": given.get("text_encoder") or _text_place(base),
    }
    for name, place in given.items():
        if not place.exists():
            raise WeightsError(f"components.{name}: {place}: no such file or folder. Correct the path.")
    config = H3Config.from_folder(
        base, dit=_dit_config(places["dit"], dialect), vae=_vae_config(places["vae"]), places=places
    )
    text, place = config.text, places["text_encoder"]
    stored = _storage_notes("text_encoder", place, _headers(place) if place.exists() else {})
    return replace(config, text=replace(text, notes=(*text.notes, *stored)))


def hub_files(names: Sequence[str], *, dialect: str = AUTO) -> HubFiles:
    """Which of a repository's files make one checkpoint, so that its other copies stay where they are.

    A text encoder that is not among them is MiniMax-H3's own.
    """
    folders = {name.split("/")[0] for name in names if name.endswith(".safetensors")}
    wanted = {"dit": [COMFY_FOLDER, "transformer", "transformer_diffusers"], "vae": ["vae", "vae_diffusers"]}
    if dialect == DIFFUSERS:
        wanted = {"dit": ["transformer_diffusers", "transformer"], "vae": ["vae_diffusers", "vae"]}
    elif dialect != COMFY:
        wanted["dit"] = [*wanted["dit"][1:], COMFY_FOLDER]
    taken = {"scheduler", "tokenizer", "processor"}
    for component, choices in wanted.items():
        found = next((folder for folder in choices if folder in folders), None)
        if found is None:
            raise WeightsError(
                f"no {component} in the repository: looked for .safetensors files in {', '.join(choices)}. "
                "Name a repository that holds a whole checkpoint."
            )
        taken.add(found)
    singles = [
        name for name in names if name.startswith(f"{COMFY_FOLDER}/") and name.endswith(".safetensors")
    ]
    if COMFY_FOLDER in taken and len(singles) > 1:
        raise WeightsError(
            f"{COMFY_FOLDER} of the repository holds {len(singles)} transformers: {', '.join(singles)}. "
            "Download one and name its file in weights."
        )
    taken |= {name.split("/")[0] for name in names if name.endswith(f"/{HEADS_CONFIG}")}
    elsewhere = {}
    if "text_encoder" in folders:
        taken.add("text_encoder")
    else:
        elsewhere["text_encoder"] = TEXT_ENCODER
    return HubFiles(
        tuple(n for n in names if n.split("/")[0] in taken or ("/" not in n and n.endswith(".json"))),
        elsewhere,
    )


def _dit_place(base: Path, dialect: str) -> Path:
    """The folder or file of the transformer; the original's folder when there is none, for the message."""
    copy = _copy_of(base, "transformer", dialect)
    if copy.is_dir() and dialect != COMFY:
        return copy
    files = sorted((base / COMFY_FOLDER).glob("*.safetensors"))
    if len(files) > 1:
        raise WeightsError(
            f"{base / COMFY_FOLDER}: holds {len(files)} transformers: {', '.join(f.name for f in files)}. "
            f"Name one: weights: {files[0]}"
        )
    return files[0] if files else copy


def _text_place(base: Path) -> Path:
    """The folder of the text encoder, or the one file in ComfyUI's folder of them."""
    files = sorted((base / "text_encoders").glob("*.safetensors"))
    usual = base / "text_encoder"
    return files[0] if len(files) == 1 and not usual.is_dir() else usual


def _copy_of(base: Path, name: str, dialect: str) -> Path:
    """A component's folder: the original's, or diffusers' copy of it where that is wanted or alone."""
    original, copy = base / name, base / f"{name}_diffusers"
    wanted = copy.is_dir() and (dialect == DIFFUSERS or not original.is_dir())
    return copy if wanted else original


def _headers(place: Path) -> Mapping[str, StoredTensor]:
    """The stored tensors of a place, {} where there are no weights yet."""
    if place.is_dir() and not any(place.glob("*.safetensors")):
        return {}
    return stored_tensors(place)


def _dit_config(place: Path, dialect: str) -> DiTConfig:
    """The transformer's config, from its file where there is one, with what only the weights can tell."""
    stored = _headers(place) if place.exists() else {}
    shapes = {_bare(name): tensor.shape for name, tensor in stored.items()}
    has_file = (place / "config.json").is_file()
    if has_file or not shapes:
        config = DiTConfig.from_dict(read_json(place / "config.json"))
    else:
        config = _dit_config_of(shapes)
    if not shapes:
        return config
    found = _dialect(place, shapes, dialect, has_config=has_file)
    if found == COMFY:
        config = replace(config, qkv_rows="stacked")
    curve = next((shapes[name] for name in CURVES if name in shapes), None)
    if curve is not None:
        config = replace(config, adaln_form="curve", curve_grid=curve[0], curve_dim=curve[1])
    return replace(config, notes=(*config.notes, *_storage_notes("dit", place, stored)))


def _bare(name: str) -> str:
    return name.removeprefix("model.").removeprefix("diffusion_model.")


def _dialect(place: Path, shapes: Mapping[str, tuple[int, ...]], asked: str, *, has_config: bool) -> str:
    """Which dialect the names speak; what was asked decides where they do not say."""
    if any(name.startswith("transformer_blocks.") for name in shapes):
        told = DIFFUSERS
    elif "adaln_t_table" in shapes or any(name.endswith(MARKER) for name in shapes):
        told = COMFY
    else:
        told = AUTO
    if told != AUTO:
        if asked not in (AUTO, told):
            raise RecipeError(
                f"checkpoint_dialect: {asked}: the names in {place} are {told}. Leave the key out, or name "
                "other weights."
            )
        return told
    if asked == DIFFUSERS:
        raise RecipeError(
            f"checkpoint_dialect: diffusers: the names in {place} are not diffusers'. Leave the key out, or "
            "name other weights."
        )
    if asked == AUTO and not has_config:
        raise RecipeError(
            f"weights: {place}: a file in the original's names and without a config.json may hold its fused "
            "rows head by head (original) or all queries first (ComfyUI); names and shapes are the same, and "
            "the wrong order draws noise. Say checkpoint_dialect: original or checkpoint_dialect: comfy."
        )
    return ORIGINAL if asked == AUTO else asked


def _storage_notes(component: str, place: Path, stored: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    """What a plan should say of weights that are quantised in the file. WeightsError for forms unknown."""
    markers = [read_marker(name, t.content()) for name, t in stored.items() if name.endswith(MARKER)]
    counts = Counter((marker.format, marker.rotated > 0) for marker in markers)
    notes = []
    for (form, rotated), count in sorted(counts.items()):
        basis = " in a rotated basis" if rotated else ""
        format = KEPT_AS.get((form, rotated))
        kept = f" quantization.{component}={format} keeps them." if format else ""
        notes.append(
            f"{place.name}: {count} layers are stored in {STORED_AS[form]}{basis}; loading expands them "
            f"exactly, and makes the precision or format of the recipe from that.{kept}"
        )
    static = sum(name.endswith(".input_scale") for name in stored)
    if static:
        notes.append(f"{place.name}: {static} fixed input scales are not used; inputs bring their own.")
    return tuple(notes)


def _dit_config_of(shapes: Mapping[str, tuple[int, ...]]) -> DiTConfig:
    """The sizes of a transformer that comes without a config.json, read off its tensors."""

    def shape(*names: str) -> tuple[int, ...]:
        found = next((shapes[name] for name in names if name in shapes), None)
        if found is None:
            raise WeightsError(
                f"{names[0]}: missing, and there is no config.json: no transformer of MiniMax-H3-Image."
            )
        return found

    def count(pattern: str) -> int:
        return 1 + max((int(m[1]) for name in shapes if (m := re.match(pattern, name))), default=-1)

    hidden, row = shape("video_patch_proj.weight", "proj_in.weight")
    block = "transformer_blocks.0." if "transformer_blocks.0.attn.to_q.weight" in shapes else "blocks.0."
    (head_dim,) = shape(f"{block}attn.q_norm.weight", f"{block}attn.norm_q.weight")
    thirds = 3 if block == "blocks.0." else 1
    inner = shape(f"{block}attn.qkv_proj.weight", f"{block}attn.to_q.weight")[0] // thirds
    default = DiTConfig()
    config = replace(
        default,
        hidden_size=hidden,
        latents_dim=row // (default.patch_size[1] * default.patch_size[2]),
        text_dim=shape("condition_proj.weight", "context_embedder.weight")[1],
        num_layers=count(r"(?:transformer_)?blocks\.(\d+)\."),
        token_refiner_num_layers=count(r"token_refiner\.(?:refiner_)?blocks\.(\d+)\."),
        num_attention_heads=inner // head_dim,
        attention_head_dim=head_dim,
        ffn_hidden_size=shape(f"{block}mlp.fc1.weight", f"{block}ff.net.0.proj.weight")[0] // 2,
        num_tags=shape(f"{block}adaln_proj.linear.weight")[0] // (6 * hidden),
        rope_inv_freq_len=head_dim // 8,  # three axes turn 96 of 128 channels
        notes=("the transformer comes without a config.json; its sizes are read off its tensors.",),
    )
    if any(name in shapes for name in CURVES):
        return config
    embed, wide = shape("time_embedder.proj_out.weight", "time_embedder.linear_2.weight")
    inputs = shape("time_embedder.proj_in.weight", "time_embedder.linear_1.weight")[1]
    return replace(config, timestep_input_dim=inputs, time_embed_hidden_size=wide, time_embed_dim=embed)


def _vae_config(place: Path) -> VAEConfig:
    """The VAE's config, or the published sizes for weights that come without one."""
    alone = place.is_file() or (any(place.glob("*.safetensors")) and not (place / "config.json").is_file())
    raw = {} if alone else read_json(place / "config.json")
    return VAEConfig.from_dict(raw)
