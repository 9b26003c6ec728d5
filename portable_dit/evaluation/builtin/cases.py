"""The cases: prompts, references and exact targets of 256 pixels as lossless WebP, and the judge's weights.

Written by the training (`python -m training.gates export-tests`, in the repository).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from portable_dit.evaluation.builtin.judge import Judge, load_judge
from portable_dit.evaluation.builtin.scenes import COLOR_NAMES, STYLES, Background, Placed, Record, Scene

CASES = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Case:
    """One record with its pictures.

    references: uint8 [H, W, 3]. target: float [3, H, W], None for text to image.
    """

    id: str
    record: Record
    held_out: bool
    references: tuple[np.ndarray, ...]
    target: Tensor | None


@dataclass(frozen=True)
class Cases:
    """All cases in their order, and the judge that scores them.

    concepts: the usual name of each.
    """

    cases: tuple[Case, ...]
    judge: Judge
    concepts: tuple[str, ...]

    def where(self, wanted: Callable[[Case], bool]) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if wanted(case))


def load_cases(folder: Path) -> Cases:
    """What `export_cases` wrote. Raises ValueError when it was written for another world than this code's."""
    world = json.loads((folder / "cases.json").read_text())
    if tuple(world["colors"]) != COLOR_NAMES or tuple(world["styles"]) != STYLES:
        raise ValueError(f"{folder}: its colours and styles are not those of builtin.scenes. Export it anew.")
    cases = tuple(_case(entry, folder) for entry in world["cases"])
    return Cases(cases, load_judge(folder / "judge.safetensors"), tuple(world["concepts"]))


def as_tensor(pixels: np.ndarray) -> Tensor:
    """uint8 [H, W, 3] -> float32 [3, H, W] in 0..1."""
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).float() / 255


def _case(entry: Mapping[str, Any], folder: Path) -> Case:
    record = Record(
        caption=entry["caption"],
        target=_scene(entry["target"]),
        references=tuple(_scene(scene) for scene in entry["references"]),
        kind=entry["kind"],
        edit=entry["edit"],
        named=tuple(entry["named"]),
    )
    references = tuple(_read(folder / name) for name in entry.get("source_files", ()))
    target = as_tensor(_read(folder / entry["target_file"])) if references else None
    return Case(entry["id"], record, entry["held_out"], references, target)


def _scene(entry: Mapping[str, Any]) -> Scene:
    return Scene(
        background=Background(**entry["background"]),
        objects=tuple(Placed(**placed) for placed in entry["objects"]),
        black_and_white=entry["black_and_white"],
    )


def _read(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))
