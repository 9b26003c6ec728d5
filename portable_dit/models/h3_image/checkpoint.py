"""From the tensors of a checkpoint to the parameters of these modules.

Four dialects hold one model: the original files, diffusers' conversion, ComfyUI's single files, and our own.
They differ in names, in the row order of fused projections, in which half of a gated projection comes first,
in how the heads of single steps are packed, and in whether numbers are quantised. All shapes agree, so a
wrong guess loads in silence and draws noise: the dialect is read from names that only it has, and the one
thing names cannot tell (`qkv_rows`) is a config value, settled in `places.py`.

`tensor_map` looks at names and shapes alone. It answers, for each of our parameters, which stored tensors it
is made of and how; a loader streams them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from portable_dit.errors import WeightsError
from portable_dit.models.h3_image.config import DiTConfig, H3Config, VAEConfig
from portable_dit.models.h3_image.diffusers_names import DIT_NAMES, VAE_NAMES, Names
from portable_dit.models.h3_image.quantized import plain_sources
from portable_dit.models.h3_image.qwen_config import QwenConfig
from portable_dit.models.h3_image.qwen_names import text_encoder_map
from portable_dit.models.spec import TensorMap, TensorSource

Shapes = Mapping[str, tuple[int, ...]]
FOLDERS = {"dit": "transformer", "vae": "vae", "text_encoder": "text_encoder"}
# What single files may put before every name.
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "vae.", "text_encoder.")

# A bank of offsets holds small corrections behind one full head: below this share of its norm.
OFFSET_NORM = 0.5


def tensor_map(
    component: str, shapes: Shapes, config: H3Config, *, texts: Mapping[str, bytes] | None = None
) -> TensorMap:
    """How the tensors of one component's files become its parameters.

    shapes: name -> shape of everything stored. texts: the bytes of the markers among them. A name that no
    dialect knows stands for itself, so that the loader reports it as unexpected. Raises WeightsError for
    packings that this version cannot read.
    """
    texts = texts or {}
    prefix = next((p for p in PREFIXES if shapes and all(name.startswith(p) for name in shapes)), "")
    if prefix:
        bare = {name.removeprefix(prefix): shape for name, shape in shapes.items()}
        inner = tensor_map(
            component, bare, config, texts={n.removeprefix(prefix): text for n, text in texts.items()}
        )
        sources = {
            ours: replace(source, names=tuple(prefix + name for name in source.names))
            for ours, source in inner.sources.items()
        }
        return TensorMap(sources, frozenset(prefix + name for name in inner.unused))
    stored, serving = plain_sources(shapes, texts)
    if component == "dit":
        plan = _dit_map(stored, shapes, config.dit)
    elif component == "vae":
        plan = _vae_map(stored, shapes, config.vae)
    elif isinstance(config.text, QwenConfig):
        plan = text_encoder_map(stored, config.text)
    else:
        plan = TensorMap(stored, frozenset())
    return TensorMap(plan.sources, plan.unused | serving)


def stack_qkv_rows(rows: Tensor, heads: int) -> Tensor:
    """[heads * 3 * D, ...], interleaved for each head, -> [all q ; all k ; all v]."""
    return rows.reshape(heads, 3, -1, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)


def interleave_qkv_rows(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `stack_qkv_rows`."""
    return rows.reshape(3, heads, -1, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)


def swap_halves(rows: Tensor) -> Tensor:
    """[value ; gate] -> [gate ; value] and back."""
    return torch.cat(rows.chunk(2)[::-1])


def last_tap(kernel: Tensor) -> Tensor:
    """A 3-D kernel, causal in time, as it acts on a single frame; a 2-D one as it is."""
    return kernel[:, :, -1].contiguous() if kernel.ndim == 5 else kernel


def _then(source: TensorSource, change: Callable[[Tensor], Tensor], *, by_rows: bool = False) -> TensorSource:
    """The source with a change behind it. by_rows: the change only puts whole rows in order."""
    return TensorSource(
        source.names, lambda *tensors: change(source.make(*tensors)), by_rows=source.by_rows and by_rows
    )


