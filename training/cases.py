"""A small set of gate cases with their pictures, so that a test-suite needs neither atlas nor training data.

Text to image needs no pictures at all; edits bring their references and exact targets as lossless WebP of
256 pixels. The judge comes along. `python -m training.gates export-tests` writes, `load_cases` reads.

Letters: B batch, H W pixels.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from training.gates import MULTI_KINDS, attribute_right, draw, fixed_cases, picture
from training.judge import Judge, load_judge
from training.render import Atlas, render
from training.scenes import COLOR_NAMES, EDIT_MIX, STYLES, Background, Concepts, Placed, Record, Scene

LIMIT_BYTES = 5_000_000
SIZE = 256
# Text to image: kind, split, number of cases.
T2I_CASES = (
    ("single", "train", 40),
    ("pair", "train", 34),
    ("single", "heldout", 30),
    ("pair", "heldout", 16),
    ("placed", "train", 8),
)
EDITS_OF_A_KIND, SEVERAL_OF_A_KIND = 6, 2


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


def export_cases(out: Path, atlas: Atlas, concepts: Concepts, judge_path: Path, *, seed: int = 1) -> int:
    """Writes the folder anew and gives its bytes. Raises ValueError when it would be too large to keep.

    An edit whose exact target the judge gets wrong would measure the judge; the next one takes its place.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    records = [
        (record, split == "heldout")
        for kind, split, count in T2I_CASES
        for record in fixed_cases(seed, kind, count, concepts, split)
    ]
    judge = load_judge(judge_path, atlas.device)
    for kind in EDIT_MIX:
        records += [(record, False) for record in _judged_right(kind, atlas, concepts, judge, seed)]
    for kind in MULTI_KINDS:
        records += [(record, False) for record in fixed_cases(seed, kind, SEVERAL_OF_A_KIND, concepts)]
    entries = []
    for number, (record, held_out) in enumerate(records):
        entry = dataclasses.asdict(record) | {"id": f"{record.kind}-{number:03}", "held_out": held_out}
        if record.references:
            entry["source_files"], entry["target_file"] = _draw(record, entry["id"], atlas, out)
        entries.append(entry)
    world = {
        "colors": COLOR_NAMES,
        "styles": STYLES,
        "concepts": [names[0].name for names in concepts.names],
        "cases": entries,
    }
    (out / "cases.json").write_text(json.dumps(world, separators=(",", ":")) + "\n")
    shutil.copyfile(judge_path, out / "judge.safetensors")
    (out / "judge.safetensors").chmod(0o644)
    total = sum(path.stat().st_size for path in out.iterdir())
    if total > LIMIT_BYTES:
        raise ValueError(f"{out}: {total:,} bytes, at most {LIMIT_BYTES:,}. Export fewer cases.")
    return total


def load_cases(folder: Path) -> Cases:
    """What `export_cases` wrote. Raises ValueError when it was written for another world than this code's."""
    world = json.loads((folder / "cases.json").read_text())
    if tuple(world["colors"]) != COLOR_NAMES or tuple(world["styles"]) != STYLES:
        raise ValueError(
            f"{folder}: its colours and styles are not those of training.scenes. Export it anew."
        )
    cases = tuple(_case(entry, folder) for entry in world["cases"])
    return Cases(cases, load_judge(folder / "judge.safetensors"), tuple(world["concepts"]))


def as_tensor(pixels: np.ndarray) -> Tensor:
    """uint8 [H, W, 3] -> float32 [3, H, W] in 0..1."""
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).float() / 255


def _judged_right(kind: str, atlas: Atlas, concepts: Concepts, judge: Judge, seed: int) -> list[Record]:
    """The first few edits of a kind whose exact targets the judge finds right."""
    records = fixed_cases(seed, kind, 2 * EDITS_OF_A_KIND, concepts)
    sources = draw([record.references[0] for record in records], atlas, SIZE)
    targets = draw([record.target for record in records], atlas, SIZE)
    right = attribute_right(records, targets, sources, targets, judge)
    return [record for record, fits in zip(records, right.tolist(), strict=True) if fits][:EDITS_OF_A_KIND]


def _draw(record: Record, name: str, atlas: Atlas, out: Path) -> tuple[list[str], str]:
    """The exact pictures of an edit as files; gives the names of the references and of the target."""
    scenes: Sequence[Scene] = [*record.references, record.target]
    files = [f"{name}-source{i + 1}.webp" for i in range(len(record.references))] + [f"{name}-target.webp"]
    for file, image in zip(files, render(scenes, atlas, width=SIZE, height=SIZE), strict=True):
        picture(image).save(out / file, lossless=True, quality=100, method=6)
    return files[:-1], files[-1]


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
