"""Where the shipped model and its evidence live in the repository, and which weights a figure belongs to."""

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
WEIGHTS = ROOT / "portable_dit" / "models" / "h3_mini"
GOLDEN = ROOT / "tests" / "data" / "golden"
IMAGES = ROOT / "docs" / "images"
FIGURES = ROOT / "docs" / "h3-mini"
PAGE = ROOT / "docs" / "h3-mini.md"


def weights_digest(folder: Path = WEIGHTS) -> str:
    """Sixteen hex digits that change with any tensor of the checkpoint, from the hashes of its manifest."""
    files = json.loads((folder / "manifest.json").read_text())["files"]
    hashes = [files[name]["sha256"] for name in sorted(files) if name.endswith(".safetensors")]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]
