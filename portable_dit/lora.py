"""LoRA: adapters, added to the DiT's weights while these are loaded.

An adapter brings two small matrices for each layer that it changes, and the layer's weight becomes
W + scale * alpha / R * up @ down (arXiv 2106.09685). That is added in float32 before a weight is rounded or
encoded, so drawing costs nothing more, and every format, layout and offload works as it does without.
Adapters are named as trainers name them, in the dialect of whatever checkpoint they were trained on; the
family says where each dialect's rows lie in our parameters.

Letters: N out features, K in features, R rank.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable_dit.errors import WeightsError
from portable_dit.safetensors_file import StoredTensor, TensorFile, listed, open_tensor_file

if TYPE_CHECKING:
    from torch import Tensor

    from portable_dit.models.spec import StoredRows

# What trainers put before every layer's name. Those of ComfyUI's world mean its order of fused rows.
COMFY_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "lora_unet_")
PREFIXES = ("base_model.model.", "transformer.", "lora_transformer_", *COMFY_PREFIXES)
COMFY = "comfy"  # what families call that dialect
FILE_NAMES = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")  # PEFT's and diffusers'
CONFIG = "adapter_config.json"
ROWS_AT_ONCE = 4096
_PART = re.compile(
    r"^(?P<layer>.+)\.(?:(?P<down>lora_A|lora_down|lora\.down)|(?P<up>lora_B|lora_up|lora\.up))"
    r"(?:\.default)?(?:\.weight)?$"
)
_TEXT_ENCODER = re.compile(r"^(text_encoder|lora_te|te\d?_)")
# Parts of names by which other kinds of adapters are known.
OTHER_KINDS = {
    "lora_magnitude_vector": "DoRA", "dora_scale": "DoRA", "hada_": "LoHa", "lokr_": "LoKr", "oft_": "OFT",
    "lora_embedding": "LoRA of an embedding", "lora_B.bias": "changes of a bias",
    ".diff": "whole differences",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class LowRank:
    """One layer's change. down: [R, K], up: [N, R]; scale: all that the product is multiplied by."""

    down: StoredTensor
    up: StoredTensor
    scale: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """One file. layers: by the name that the file gives each."""

    path: Path
    layers: Mapping[str, LowRank]

    @property
    def identity(self) -> str:
        """Tells what it adds from what another file or scale adds."""
        from portable_dit.weight_cache import fingerprint

        matrices = {m.name: m for low in self.layers.values() for m in (low.down, low.up)}
        return f"{fingerprint(matrices)} {sorted((name, low.scale) for name, low in self.layers.items())}"


@dataclass(frozen=True, eq=False)
class Change:
    """What is added to one parameter of `shape` [N, K]; rows: of the parameter, one for each row of `up`."""

    shape: tuple[int, int]
    parts: list[tuple[LowRank, Tensor]] = field(default_factory=list)

    def on(self, device: str) -> Tensor:
        """The sum of all adapters' changes, float32 [N, K], made on that device."""
        import torch

        from portable_dit.weights import as_tensor

        total = torch.zeros(self.shape, device=device)
        for low, rows in self.parts:
            up, down = (as_tensor(part).to(device).float() for part in (low.up, low.down))
            places = rows.to(device)
            for some in range(0, len(rows), ROWS_AT_ONCE):  # so that the product never lies there whole
                few = slice(some, some + ROWS_AT_ONCE)
                total.index_add_(0, places[few], up[few] @ down, alpha=low.scale)
        return total


@dataclass(frozen=True, eq=False)
class Additions:
    """All that is added, by the name of our parameter. identities: of the adapters, for a cache."""

    changes: Mapping[str, Change] = field(default_factory=dict)
    identities: tuple[str, ...] = ()