def _join(
    sources: list[TensorSource], join: Callable[[list[Tensor]], Tensor], *, by_rows: bool = False
) -> TensorSource:
    """One source of several: each takes its own share of the tensors. by_rows: as for `_then`."""
    ends = [0]
    for source in sources:
        ends.append(ends[-1] + len(source.names))

    def make(*tensors: Tensor) -> Tensor:
        return join([s.make(*tensors[ends[i] : ends[i + 1]]) for i, s in enumerate(sources)])

    names = tuple(name for source in sources for name in source.names)
    return TensorSource(names, make, by_rows=by_rows and all(source.by_rows for source in sources))


_SPLIT_QKV = re.compile(r"\.attn\.to_(q|k|v)\.")
_DIT_KNOWN = re.compile(
    r"^(video_patch_proj|condition_proj|time_embedder|token_refiner|blocks|final_layer\.(norm|adaln_proj|video_out))\."
)
_DIT_UNUSED = re.compile(r"^(rope\.inv_freq|audio_\w+\..*|final_layer\.audio_out\..*)$")
_VAE_UNUSED = re.compile(r"^decoder\.mask_token$")


def _from_diffusers(stored: Mapping[str, TensorSource], names: Names) -> dict[str, TensorSource]:
    """Our names for diffusers': queries, keys and values joined, halves of gated layers exchanged."""
    sources: dict[str, TensorSource] = {}
    split: dict[str, dict[str, TensorSource]] = {}
    for name, source in stored.items():
        part = _SPLIT_QKV.search(name)
        ours = names.ours(_SPLIT_QKV.sub(f".{names.fused}.", name))
        if part:
            split.setdefault(ours, {})[part[1]] = source
        else:
            sources[ours] = _then(source, swap_halves, by_rows=True) if f".{names.gated}." in ours else source
    for ours, parts in split.items():
        if parts.keys() == {"q", "k", "v"}:
            sources[ours] = _join([parts["q"], parts["k"], parts["v"]], torch.cat, by_rows=True)
    return sources


def _dit_map(stored: Mapping[str, TensorSource], shapes: Shapes, config: DiTConfig) -> TensorMap:
    unused = frozenset(name for name in shapes if _DIT_UNUSED.match(name))
    used = {name: source for name, source in stored.items() if name not in unused}
    if any(name.startswith("transformer_blocks.") for name in used):
        sources = _from_diffusers(used, DIT_NAMES)
    else:
        sources = dict(used)
        # Files with the modulation as a curve come from ComfyUI, which stacks the rows under the original
        # name.
        if config.qkv_rows == "interleaved" and "adaln_t_table" not in shapes:
            sources |= _stacked(sources, DIT_NAMES.fused, config.num_attention_heads)
    return TensorMap(_with_heads(sources, shapes, config), unused)


def _vae_map(stored: Mapping[str, TensorSource], shapes: Shapes, config: VAEConfig) -> TensorMap:
    unused = frozenset(name for name in shapes if _VAE_UNUSED.match(name))
    used = {name: source for name, source in stored.items() if name not in unused}
    if any(name.startswith("encoder.down_blocks.") for name in used):
        sources = _from_diffusers(used, VAE_NAMES)
    else:
        sources = dict(used)
        if config.qkv_rows == "interleaved":
            sources |= _stacked(sources, VAE_NAMES.fused, config.decoder_num_attention_heads)
    for name, source in sources.items():
        if len(shapes[source.names[0]]) == 5:
            sources[name] = _then(source, last_tap)
    return TensorMap(sources, unused)


def _stacked(sources: Mapping[str, TensorSource], layer: str, heads: int) -> dict[str, TensorSource]:
    """The fused layers of that name, their rows in order: all queries, all keys, all values."""
    fused = {name: source for name, source in sources.items() if f".{layer}." in name}
    return {
        name: _then(source, lambda rows: stack_qkv_rows(rows, heads), by_rows=True)
        for name, source in fused.items()
    }


