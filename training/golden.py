"""Golden pictures: what the engine draws in float32 on the CPU, kept as small PNGs and compared by distance.

    python -m training.golden            how far today's pictures are from the stored ones
    python -m training.golden --write    replaces them; only new weights or a changed schedule are a reason

No hashes: float32 sums differ in their last bits between machines, and pictures by a rounded pixel or two.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from portable_dit.engine import Engine
from portable_dit.image import Pixels
from portable_dit.request import Request
from training.shipped import GOLDEN, weights_digest

LEAST_DB = 45.0
RECORD = "golden.json"


@dataclass(frozen=True)
class Golden:
    """One picture. of: the name of the golden picture that it edits, None for text to image."""

    name: str
    prompt: str
    seed: int
    of: str | None = None


GOLDENS = (
    Golden("one", "a red apple on a sky blue background, 3d style", 0),
    Golden("two", "an owl to the left of a mushroom on a yellow background, flat style", 1),
    Golden("small", "a small guitar on a purple and white striped background, cartoon style", 2),
    Golden("edit", "change the background to green", 3, of="two"),
)


def draw_golden(engine: Engine, golden: Golden, folder: Path) -> Pixels:
    """uint8 [256, 256, 3]; an edit starts from the stored picture, not from today's."""
    references = () if golden.of is None else (folder / f"{golden.of}.png",)
    request = Request(golden.prompt, references=references, size=(256, 256), seed=golden.seed)
    return engine.generate(request).images[0].pixels


def read_golden(golden: Golden, folder: Path = GOLDEN) -> Pixels:
    with Image.open(folder / f"{golden.name}.png") as image:
        return np.asarray(image.convert("RGB"))


def distance_db(a: Pixels, b: Pixels) -> float:
    """PSNR; infinite for equal pictures."""
    error = np.square(a.astype(np.float64) - b.astype(np.float64)).mean() / 255**2
    return float("inf") if error == 0 else float(-10 * np.log10(error))


def golden_weights(folder: Path = GOLDEN) -> str:
    """The digest of the weights that drew the stored pictures."""
    digest: str = json.loads((folder / RECORD).read_text())["weights"]
    return digest


def write_goldens(folder: Path = GOLDEN) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with Engine.load("cpu/h3-mini", {"precision": "float32"}) as engine:
        for golden in GOLDENS:
            Image.fromarray(draw_golden(engine, golden, folder)).save(
                folder / f"{golden.name}.png", optimize=True
            )
    (folder / RECORD).write_text(json.dumps({"weights": weights_digest()}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, default=GOLDEN)
    arguments = parser.parse_args()
    if arguments.write:
        write_goldens(arguments.out)
        return
    with Engine.load("cpu/h3-mini", {"precision": "float32"}) as engine:
        for golden in GOLDENS:
            drawn = draw_golden(engine, golden, arguments.out)
            print(f"{golden.name:8} {distance_db(drawn, read_golden(golden, arguments.out)):.1f} dB")


if __name__ == "__main__":
    main()
