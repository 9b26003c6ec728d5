"""LoRA: adapters, added to the DiT's weights while these are loaded.

An adapter brings two small matrices for each layer that it changes, and the layer's weight becomes
W + scale * alpha / R * up @ down (arXiv 2106.09685). That is added in float32 before a weight is rounded or
encoded, so drawing costs nothing more, and every format, layout and offload works as it does without.
Adapters are named as trainers name them, in the dialect of whatever checkpoint they were trained on; the
family says where each dialect's rows lie in our parameters.

Letters: N out features, K in features, R rank.
"""

from __future__ import annotations

import hashlib
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
SUFFIX = ".safetensors"
ROWS_AT_ONCE = 4096
LARGEST = 3.4028234663852886e38  # of float32
MOST_TIMES = 1000  # as large as the weight; what adapters are trained for is a part of it
_PART = re.compile(
    r"^(?P<layer>.+)\.(?:(?P<down>lora_A|lora_down|lora\.down)|(?P<up>lora_B|lora_up|lora\.up))"
    r"(?:\.default)?(?:\.weight)?$"
)
_TEXT_ENCODER = re.compile(r"^(text_encoder|lora_te|te\d?_)")
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
# What PEFT (0.21) calls a way of training, and how else it would draw than W + up @ down of this file.
OTHER_WAYS = {
    "use_dora": "DoRA", "use_qalora": "QALoRA", "use_bdlora": "BD-LoRA", "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA", "arrow_config": "Arrow, which chooses among adapters",
    "alora_invocation_tokens": "aLoRA, which begins at a token", "lora_bias": "changes of biases",
    "layer_replication": "layers that are repeated", "modules_to_save": "layers that were trained whole",
    "trainable_token_indices": "rows of an embedding", "fan_in_fan_out": "weights that are stored turned",
    "target_parameters": "parameters of experts that lie in one",
}  # fmt: skip
# Beginnings that leave the base's weights as they are; pissa, olora, corda, loftq and lora_ga change them.
PLAIN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
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
        """Tells what it adds from what any other adds: a digest of all its numbers, which are few."""
        digest = hashlib.sha256()
        for layer, low in sorted(self.layers.items()):
            for matrix in (low.down, low.up):
                digest.update(f"{layer} {matrix.dtype} {matrix.shape} {low.scale}\n".encode())
                digest.update(matrix.content())
        return digest.hexdigest()


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

    def require_proportion(self, name: str, weight: Tensor, added: Tensor) -> None:
        """Raises WeightsError where a change is so much larger than its weight that only noise is drawn.

        A weight of zeros may be changed to anything finite.
        """
        before, change = _largest(weight), _largest(added)
        if not change <= (MOST_TIMES * before if before else LARGEST):  # NaN is no more than anything
            files = ", ".join(sorted({low.up.path.name for low, _ in self.parts}))
            raise WeightsError(
                f"lora: {files}: it adds up to {change:.2g} to {name}, whose values are up to {before:.2g}. "
                f"More than {MOST_TIMES} times as much draws noise. Say a smaller scale."
            )


@dataclass(frozen=True, eq=False)
class Additions:
    """All that is added, by the name of our parameter, and by which adapters."""

    changes: Mapping[str, Change] = field(default_factory=dict)
    adapters: tuple[Adapter, ...] = ()


def _largest(tensor: Tensor) -> float:
    """Of its magnitudes; 0 of none, NaN where there is one."""
    if tensor.numel() == 0:
        return 0.0
    least, most = (bound.float().item() for bound in tensor.aminmax())
    return max(-least, most) if least == least else least


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
    for layer, (down, up) in pairs.items():
        _require_low_rank(f"lora: {path}: {layer}", down, up)
    layers = {}
    for layer, factor in _factors(file, pairs).items():
        if abs(scale * factor) > LARGEST:
            raise WeightsError(f"lora: {path}: {layer}: a scale of {scale * factor:g} is beyond float32.")
        layers[layer] = LowRank(*pairs[layer], scale * factor)
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
    return Additions(changes, tuple(adapters))