def split_scale(words: str) -> tuple[str, float]:
    """ "style.safetensors:0.8" as the place and 0.8; without a number 1. Raises WeightsError."""
    place, colon, number = words.rpartition(":")
    try:
        scale = float(number) if colon else 1.0
    except ValueError:
        return words, 1.0  # the colon is one of the place's
    if (not place and colon) or not math.isfinite(scale):
        raise WeightsError(f"lora: {words}: say a file and a finite number, as in style.safetensors:0.8.")
    return (place, scale) if colon else (words, scale)


def read_adapter(place: Path, scale: float) -> Adapter:
    """The adapter in a file, or in a folder as trainers write one.

    Raises WeightsError for what is no LoRA, is damaged, or has a value that is not finite.
    """
    path = _file_in(place) if place.is_dir() else place
    file = open_tensor_file(path)
    pairs = _pairs(file)
    factors = _factors(file, pairs)
    layers = {}
    for layer, (down, up) in pairs.items():
        if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1] or not down.shape[0]:
            shapes = f"{list(down.shape)} and {list(up.shape)}"
            raise WeightsError(f"lora: {path}: {layer}: {shapes}, where [R, K] and [N, R] are needed.")
        if not (down.is_finite() and up.is_finite()):
            raise WeightsError(f"lora: {path}: {layer}: NaN or infinite values. Its training went astray.")
        layers[layer] = LowRank(down, up, scale * factors[layer])
    return Adapter(path, layers)


def add(
    adapters: Sequence[Adapter],
    dialects: Mapping[str, Mapping[str, StoredRows]],
    shapes: Mapping[str, tuple[int, ...]],
) -> Additions:
    """What all adapters together add.

    dialects: where each dialect's stored matrices lie in our parameters, the checkpoint's own first. shapes:
    of our parameters. Raises WeightsError for layers that no dialect knows or that are of another size.
    """
    changes: dict[str, Change] = {}
    for adapter in adapters:
        known = _dialect_of(adapter, dialects)
        problems = []
        for layer, low in adapter.layers.items():
            found = known[_bare(layer)]
            rows, columns = shapes[found.parameter]
            wanted, given = [len(found.rows), columns], [low.up.shape[0], low.down.shape[1]]
            if given != wanted:
                problems.append(f"{layer}: it changes {given}, and the layer is {wanted}")
                continue
            change = changes.setdefault(found.parameter, Change((rows, columns)))
            change.parts.append((low, found.rows))
        if problems:
            title = f"lora: {adapter.path}: made for a model of another size or form."
            raise WeightsError(listed(title, problems))
    return Additions(changes, tuple(adapter.identity for adapter in adapters))


def _file_in(folder: Path) -> Path:
    """The one adapter of a folder."""
    named = [folder / name for name in FILE_NAMES if (folder / name).is_file()]
    found = named or sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    there = ", ".join(path.name for path in found) or "none"
    raise WeightsError(f"lora: {folder}: one .safetensors file is needed, and it has {there}. Name the file.")


def _pairs(file: TensorFile) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """(down, up) of every layer."""
    downs: dict[str, StoredTensor] = {}
    ups: dict[str, StoredTensor] = {}
    strange = []
    for name, tensor in file.tensors.items():
        part = _PART.match(name)
        found = None if part is None else downs if part["down"] else ups
        if part is not None and found is not None and part["layer"] not in found:
            found[part["layer"]] = tensor
        elif not name.endswith(".alpha"):
            strange.append(name)
    if strange:
        kind = next((kind for mark, kind in OTHER_KINDS.items() if any(mark in n for n in strange)), None)
        what = f"{kind}, and" if kind else "tensors that are no part of a LoRA, and"
        raise WeightsError(
            listed(f"lora: {file.path}: {what} only LoRA's pairs of matrices are read:", strange)
        )
    if not downs and not ups:
        raise WeightsError(f"lora: {file.path}: no lora_A and lora_B, nor lora_down and lora_up, are in it.")
    if alone := sorted(downs.keys() ^ ups.keys()):
        raise WeightsError(listed(f"lora: {file.path}: one of the two matrices is missing:", alone))
    if text := [layer for layer in downs if _TEXT_ENCODER.match(layer)]:
        raise WeightsError(
            listed(f"lora: {file.path}: it changes the text encoder, and only the DiT is changed:", text)
            + "\nExport it without the text encoder."
        )
    return {layer: (downs[layer], ups[layer]) for layer in downs}


