"""Our parameters laid out as each dialect stores them: the way back from what `checkpoint.py` reads.

Letters: N out features, K in features.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_dit.models.h3_image.checkpoint import interleave_qkv_rows, swap_halves
from portable_dit.models.h3_image.config import DIFFUSERS_SPELLINGS, DiTConfig, VAEConfig
from portable_dit.models.h3_image.diffusers_names import DIT_NAMES, VAE_NAMES, Names
from portable_dit.models.h3_image.markers import FP8, INT8, MARKER, W4A8
from portable_dit.models.h3_image.quantized import rotate_weight
from portable_dit.models.spec import StoredRows

Laid = dict[str, Tensor]  # stored name -> tensor

_QUANTIZED = re.compile(r"^blocks\.\d+\.(attn\.(qkv_proj|out_proj)|mlp\.fc[12])\.weight$")
W4A8_GROUP = 16
# comfy-kitchen's levels for normally distributed weights.
W4A8_LEVELS = (
    -0.980602, -0.794529, -0.638165, -0.500986, -0.377321, -0.263187, -0.155210, -0.050720,
    0.052541, 0.156985, 0.265284, 0.379533, 0.502636, 0.638953, 0.794876, 0.980671,
)  # fmt: skip
_OWN_KEYS = ("qkv_rows", "adaln_form", "curve_dim", "curve_grid", "num_tags")


@dataclass(frozen=True)
class Dialect:
    """How a distribution lays the model out. dit_file: the single file of its transformer, None = shards.

    curve: modulation as a table over time. quantized: the marker format of the blocks' linears.
    """

    name: str
    diffusers: bool = False
    dit_file: str | None = None
    curve: bool = False
    quantized: str | None = None

    @property
    def dit_folder(self) -> str:
        if self.dit_file is not None:
            return "diffusion_models"
        return "transformer_diffusers" if self.diffusers else "transformer"

    @property
    def vae_folder(self) -> str:
        return "vae_diffusers" if self.diffusers and self.dit_file is None else "vae"

    def dit_config(self, config: DiTConfig) -> DiTConfig:
        """The config of the modules whose parameters this dialect holds."""
        return replace(config, adaln_form="curve") if self.curve else config

    def metadata(self, config: DiTConfig, path: str) -> dict[str, str]:
        """What the header of a file says beside its tensors."""
        if not self.curve or not path.startswith(self.dit_folder):
            return {}
        sizes = {"curve_dim": str(config.curve_dim), "curve_grid": str(config.curve_grid)}
        return {"adaln_form": "curve", **sizes, "adaln_output_dtype": "bfloat16"}

    def dit_json(self, config: DiTConfig) -> dict[str, Any]:
        """The transformer's config.json, in the spelling of this dialect."""
        values = {k: v for k, v in config.to_dict().items() if k not in _OWN_KEYS}
        if self.diffusers:
            theirs = {ours: name for name, ours in DIFFUSERS_SPELLINGS.items()}
            values = {theirs.get(key, key): value for key, value in values.items()}
            return {"_class_name": "MiniMaxH3Transformer3DModel", **values}
        width = config.hidden_size
        outputs = {
            "adaln_out_features": 6 * config.num_tags * width,
            "final_adaln_out_features": 2 * width,
        }
        return {"_class_name": "MiniMaxH3DiTModel", **values, **outputs}

    def vae_json(self, config: VAEConfig) -> dict[str, Any]:
        """The VAE's config.json."""
        values = {k: v for k, v in config.to_dict().items() if k not in _OWN_KEYS}
        if not self.diffusers:
            return {"_class_name": "AutoencoderKLMiniMaxH3", **values}
        stages = len(config.block_out_channels)
        factors = [2 if stage < config.downsample_stages else 1 for stage in range(stages)]
        extra = {"spatial_downsample_factors": factors, "temporal_downsample_factors": [1] * stages}
        return {"_class_name": "AutoencoderKLMiniMaxH3", **values, **extra}


_COMFY = "minimax_h3_image_pruned_{}.safetensors"
DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect("original"),
        Dialect("diffusers", diffusers=True),
        Dialect("comfy", dit_file="minimax_h3_image_bf16.safetensors"),
        Dialect("comfy-curve", dit_file=_COMFY.format("bf16"), curve=True),
        Dialect("int8-convrot", dit_file=_COMFY.format("int8_convrot"), curve=True, quantized=INT8),
        Dialect(
            "fp8", diffusers=True, dit_file="MiniMax-H3-Image-FP8.safetensors", curve=True, quantized=FP8
        ),
        Dialect("w4a8", dit_file=_COMFY.format("w4a8"), curve=True, quantized=W4A8),
    )
}


def lay_out_dit(name: str, tensor: Tensor, config: DiTConfig, dialect: Dialect) -> Laid:
    """One parameter of the transformer as the dialect stores it.

    `final_layer.heads.*` is given with the base layer in front: [1 + steps, ...].
    """
    if name.startswith("final_layer.heads."):
        return _lay_out_heads(name.rpartition(".")[2], tensor, dialect)
    if dialect.diffusers:
        parts = _split(name, tensor, DIT_NAMES)
    elif name.endswith(".attn.qkv_proj.weight") and dialect.dit_file is None:
        parts = {name: interleave_qkv_rows(tensor, config.num_attention_heads)}
    else:
        parts = {name: tensor}
    if dialect.quantized is None or not _QUANTIZED.match(name):
        return parts
    quantized: Laid = {}
    for stored, part in parts.items():
        quantized |= _quantized(stored.removesuffix(".weight"), part.float(), dialect.quantized)
    return quantized


