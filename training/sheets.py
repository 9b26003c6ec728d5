"""The contact sheets of docs/: what the shipped weights draw at 512 pixels by the engine, not hand-picked.

python -m training.sheets
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from portable_dit.engine import Engine
from portable_dit.evaluation.builtin.judge import label
from portable_dit.evaluation.builtin.scenes import Record
from training.gates import contact_sheet, draw, fixed_cases
from training.paint import EnginePainter
from training.render import Atlas
from training.scenes import EDIT_MIX, THREE_MIX, Concepts
from training.shipped import IMAGES

SIZE, SEED = 512, 11
LIMIT_BYTES = 400_000


def sheets(concepts: Concepts) -> dict[str, list[Record]]:
    """By file name: records by seed, in the order they came."""
    singles = fixed_cases(SEED, "single", 80, concepts)
    small = [record for record in singles if "small" in record.caption]
    large = [record for record in singles if label([record.target]).layout.item() == 1]
    return {
        "h3-mini-one-object": large[:6] + small[:6],
        "h3-mini-two-objects": fixed_cases(SEED, "pair", 12, concepts),
        "h3-mini-edits": [r for kind in EDIT_MIX for r in fixed_cases(SEED, kind, 1, concepts)],
        "h3-mini-three-references": [r for kind in THREE_MIX for r in fixed_cases(SEED, kind, 2, concepts)],
    }


def write_sheet(painter: EnginePainter, records: Sequence[Record], path: Path) -> None:
    """Text to image: what was drawn. Edits: the references, the exact target, what was drawn."""
    groups = []
    for record, drawn in zip(records, painter(records, SIZE), strict=True):
        exact = [*record.references, record.target] if record.references else []
        groups.append(torch.cat([draw(exact, painter.atlas, SIZE), drawn[None]]) if exact else drawn[None])
    columns = 6 if len(groups[0]) == 1 else 2 * len(groups[0])
    contact_sheet(groups, [record.caption for record in records], path, columns=columns)
    if path.stat().st_size > LIMIT_BYTES:
        raise ValueError(f"{path}: {path.stat().st_size:,} bytes, at most {LIMIT_BYTES:,}.")


def write_sheets(data: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    concepts, atlas = Concepts.load(data / "concepts.json"), Atlas.load(data)
    with Engine.load() as engine:
        painter = EnginePainter(engine, atlas)
        for name, records in sheets(concepts).items():
            write_sheet(painter, records, out / f"{name}.webp")
            print(f"{out / name}.webp", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the contact sheets of docs/ with the shipped weights.")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "build")
    parser.add_argument("--out", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    write_sheets(arguments.data, arguments.out)


if __name__ == "__main__":
    main()