def _factors(file: TensorFile, pairs: Mapping[str, tuple[StoredTensor, StoredTensor]]) -> dict[str, float]:
    """What each layer's product is multiplied by: alpha / R, or alpha / sqrt(R) where the trainer says so."""
    config = _trainer_config(file)
    patterns = config.get("alpha_pattern") or {}
    given = config.get("lora_alpha", file.metadata.get("lora_alpha", file.metadata.get("ss_network_alpha")))
    found = {}
    for layer, (down, _) in pairs.items():
        rank = down.shape[0]
        try:
            named = (alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", _bare(layer)))
            own = file.tensors.get(f"{layer}.alpha")
            alpha = _number(own) if own is not None else float(next(named, rank if given is None else given))
        except (TypeError, ValueError, AttributeError, re.error) as error:
            raise WeightsError(f"lora: {file.path}: alpha of {layer} cannot be read ({error}).") from error
        if not math.isfinite(alpha):
            raise WeightsError(f"lora: {file.path}: alpha of {layer} is {alpha}.")
        found[layer] = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return found


def _number(stored: StoredTensor) -> float:
    """Of a tensor that holds one."""
    from portable_dit.weights import as_tensor

    if math.prod(stored.shape) != 1:
        raise ValueError(f"a tensor of {list(stored.shape)}, where one number is needed")
    return float(as_tensor(stored).double())


def _trainer_config(file: TensorFile) -> Mapping[str, Any]:
    """What the trainer's library wrote beside the matrices: into the header, or into a file next to it."""
    beside = file.path.with_name(CONFIG)
    text = file.metadata.get("lora_adapter_metadata")
    if text is None and file.path.name in FILE_NAMES and beside.is_file():
        text = beside.read_text(encoding="utf-8", errors="replace")
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise WeightsError(f"lora: {file.path}: its config is no JSON object. Export it again.")
    # Saved with a whole pipeline, its keys begin with the component's name.
    config = {key.removeprefix("transformer."): value for key, value in config.items()}
    if config.get("use_dora"):
        raise WeightsError(f"lora: {file.path}: DoRA, and only LoRA is read. Export it as LoRA.")
    return config


def _bare(layer: str) -> str:
    """The layer's name in its dialect."""
    return layer.removeprefix(next((p for p in PREFIXES if layer.startswith(p)), ""))


def _dialect_of(
    adapter: Adapter, dialects: Mapping[str, Mapping[str, StoredRows]]
) -> Mapping[str, StoredRows]:
    """The rows of each layer, in the first dialect that knows all of them."""
    fewest: list[str] | None = None
    for known in _tables(adapter, dialects):
        unknown = [layer for layer in adapter.layers if _bare(layer) not in known]
        if not unknown:
            return known
        fewest = unknown if fewest is None or len(unknown) < len(fewest) else fewest
    title = f"lora: {adapter.path}: made for another model, or for layers that are not plain matrices:"
    raise WeightsError(listed(title, fewest or []))


def _tables(
    adapter: Adapter, dialects: Mapping[str, Mapping[str, StoredRows]]
) -> Iterator[Mapping[str, StoredRows]]:
    """The dialects in the order of their likelihood, each with its names as they are and with all dots as
    underscores, which one trainer makes of them.
    """
    from_comfy = all(layer.startswith(COMFY_PREFIXES) for layer in adapter.layers)
    for name in sorted(dialects, key=lambda name: not (from_comfy and name == COMFY)):
        plain = {stored.removesuffix(".weight"): rows for stored, rows in dialects[name].items()}
        yield {**{stored.replace(".", "_"): rows for stored, rows in plain.items()}, **plain}