def stored_rows(
    shapes: Mapping[str, tuple[int, ...]], config: DiTConfig
) -> Mapping[str, Mapping[str, StoredRows]]:
    """Dialect -> stored name -> where the rows of that matrix lie in ours, that of the config first.

    The heads of the steps are left out, since they are packed by their numbers and not by rows alone, and so
    is the base layer that they take the place of. Where the checkpoint itself has its fused rows stacked, a
    name of the original's means such rows too.
    """
    outputs = ("final_layer.heads.", "final_layer.video_out.") if config.pdd_heads else ()
    stacked = config.qkv_rows == "stacked"
    names = ("comfy", "diffusers") if stacked else ("original", "diffusers", "comfy")
    matrices = {
        name: torch.arange(shape[0])[:, None]
        for name, shape in shapes.items()
        if len(shape) == 2 and not name.startswith(outputs)
    }
    return {
        dialect: {
            stored: StoredRows(ours, rows[:, 0])
            for ours, numbers in matrices.items()
            for stored, rows in lay_out_dit(ours, numbers, config, DIALECTS[dialect]).items()
        }
        for dialect in names
    }


def lay_out_vae(name: str, tensor: Tensor, config: VAEConfig, dialect: Dialect) -> Laid:
    """One parameter of the VAE as the dialect stores it; kernels get the taps that one frame never meets."""
    if tensor.ndim == 4:
        taps = 3 if tensor.shape[-1] == 3 else 1
        tensor = F.pad(tensor[:, :, None], (0, 0, 0, 0, taps - 1, 0))  # zeros before, the real one last
    if dialect.vae_folder == "vae_diffusers":
        return _split(name, tensor, VAE_NAMES)
    if ".attn.to_qkv." in name:
        return {name: interleave_qkv_rows(tensor, config.decoder_num_attention_heads)}
    return {name: tensor}


def _split(name: str, tensor: Tensor, names: Names) -> Laid:
    """diffusers' form: queries, keys and values apart, halves of gated layers exchanged."""
    if f".{names.gated}." in name:
        tensor = swap_halves(tensor)
    if f".{names.fused}." not in name:
        return {names.theirs(name): tensor.contiguous()}
    parts = zip("qkv", tensor.chunk(3), strict=True)
    return {
        names.theirs(name.replace(names.fused, f"attn.to_{letter}")): part.contiguous()
        for letter, part in parts
    }


def _lay_out_heads(leaf: str, both: Tensor, dialect: Dialect) -> Laid:
    """The base layer and the heads of all steps: apart, as a stack, or as a bank of offsets."""
    base, heads = both[0], both[1:]
    if dialect.diffusers:
        return {f"proj_out.{leaf}": base, f"pdd_proj_out.{leaf}": heads.contiguous()}
    if dialect.dit_file is not None:
        return {f"final_layer.video_out.{leaf}": torch.cat([base[None], heads - base]).flatten(0, 1)}
    apart = {f"final_layer.pdd_heads.{step}.{leaf}": head for step, head in enumerate(heads)}
    return {f"final_layer.video_out.{leaf}": base, **apart}


def _quantized(layer: str, weight: Tensor, form: str) -> Laid:
    """A linear weight [N, K] in a marked form."""
    if form == FP8:
        scale = weight.abs().amax().clamp_min(1e-12) / 448
        values = (weight / scale).to(torch.float8_e4m3fn)
        laid = {f"{layer}.weight": values, f"{layer}.weight_scale": scale, **_marker(layer, {"format": FP8})}
        # Some layers of published files bring a scale for their input too.
        return {**laid, f"{layer}.input_scale": torch.tensor(0.05)} if layer.endswith("net.2") else laid
    channels = next(size for size in (256, 64, 16, 4) if weight.shape[1] % size == 0)
    facts = {"format": form, "convrot": True, "convrot_groupsize": channels}
    turned = rotate_weight(weight, channels)
    if form == INT8:
        scale = turned.abs().amax(dim=1).clamp_min(1e-12) / 127  # [N]
        values = (turned / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        return {f"{layer}.weight": values, f"{layer}.weight_scale": scale, **_marker(layer, facts)}
    return {**_w4a8(layer, turned), **_marker(layer, facts)}


def _w4a8(layer: str, weight: Tensor) -> Laid:
    """A rotated weight in groups of 4-bit codes, two to a byte."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // W4A8_GROUP, W4A8_GROUP)
    largest = groups.abs().amax(dim=-1).clamp_min(1e-8)  # [N, groups]
    levels = torch.tensor(W4A8_LEVELS, device=weight.device)
    codes = torch.bucketize(groups / largest[..., None], (levels[1:] + levels[:-1]) / 2)
    codes = codes.to(torch.uint8).reshape(rows, columns)
    s_channel = largest.amax(dim=1) * max(W4A8_LEVELS) / 127  # [N]
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).view(torch.int8)
    return {
        f"{layer}.weight": packed,
        f"{layer}.weight_s_rel": (largest / s_channel[:, None]).to(torch.float8_e4m3fn),
        f"{layer}.weight_s_channel": s_channel,
        f"{layer}.weight_codebook": torch.tensor(W4A8_LEVELS),
    }


def _marker(layer: str, facts: Mapping[str, Any]) -> Laid:
    return {f"{layer}{MARKER}": torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)}