def _with_heads(
    sources: dict[str, TensorSource], shapes: Shapes, config: DiTConfig
) -> Mapping[str, TensorSource]:
    """The sources with the heads of single steps under our names, whatever form they are stored in.

    Their published names are unknown, so they are found by shape: (a) one [row, C] layer for each, (b) one
    [n, row, C] stack, (c) one [n * row, C] bank in place of the base layer. n is the number of steps, or one
    more with the base layer in front.
    """
    base, rows, width = "final_layer.video_out.weight", config.row_size, config.hidden_size
    if not config.pdd_heads:
        return sources
    shape_of = {ours: shapes[source.names[0]] for ours, source in sources.items()}
    bank = shape_of.get(base, ())
    if len(bank) == 2 and bank[0] > rows and bank[0] % rows == 0:
        return _heads_of_bank(sources, bank[0] // rows, config)
    stacks = [name for name, shape in shape_of.items() if len(shape) == 3 and shape[1:] == (rows, width)]
    single = [
        name
        for name, shape in shape_of.items()
        if shape == (rows, width) and name.endswith(".weight") and not _DIT_KNOWN.match(name)
    ]
    if len(stacks) == 1:
        found, count = stacks, shape_of[stacks[0]][0]
        biases = [found[0].removesuffix("weight") + "bias"]
        join = _first_of
    else:
        found, count = sorted(single, key=_numbers_in), len(single)
        biases = [name.removesuffix("weight") + "bias" for name in found]
        join = torch.stack
    if not found or not all(name in sources for name in biases):
        return sources  # the loader will say that the heads are missing
    skip = _base_entries(count, config)
    heads = {
        "final_layer.heads.weight": _then(_join([sources[n] for n in found], join), lambda t: t[skip:]),
        "final_layer.heads.bias": _then(_join([sources[n] for n in biases], join), lambda t: t[skip:]),
    }
    rest = {name: source for name, source in sources.items() if name not in {*found, *biases}}
    return {**rest, **heads}


def _heads_of_bank(
    sources: dict[str, TensorSource], count: int, config: DiTConfig
) -> Mapping[str, TensorSource]:
    """Heads stored below each other in the base layer, whole or as offsets to the first."""
    skip = _base_entries(count, config)
    weight, bias = sources["final_layer.video_out.weight"], sources["final_layer.video_out.bias"]

    def whole(parts: list[Tensor], which: int) -> Tensor:
        shape = count, config.row_size
        blocks = [part.reshape(*shape, *part.shape[1:]) for part in parts]  # [n, row, C] and [n, row]
        norms = blocks[0].flatten(1).float().norm(dim=1)
        offsets = bool(norms[1:].mean() < OFFSET_NORM * norms[0])
        full = blocks[which]
        return torch.cat([full[:1], full[1:] + full[:1]]) if offsets else full

    both = [weight, bias]
    return {
        **sources,
        "final_layer.heads.weight": _join(both, lambda parts: whole(parts, 0)[skip:]),
        "final_layer.heads.bias": _join(both, lambda parts: whole(parts, 1)[skip:]),
        "final_layer.video_out.weight": _then(weight, lambda t: t[: config.row_size]),
        "final_layer.video_out.bias": _then(bias, lambda t: t[: config.row_size]),
    }


def _base_entries(count: int, config: DiTConfig) -> int:
    """How many of the stored heads are the base layer in front of the steps' own: 0 or 1."""
    if count - config.pdd_heads in (0, 1):
        return count - config.pdd_heads
    raise WeightsError(
        f"the checkpoint holds {count} output heads, its config asks for {config.pdd_heads}: there must be "
        "one for each step, or one more with the base layer. Correct pdd_heads in transformer/config.json."
    )


def _first_of(tensors: list[Tensor]) -> Tensor:
    return tensors[0]


def _numbers_in(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]