def has_config(name: str, folder: Sequence[str]) -> bool:
    """Whether a trainer's config is that of an adapter of this name. folder: the names beside it."""
    return name in FILE_NAMES or [other for other in folder if other.endswith(SUFFIX)] == [name]


def adapter_among(names: Sequence[str], where: str) -> str:
    """The one adapter among a folder's files. Raises WeightsError where there is none or several."""
    named = [name for name in FILE_NAMES if name in names]
    found = named or [name for name in names if name.endswith(SUFFIX)]
    if len(found) == 1:
        return found[0]
    there = ", ".join(found) or "none"
    raise WeightsError(f"lora: {where}: one {SUFFIX} file is needed, and it has {there}. Name the file.")


def _names_in(folder: Path) -> list[str]:
    """Of its files, sorted."""
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def _file_in(folder: Path) -> Path:
    """The one adapter of a folder."""
    return folder / adapter_among(_names_in(folder), str(folder))


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
    alphas = [name for name in file.tensors if name.endswith(".alpha")]
    if lost := [name for name in alphas if name.removesuffix(".alpha") not in downs.keys() | ups.keys()]:
        raise WeightsError(listed(f"lora: {file.path}: no matrices of these layers are in it:", lost))
    if not downs and not ups:
        raise WeightsError(f"lora: {file.path}: no lora_A and lora_B, nor lora_down and lora_up, are in it.")
    if alone := sorted(downs.keys() ^ ups.keys()):
        raise WeightsError(listed(f"lora: {file.path}: one of the two matrices is missing:", alone))
    if text := [layer for layer in downs if _TEXT_ENCODER.match(layer)]:
        raise WeightsError(
            listed(f"lora: {file.path}: it changes the text encoder, and only the DiT is changed:", text)
            + "\nExport it without the text encoder."
        )
    if len(prefixes := sorted({_prefix(layer) for layer in downs})) > 1:
        raise WeightsError(
            listed(
                f"lora: {file.path}: its layers do not all begin alike, so it may be two in one:", prefixes
            )
        )
    return {layer: (downs[layer], ups[layer]) for layer in downs}


def _require_low_rank(what: str, down: StoredTensor, up: StoredTensor) -> None:
    """Raises WeightsError for two matrices that are no [R, K] and [N, R] of finite numbers."""
    if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1] or not down.shape[0]:
        shapes = f"{list(down.shape)} and {list(up.shape)}"
        raise WeightsError(f"{what}: {shapes}, where [R, K] and [N, R] are needed.")
    if not {down.dtype, up.dtype} <= set(FLOATS):
        raise WeightsError(f"{what}: {down.dtype} and {up.dtype}. Known: {', '.join(FLOATS)}.")
    if not (down.is_finite() and up.is_finite()):
        raise WeightsError(f"{what}: NaN or infinite values. Its training went astray.")


def _factors(file: TensorFile, pairs: Mapping[str, tuple[StoredTensor, StoredTensor]]) -> dict[str, float]:
    """What each layer's product is multiplied by: alpha / R, or alpha / sqrt(R) where the trainer says so."""
    config = _trainer_config(file)
    given = config.get("lora_alpha", file.metadata.get("lora_alpha", file.metadata.get("ss_network_alpha")))
    found = {}
    for layer, (down, _) in pairs.items():
        rank, own = down.shape[0], file.tensors.get(f"{layer}.alpha")
        try:
            said = int(_of_layer(layer, config.get("rank_pattern"), config.get("r") or rank))
            other = _of_layer(layer, config.get("alpha_pattern"), rank if given is None else given)
            alpha = float(other) if own is None else _number(own)
        except (TypeError, ValueError, AttributeError, OverflowError, re.error) as error:
            problem = f"alpha or rank of {layer} cannot be read ({error})."
            raise WeightsError(f"lora: {file.path}: {problem}") from error
        if said != rank:
            problem = f"{layer} has rank {rank}, and its config says {said}. Export both together."
            raise WeightsError(f"lora: {file.path}: {problem}")
        if not math.isfinite(alpha):
            raise WeightsError(f"lora: {file.path}: alpha of {layer} is {alpha}.")
        found[layer] = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return found


