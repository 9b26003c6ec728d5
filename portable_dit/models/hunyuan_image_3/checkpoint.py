"""From the tensors of a checkpoint to the parameters of these modules.

One folder of shards holds everything: text model, image layers, autoencoder, vision tower. A component takes
what it needs by name; what only words or edits need is left on the disk. Two row orders differ from ours:
attention has the heads of one key group together, and gated projections have the plain half first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from portable_dit.models.hunyuan_image_3.config import DiTConfig, HunyuanConfig, VAEConfig
from portable_dit.models.hunyuan_image_3.names import dit_tensors, taps_of
from portable_dit.models.spec import StoredRows, TensorMap, TensorSource

# Stored -> ours, tried in order. A stored name that none of a component's patterns matches is not its own.
_TIME = r"^(timestep_emb|guidance_emb|timestep_r_emb|time_embed|time_embed_2)\.mlp"
_DIT_NAMES = (
    (rf"{_TIME}\.0\.", r"\1.proj_in."),
    (rf"{_TIME}\.2\.", r"\1.proj_out."),
    (r"^patch_embed\.model\.0\.", "patch_embed.conv."),
    (r"^patch_embed\.model\.1\.", "patch_embed.block."),
    (r"^final_layer\.model\.0\.", "final_layer.block."),
    (r"^final_layer\.model\.1\.0\.", "final_layer.norm."),
    (r"^final_layer\.model\.1\.2\.", "final_layer.conv."),
    (r"\.block\.in_layers\.0\.", ".block.in_norm."),
    (r"\.block\.in_layers\.2\.", ".block.in_conv."),
    (r"\.block\.emb_layers\.1\.", ".block.time_proj."),
    (r"\.block\.out_layers\.0\.", ".block.out_norm."),
    (r"\.block\.out_layers\.3\.", ".block.out_conv."),
    (r"\.block\.skip_connection\.", ".block.skip."),
    (r"^model\.layers\.", "layers."),
    (r"\.mlp\.gate\.wg\.", ".mlp.gate."),
    (r"\.mlp\.experts\.(\d+)\.(gate_and_up_proj|down_proj)\.", r".mlp.experts.\2.\1."),
)
_DIT = re.compile(
    r"^(model\.layers|patch_embed|final_layer"
    r"|timestep_emb|guidance_emb|timestep_r_emb|time_embed|time_embed_2)\."
)
_TABLE, _VAE = "model.wte.weight", re.compile(r"^vae\.decoder\.")


def tensor_map(component: str, shapes: Mapping[str, tuple[int, ...]], config: HunyuanConfig) -> TensorMap:
    """How the stored tensors become the parameters of one component; everything else is unused by it."""
    if component == "dit":
        sources = {
            dit_name(name): TensorSource((name,), _dit_change(name, config.dit), by_rows=True)
            for name in shapes
            if _DIT.match(name)
        }
    elif component == "vae":
        sources = {
            name.removeprefix("vae.decoder."): TensorSource((name,), _vae_change(name, config.vae))
            for name in shapes
            if _VAE.match(name)
        }
    else:
        sources = {"wte.weight": TensorSource((_TABLE,), _as_it_is)} if _TABLE in shapes else {}
    used = {name for source in sources.values() for name in source.names}
    scales = {name for name in shapes if name.endswith("_scale") and name.removesuffix("_scale") in used}
    return TensorMap(sources, frozenset(shapes.keys() - used - scales))


def dit_name(stored: str) -> str:
    """Our name of one of the transformer's tensors."""
    for pattern, ours in _DIT_NAMES:
        stored = re.sub(pattern, ours, stored)
    return stored


def stored_rows(config: HunyuanConfig) -> Mapping[str, StoredRows]:
    """Stored name -> where the rows of that matrix of the transformer lie in ours."""
    found = {}
    for name, shape in dit_tensors(config.dit, config.vae.latent_channels).items():
        if len(shape) == 2:
            ours = _dit_change(name, config.dit)(torch.arange(shape[0])[:, None])[:, 0]
            found[name] = StoredRows(dit_name(name), ours.argsort())
    return found


def stack_qkv_rows(rows: Tensor, config: DiTConfig) -> Tensor:
    """[key groups * (queries, key, value) * D, ...] -> [all q ; all k ; all v]."""
    groups, queries = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    grouped = rows.reshape(groups, queries + 2, -1, *rows.shape[1:])  # [groups, queries + 2, D, ...]
    parts = torch.split(grouped, [queries, 1, 1], dim=1)
    return torch.cat([part.flatten(0, 2) for part in parts])


def swap_halves(rows: Tensor) -> Tensor:
    """[up ; gate] -> [gate ; up] and back."""
    return torch.cat(rows.chunk(2)[::-1])


def fold_taps(kernel: Tensor, taps: tuple[int, ...]) -> Tensor:
    """The taps of a 3-D kernel [out, in, 3, 3, 3] side by side: [out, taps * in, 3, 3], time outermost."""
    return torch.cat([kernel[:, :, tap] for tap in taps], dim=1)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _dit_change(name: str, config: DiTConfig) -> Callable[[Tensor], Tensor]:
    if name.endswith(".self_attn.qkv_proj.weight"):
        return lambda rows: stack_qkv_rows(rows, config)
    return swap_halves if ".gate_and_up_proj." in name else _as_it_is


def _vae_change(name: str, config: VAEConfig) -> Callable[[Tensor], Tensor]:
    if ".attn_1." in name and name.endswith(("q.weight", "k.weight", "v.weight", "proj_out.weight")):
        return lambda kernel: kernel.flatten(1)  # 1 x 1 x 1: a linear layer over channels
    if not name.endswith(
        ("conv.weight", "conv1.weight", "conv2.weight", "conv_in.weight", "conv_out.weight")
    ):
        return _as_it_is
    taps = taps_of(name.removeprefix("vae.decoder."), config)
    return lambda kernel: fold_taps(kernel, taps)
