"""Weights as small safetensors parts, written atomically, so that a run that dies loses at most a minute.

A saved set is `NAME-index.json` beside `NAME-<step>-<part>.safetensors`. The index is replaced last, and
only then are the parts of the set before it removed. Parts stay under PART_BYTES, so that they travel
through narrow doors.

Codecs: "float16" halves, "int8" quarters: rows of matrices and filters as int8 with one float16 scale each,
which is also how the shipped weights are stored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PART_BYTES = 31 * 2**19
INT8_MIN_ELEMENTS = 4096  # smaller tensors are not worth a scale
INT8_MIN_COLUMNS = 16
FLOAT_PARTS = (
    "video_patch_proj",
    "time_embedder",
    "final_layer",
    "conv_in",
    "conv_out",
    "quant_conv",
    "decoder.refine",
)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values of the weight's own shape and float16 scales [rows], rows being the first dim."""
    rows = weight.detach().float().reshape(weight.shape[0], -1)
    scale = (rows.abs().amax(dim=1) / 127).clamp(min=2.0**-24).half()
    scale = torch.where(scale == 0, torch.full_like(scale, 2.0**-24), scale)
    values = (rows / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    return values.reshape(weight.shape), scale


def expand_rows(values: Tensor, scale: Tensor) -> Tensor:
    """The float32 weight that int8 values and float16 scales stand for; the shape of the values."""
    rows = values.reshape(values.shape[0], -1).float() * scale.float()[:, None]
    return rows.reshape(values.shape)


def is_large(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is stored as int8 rows: weights of linears, convolutions and tables, not vectors."""
    columns = tensor[0].numel() if tensor.ndim in (2, 4) else 0
    sensitive = any(part in name for part in FLOAT_PARTS)
    return (
        name.endswith("weight")
        and tensor.numel() >= INT8_MIN_ELEMENTS
        and columns >= INT8_MIN_COLUMNS
        and not sensitive
    )


def encode(tensors: Mapping[str, Tensor], codec: str) -> dict[str, Tensor]:
    """The stored form on the CPU; raises ValueError on NaN, infinity or float16 overflow."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if not tensor.is_floating_point():
            stored[name] = tensor.cpu().contiguous()
        elif codec == "int8" and is_large(name, tensor):
            values, scale = quantize_rows(tensor)
            stored[name] = values.cpu().contiguous()
            stored[f"{name}_scale"] = scale.cpu()
        else:
            stored[name] = (
                tensor.to(torch.float32 if codec == "float32" else torch.float16).cpu().contiguous()
            )
    for name, tensor in stored.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"{name}: not finite after storing as {codec}; the training diverged.")
    return stored


def decode(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """float32 tensors from any codec."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith("_scale") and name.removesuffix("_scale") in stored:
            continue
        if f"{name}_scale" in stored:
            tensors[name] = expand_rows(tensor, stored[f"{name}_scale"])
        else:
            tensors[name] = tensor.float() if tensor.is_floating_point() else tensor
    return tensors


def write_json(path: Path, value: Any) -> None:
    """JSON under its final name only once it is whole."""
    temporary = path.with_suffix(path.suffix + ".part")
    temporary.write_text(json.dumps(value, indent=1))
    os.replace(temporary, path)


def save_set(
    folder: Path,
    name: str,
    tensors: Mapping[str, Tensor],
    *,
    step: int,
    codec: str = "float16",
    note: Any = None,
) -> list[Path]:
    """Write one set of weights in parts; returns every file of the set, the index first."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Tensor]] = [{}]
    room = PART_BYTES
    for key, tensor in encode(tensors, codec).items():
        size = tensor.numel() * tensor.element_size()
        if parts[-1] and size > room:
            parts.append({})
            room = PART_BYTES
        parts[-1][key] = tensor
        room -= size
    files = []
    for i, part in enumerate(parts):
        path = folder / f"{name}-{step}-{i}.safetensors"
        temporary = path.with_suffix(".part")
        save_file(part, temporary)
        os.replace(temporary, path)
        files.append(path)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    index = folder / f"{name}-index.json"
    write_json(index, {"step": step, "codec": codec, "files": digests, "note": note})
    for old in folder.glob(f"{name}-*-*.safetensors"):
        if old not in files:
            old.unlink()
    return [index, *files]


def has_set(folder: Path, name: str) -> bool:
    return (folder / f"{name}-index.json").exists()


def read_index(folder: Path, name: str) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((folder / f"{name}-index.json").read_text())
    return index


def load_set(folder: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """float32 tensors and the index of a saved set; refuses files whose digest differs."""
    index = read_index(folder, name)
    stored: dict[str, Tensor] = {}
    for file, digest in index["files"].items():
        path = folder / file
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise ValueError(f"{path}: sha256 differs from {name}-index.json. Fetch the file again.")
        stored.update(load_file(path))
    return decode(stored), index