def _of_layer(layer: str, patterns: Mapping[str, Any] | None, other: Any) -> Any:
    """What PEFT's patterns say of a layer: the first that its name ends in, else the other."""
    named = (patterns or {}).items()
    return next((value for key, value in named if re.match(rf"(.*\.)?({key})$", _bare(layer))), other)


def _number(stored: StoredTensor) -> float:
    """Of a tensor that holds one."""
    from portable_dit.weights import as_tensor

    if math.prod(stored.shape) != 1:
        raise ValueError(f"a tensor of {list(stored.shape)}, where one number is needed")
    return float(as_tensor(stored).double())


def _trainer_config(file: TensorFile) -> Mapping[str, Any]:
    """What the trainer's library wrote beside the matrices: into the header, or into a file next to it."""
    text = file.metadata.get("lora_adapter_metadata")
    beside = file.path.with_name(CONFIG)
    if text is None and beside.is_file() and has_config(file.path.name, _names_in(beside.parent)):
        try:
            text = beside.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise WeightsError(
                f"lora: {beside}: cannot be read ({error.strerror}). Check its mode."
            ) from error
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
    if problems := _other_ways(config):
        raise WeightsError(
            listed(f"lora: {file.path}: only plain LoRA is read, and its config says", problems)
        )
    return config


def _other_ways(config: Mapping[str, Any]) -> list[str]:
    """Everything that a config says and that would draw otherwise than the two matrices alone."""
    found = [f"{key}: {what}" for key, what in OTHER_WAYS.items() if config.get(key)]
    kind, bias = config.get("peft_type") or "LORA", config.get("bias") or "none"
    beginning = config.get("init_lora_weights")
    found += [f"peft_type: {kind}"] if kind != "LORA" else []
    found += [f"bias: {bias}, changes of biases"] if bias != "none" else []
    if (beginning.lower() if isinstance(beginning, str) else beginning) not in PLAIN_BEGINNINGS:
        found.append(
            f"init_lora_weights: {beginning}, which changes the base too. Save it with "
            "path_initial_model_for_weight_conversion"
        )
    return found


def _prefix(layer: str) -> str:
    """What a trainer has put before the layer's name, "" for nothing."""
    return next((prefix for prefix in PREFIXES if layer.startswith(prefix)), "")


def _bare(layer: str) -> str:
    """The layer's name in its dialect."""
    return layer.removeprefix(_prefix(layer))


def _dialect_of(
    adapter: Adapter, dialects: Mapping[str, Mapping[str, StoredRows]]
) -> Mapping[str, StoredRows]:
    """The rows of each layer, in the first dialect that knows all of them."""
    fewest: list[str] | None = None
    for known in _tables(adapter, dialects):
        unknown = [layer for layer in adapter.layers if _bare(layer) not in known]
        if not unknown:
            _require_once(adapter, known)
            return known
        fewest = unknown if fewest is None or len(unknown) < len(fewest) else fewest
    title = f"lora: {adapter.path}: made for another model, or for layers that are not plain matrices:"
    raise WeightsError(listed(title, fewest or []))


def _require_once(adapter: Adapter, known: Mapping[str, StoredRows]) -> None:
    """Raises WeightsError where two names mean one matrix, which would be changed twice."""
    first: dict[int, str] = {}
    twice = [
        f"{layer} and {other}"
        for layer in adapter.layers
        if (other := first.setdefault(id(known[_bare(layer)]), layer)) != layer
    ]
    if twice:
        raise WeightsError(listed(f"lora: {adapter.path}: two names of one and the same layer:", twice))


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
