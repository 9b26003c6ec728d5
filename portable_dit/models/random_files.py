"""What random checkpoints of all families have in common: numbers, shards, indexes. The rest is a family's.

A tensor's numbers follow from a key alone, and each is drawn and written on its own, so that the full size
needs the memory of one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from portable_dit.errors import WeightsError, near

T = TypeVar("T")


@dataclass(frozen=True)
class PlannedFile:
    """One safetensors file: its path in the checkpoint, and name -> (dtype, shape) of its tensors."""

    path: str
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    bytes: int


def choose(kind: str, name: str, known: Mapping[str, T]) -> T:
    """What goes by that name. Raises WeightsError with the near name."""
    if name not in known:
        raise WeightsError(f"{kind} {name!r} is not known.{near(name, list(known))}")
    return known[name]


def require_new(folder: Path) -> None:
    """Raises WeightsError when there is something in a folder already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(f"{folder}: there is something already. Name a new or empty folder.")


def in_shards(sized: Iterable[tuple[T, int]], limit: int | None) -> list[list[T]]:
    """Things and their bytes, in order, in lists of about `limit` bytes; None puts all in one."""
    shards: list[list[T]] = [[]]
    total = 0
    for thing, size in sized:
        if limit is not None and shards[-1] and total + size > limit:
            shards.append([])
            total = 0
        shards[-1].append(thing)
        total += size
    return shards


def draw(key: str, shape: Sequence[int]) -> Tensor:
    """Standard normal numbers, float32, by a generator of the key's own."""
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(tuple(shape), generator=generator)


def as_parameter(name: str, noise: Tensor) -> Tensor:
    """Normal numbers as what a model may have: matrices of variance 1 / K, norms near one, small biases.

    It may be written into the noise.
    """
    if noise.dim() > 1:
        return noise.mul_(math.prod(noise.shape[1:]) ** -0.5)
    return noise.mul_(0.02) if name.endswith("bias") else noise.mul_(0.1).add_(1.0)


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor on the host as the bytes of a file."""
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def write_index(folder: Path, stem: str, files: Sequence[PlannedFile]) -> None:
    """The index of a component's shards, which lie in the folder."""
    places = {tensor: Path(file.path).name for file in files for tensor in file.tensors}
    total = {"total_size": sum(file.bytes for file in files)}
    text = {"metadata": total, "weight_map": dict(sorted(places.items()))}
    write_json(folder / f"{stem}.safetensors.index.json", text)


def write_json(path: Path, value: Any) -> None:
    """A JSON file, with the folders around it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
