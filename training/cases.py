"""A small set of gate cases with their pictures, so that a test-suite needs neither atlas nor training data.

Text to image needs no pictures at all; edits bring their references and exact targets as lossless WebP of
256 pixels. The judge comes along. `python -m training.gates export-tests` writes, `load_cases` reads.

Letters: B batch, H W pixels.
"""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from portable_dit.evaluation.builtin.judge import Judge, load_judge
from portable_dit.evaluation.builtin.scenes import COLOR_NAMES, STYLES, Record, Scene
from portable_dit.evaluation.builtin.scores import attribute_right
from training.gates import MULTI_KINDS, draw, fixed_cases, picture
from training.render import Atlas, render
from training.scenes import EDIT_MIX, Concepts

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
